"""Ranking: TREC's files are read and written, scores are those of hand, what is wrong is named with file and line."""

import itertools

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.metrics.chance import expected_random_ndcg
from finetune.metrics.ranking import expected_reciprocal_rank, ndcg, reciprocal_rank
from finetune.tasks.registry import build_task
from finetune.data.trec import read_candidates

QRELS = "1 0 a 2\n1 0 b 0\n1 0 z 1\n2 0 c 1\n2 0 a -2\n"
RUN = "1 Q0 a 1 9.5 bm25\n1 Q0 b 2 9 bm25\n2 Q0 b 1 3 bm25\n2 Q0 c 2 2.5 bm25\n2 Q0 a 3 1 bm25\n"


@pytest.fixture
def written(tmp_path):
    """Writes files over usable ones; returns the task."""

    def write(files=None, **settings):
        usual = {
            "queries.tsv": "1\tred fish\n2\tblue fish\n9\tunused\n",
            "documents.jsonl": "".join(f'{{"id": "{name}", "text": "text {name}"}}\n' for name in "abcz"),
            "qrels.txt": QRELS,
            "train.run": RUN,
            "dev.run": RUN,
            "test.run": "1 Q0 c 1 1 x\n1 Q0 a 2 0 x\n",
        }
        for name, text in {**usual, **(files or {})}.items():
            (tmp_path / name).write_text(text)
        named = {"queries": ["queries.tsv"], "documents": ["documents.jsonl"], "qrels": ["qrels.txt"]}
        runs = {split: [f"{split}.run"] for split in ("train", "dev", "test")}
        return build_task("rank", TaskDataConfig(dir=str(tmp_path), **{**named, **runs, **settings}), "last")

    return write


def test_ndcg_by_hand():
    assert ndcg([1, 0, 2], [2, 1, 0], 20) == pytest.approx((1 + 2 / 2) / (2 + 1 / np.log2(3)))
    assert ndcg([1, 0, 2], [2, 1, 0], 2) == pytest.approx(1 / (2 + 1 / np.log2(3)))
    assert ndcg([2, 1], [2, 1, 1], 20) == pytest.approx((2 + 1 / np.log2(3)) / (2 + 1 / np.log2(3) + 1 / 2))
    assert ndcg([3, 2, 1, 0], [0, 1, 2, 3], 20) == 1 and ndcg([0], [0], 20) == 0


def test_ndcg_by_lot_is_that_of_all_orders():
    for grades, judged, cut in (
        ([3, 0, 1, 0, 2], [3, 3, 2, 1], 3),
        ([0, 1], [1], 20),
        ([2], [2, 1], 20),
        ([0, 0], [0], 2),
    ):
        each = [ndcg(order, judged, cut) for order in itertools.permutations(grades)]
        assert expected_random_ndcg(grades, judged, cut) == pytest.approx((np.mean(each), np.var(each)))


def test_reciprocal_rank_by_hand():
    assert [reciprocal_rank(grades) for grades in ([0, 0, 1], [2, 1], [0, 0])] == [1 / 3, 1.0, 0.0]


def test_expected_reciprocal_rank_by_hand():
    assert expected_reciprocal_rank([4], 20) == 15 / 16
    assert expected_reciprocal_rank([0, 1, 3], 20) == pytest.approx(1 / 16 / 2 + 15 / 16 * 7 / 16 / 3)
    assert expected_reciprocal_rank([0, 1, 3], 2) == 1 / 16 / 2
    assert expected_reciprocal_rank([7, 0], 20) == expected_reciprocal_rank([4], 20)  # a grade above 4 counts as 4


def test_ndcg_is_that_of_scikit_learn():
    ndcg_score = pytest.importorskip("sklearn.metrics").ndcg_score
    rng = np.random.default_rng(0)
    for _ in range(20):
        grades, scores = rng.integers(0, 4, 50), rng.random(50)
        ours = ndcg(grades[np.argsort(-scores)].tolist(), grades.tolist(), 20)
        assert ours == pytest.approx(ndcg_score([grades], [scores], k=20))


def test_candidates_become_pairs_with_grades(written):
    task = written()
    train = task.read_split("train")
    assert [(x.group, x.id, x.label) for x in train] == list(zip("11222", "abbca", (2, 0, 0, 1, 0), strict=True))
    assert train[0].texts == ("red fish", "text a") and train[1].place.endswith("train.run, line 2")
    assert task.read_split("test")[0].answer == 0  # of a judged query, what was not judged is not relevant
    open_test = written({"test.run": "9 Q0 a 1 1 x\n"})
    assert open_test.read("test")[0].answer is None
    assert task.parse_example({"query": "q", "document": "d"}, "line 1").texts == ("q", "d")


def test_scores_are_means_over_queries_and_ties_go_as_in_trec_eval(written):
    task = written()
    split = Split("dev", task.read_split("dev"), [])
    found = task.compute_metrics(split, {"logits": np.array([1.0, 2, 5, 5, 0], np.float32)})  # 1: b a; 2: c b a, by their names
    of_1 = (2 / np.log2(3)) / (2 + 1 / np.log2(3))  # z, which is relevant, is not among the candidates
    err = (3 / 16 / 2 + 1 / 16) / 2
    assert found == {
        "ndcg@20": pytest.approx((of_1 + 1) / 2),
        "err@20": pytest.approx(err),
        "mrr": pytest.approx((1 / 2 + 1) / 2),
    }
    assert list(found)[0] == task.main_metric


def test_an_order_by_lot_is_at_chance(written):
    names = [f"d{number}" for number in range(40)]
    qrels = "".join(f"{query} 0 d{number} {int(number < 4)}\n" for query in range(30) for number in range(40))
    run = "".join(f"{query} Q0 {name} 1 1 x\n" for query in range(30) for name in names)
    texts = {
        "queries.tsv": "".join(f"{query}\tq\n" for query in range(30)),
        "documents.jsonl": "".join(f'{{"id": "{name}", "text": "t"}}\n' for name in names),
    }
    task = written({"qrels.txt": qrels, "dev.run": run, **texts})
    split, rng = Split("dev", task.read_split("dev"), []), np.random.default_rng(1)
    level = task.chance_threshold(split)
    above = [task.compute_metrics(split, {"logits": rng.random(1200)})["ndcg@20"] > level for _ in range(40)]
    assert sum(above) <= 4 and level < 0.5
    assert task.compute_metrics(split, {"logits": np.array([float(x.label) for x in split.examples])})["ndcg@20"] == 1


def test_answers_are_written_as_a_run_that_can_be_read(written, tmp_path):
    task = written()
    split = Split("test", task.read_split("test"), [])
    predictions = task.to_predictions(split, {"logits": np.array([-1.25, 3], np.float32)})
    assert predictions[0] == {"id": "c", "query": "1", "prediction": -1.25}
    (path,) = task.write_submission(tmp_path, {"answers": predictions})
    assert path.read_text() == "1 Q0 a 1 3.000000 xlpre\n1 Q0 c 2 -1.250000 xlpre\n"
    assert [one[:2] for one in read_candidates(path)] == [("1", "a"), ("1", "c")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dev.run": "1 Q0 a 1 2\n"}, "dev.run, line 1: has 5 columns, not QUERY Q0 DOCUMENT RANK SCORE TAG"),
        ({"dev.run": "1 Q0 a 1 x t\n"}, "dev.run, line 1: 'x' in 'score' is no number"),
        ({"dev.run": RUN + "1 Q0 a 5 1 t\n"}, "dev.run, line 6: document 'a' is a candidate twice for query '1'"),
        ({"dev.run": "\n"}, "dev.run: holds no candidate"),
        ({"dev.run": "1 Q0 y 1 1 t\n"}, "dev.run, line 1: 'y' is in none of data.documents"),
        ({"dev.run": "7 Q0 a 1 1 t\n"}, "dev.run, line 1: '7' is in none of data.queries"),
        ({"dev.run": "9 Q0 a 1 1 t\n"}, "dev.run, line 1: data.qrels judges nothing for query '9'"),
        ({"qrels.txt": "1 0 a\n"}, "qrels.txt, line 1: has 3 columns, not QUERY 0 DOCUMENT GRADE"),
        ({"qrels.txt": "1 0 a good\n"}, "qrels.txt, line 1: the grade 'good' is no whole number"),
        ({"qrels.txt": "1 0 a --1\n"}, "qrels.txt, line 1: the grade '--1' is no whole number"),
        ({"qrels.txt": "1 0 A 1\n2 0 A 1\n"}, "dev.run: data.qrels grades none of its candidates above 0"),
        ({"qrels.txt": QRELS + "1 0 a 1\n"}, "qrels.txt, line 6: document 'a' is judged twice for query '1'"),
        ({"queries.tsv": "1\tone\n1\ttwo\n"}, "queries.tsv, line 2: the id '1' is there twice"),
        ({"queries.tsv": "1\t\n"}, "queries.tsv, line 1: the text in 'text' is empty"),
        ({"queries.tsv": "1\n"}, "queries.tsv, line 1: has 1 columns, not the 2 of id, text"),
        ({"documents.jsonl": '{"text": "x"}\n'}, "documents.jsonl, line 1: there is no column 'id'"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(written, files, message):
    with pytest.raises(ValueError) as raised:
        written(files).read("dev")
    assert message in str(raised.value)


def test_settings_that_are_missing_or_have_no_place_are_named(written):
    with pytest.raises(ValueError, match="task=rank is read from data.qrels="):
        written(qrels=[]).read("dev")
    with pytest.raises(ValueError, match="task=rank is read from data.dev="):
        written(dev=[]).read("train")
    with pytest.raises(ValueError, match="data.queries=.* has no effect on task=classify"):
        build_task("classify", TaskDataConfig(queries=["a"], text=["text"]), "last")
    with pytest.raises(ValueError, match="data.long_text=memory reads one text, and task=rank several"):
        written(long="memory")
