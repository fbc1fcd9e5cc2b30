"""Ranking: TREC files are read and written, metrics are averaged over queries, errors name file and line."""

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.data.trec import read_candidates
from finetune.tasks.registry import build_task

QRELS = "1 0 a 2\n1 0 b 0\n1 0 z 1\n2 0 c 1\n2 0 a -2\n"
RUN = "1 Q0 a 1 9.5 bm25\n1 Q0 b 2 9 bm25\n2 Q0 b 1 3 bm25\n2 Q0 c 2 2.5 bm25\n2 Q0 a 3 1 bm25\n"


@pytest.fixture
def make_task(tmp_path):
    """Build the task on valid files, some of which may be replaced."""

    def make(files=None, **settings):
        valid = {
            "queries.tsv": "1\tred fish\n2\tblue fish\n9\tunused\n",
            "documents.jsonl": "".join(f'{{"id": "{name}", "text": "text {name}"}}\n' for name in "abcz"),
            "qrels.txt": QRELS,
            "train.run": RUN,
            "dev.run": RUN,
            "test.run": "1 Q0 c 1 1 x\n1 Q0 a 2 0 x\n",
        }
        for name, text in {**valid, **(files or {})}.items():
            (tmp_path / name).write_text(text)
        texts = {"queries": ["queries.tsv"], "documents": ["documents.jsonl"], "qrels": ["qrels.txt"]}
        runs = {split: [f"{split}.run"] for split in ("train", "dev", "test")}
        return build_task("rank", TaskDataConfig(dir=str(tmp_path), **{**texts, **runs, **settings}), "last")

    return make


def test_candidates_become_pairs_with_grades(make_task):
    task = make_task()
    train = task.read_split("train")
    expected = list(zip("11222", "abbca", (2, 0, 0, 1, 0), strict=True))
    assert [(example.group, example.id, example.label) for example in train] == expected
    assert train[0].texts == ("red fish", "text a") and train[1].location.endswith("train.run, line 2")
    assert task.read_split("test")[0].label == 0  # an unjudged document of a judged query is not relevant
    unjudged = make_task({"test.run": "9 Q0 a 1 1 x\n"})
    assert unjudged.read_split("test")[0].label is None
    assert task.parse_example({"query": "q", "document": "d"}, "line 1").texts == ("q", "d")


def test_metrics_are_means_over_queries_and_ties_are_broken_as_in_trec_eval(make_task):
    task = make_task()
    split = Split("dev", task.read_split("dev"), [])
    # the order for query 1 is b a, and for query 2, by name, c b a
    metrics = task.compute_metrics(split, {"logits": np.array([1.0, 2, 5, 5, 0], np.float32)})
    ndcg_of_1 = (2 / np.log2(3)) / (2 + 1 / np.log2(3))  # z, which is relevant, is not among the candidates
    assert metrics == {
        "ndcg@20": pytest.approx((ndcg_of_1 + 1) / 2),
        "err@20": pytest.approx((3 / 16 / 2 + 1 / 16) / 2),
        "mrr": pytest.approx((1 / 2 + 1) / 2),
    }
    assert list(metrics)[0] == task.main_metric


def test_a_random_order_is_at_chance(make_task):
    names = [f"d{number}" for number in range(40)]
    qrels = "".join(f"{query} 0 d{number} {int(number < 4)}\n" for query in range(30) for number in range(40))
    run = "".join(f"{query} Q0 {name} 1 1 x\n" for query in range(30) for name in names)
    texts = {
        "queries.tsv": "".join(f"{query}\tq\n" for query in range(30)),
        "documents.jsonl": "".join(f'{{"id": "{name}", "text": "t"}}\n' for name in names),
    }
    task = make_task({"qrels.txt": qrels, "dev.run": run, **texts})
    split, rng = Split("dev", task.read_split("dev"), []), np.random.default_rng(1)
    threshold = task.chance_threshold(split)
    scores = [task.compute_metrics(split, {"logits": rng.random(1200)})["ndcg@20"] for _ in range(40)]
    assert sum(score > threshold for score in scores) <= 4 and threshold < 0.5
    grades = np.array([float(example.label) for example in split.examples])
    assert task.compute_metrics(split, {"logits": grades})["ndcg@20"] == 1


def test_predictions_are_written_as_a_run_that_can_be_read(make_task, tmp_path):
    task = make_task()
    split = Split("test", task.read_split("test"), [])
    predictions = task.to_predictions(split, {"logits": np.array([-1.25, 3], np.float32)})
    assert predictions[0] == {"id": "c", "query": "1", "prediction": -1.25}
    (path,) = task.write_submission(tmp_path, {"predicted": predictions})
    assert path.read_text() == "1 Q0 a 1 3.000000 xlpre\n1 Q0 c 2 -1.250000 xlpre\n"
    assert [candidate[:2] for candidate in read_candidates(path)] == [("1", "a"), ("1", "c")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dev.run": "1 Q0 a 1 2\n"}, "dev.run, line 1: .*5 columns .*QUERY Q0 DOCUMENT RANK SCORE TAG"),
        ({"dev.run": "1 Q0 a 1 x t\n"}, "dev.run, line 1: 'x' in column 'score'"),
        ({"dev.run": RUN + "1 Q0 a 5 1 t\n"}, "dev.run, line 6: document 'a' .*twice for query '1'"),
        ({"dev.run": "\n"}, "dev.run contains no candidate"),
        ({"dev.run": "1 Q0 y 1 1 t\n"}, "dev.run, line 1: id 'y' .*data.documents"),
        ({"dev.run": "7 Q0 a 1 1 t\n"}, "dev.run, line 1: id '7' .*data.queries"),
        ({"dev.run": "9 Q0 a 1 1 t\n"}, "dev.run, line 1: query '9' .*data.qrels"),
        ({"qrels.txt": "1 0 a\n"}, "qrels.txt, line 1: .*3 columns .*QUERY 0 DOCUMENT GRADE"),
        ({"qrels.txt": "1 0 a good\n"}, "qrels.txt, line 1: grade 'good' .*integer"),
        ({"qrels.txt": "1 0 a --1\n"}, "qrels.txt, line 1: grade '--1' .*integer"),
        ({"qrels.txt": "1 0 A 1\n2 0 A 1\n"}, "dev.run: no candidate .*data.qrels"),
        ({"qrels.txt": QRELS + "1 0 a 1\n"}, "qrels.txt, line 6: document 'a' .*twice for query '1'"),
        ({"queries.tsv": "1\tone\n1\ttwo\n"}, "queries.tsv, line 2: id '1' occurs twice"),
        ({"queries.tsv": "1\t\n"}, "queries.tsv, line 1: .*'text' is empty"),
        ({"queries.tsv": "1\n"}, "queries.tsv, line 1: .*1 column instead of 2 .id, text"),
        ({"documents.jsonl": '{"text": "x"}\n'}, "documents.jsonl, line 1: .*no column 'id'"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(make_task, files, message):
    with pytest.raises(ValueError, match=message):
        make_task(files).read_split("dev")


def test_missing_and_unused_settings_are_refused(make_task):
    with pytest.raises(ValueError, match="data.qrels=.*task=rank"):
        make_task(qrels=None).read_split("dev")
    with pytest.raises(ValueError, match="data.dev=.*task=rank"):
        make_task(dev=None).read_split("train")
    with pytest.raises(ValueError, match="data.queries=.*task=classify"):
        build_task("classify", TaskDataConfig(queries=["a"], text=["text"]), "last")
    with pytest.raises(ValueError, match="data.long_text=memory .*task=rank"):
        make_task(long_text="memory")
