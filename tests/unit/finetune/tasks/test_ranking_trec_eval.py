"""The runs that the ranking task writes are read by an evaluation library, whose trec_eval metrics equal those of the task."""

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.registry import build_task

ir_measures = pytest.importorskip("ir_measures")

N_QUERIES, NAMES = 60, [f"{kind}{number}" for kind in ("d", "D-", "é", "文") for number in range(12)]
MEASURES = {"ndcg@20": ir_measures.nDCG @ 20, "mrr": ir_measures.RR}
GRADES = [0, 1, [-2, 0, 1, 2, 4], [-1, 3], [0, 0, 0, 1]]  # of a query: drawn from a list, or all equal


@pytest.fixture(params=range(6))
def random_ranking(request, tmp_path):
    """A task, its dev split and logits: queries with and without relevant documents, ties, and unjudged documents."""
    rng = np.random.default_rng(request.param)
    qrels, run = [], []
    for query in range(N_QUERIES + 5):  # some queries have no candidates
        grades = np.atleast_1d(GRADES[rng.integers(len(GRADES))])
        for name in rng.permutation(NAMES)[: rng.integers(1, len(NAMES))]:
            qrels.append(f"{query} 0 {name} {rng.choice(grades)}\n")
        if query < N_QUERIES:
            run += [f"{query} Q0 {name} 1 0 x\n" for name in rng.permutation(NAMES)[: rng.integers(1, len(NAMES))]]
    ids = {"documents.tsv": NAMES, "queries.tsv": range(N_QUERIES)}
    files = {"qrels.txt": rng.permutation(qrels), "dev.run": run}
    files |= {file: [f"{text_id}\tt\n" for text_id in file_ids] for file, file_ids in ids.items()}
    for file, lines in files.items():
        (tmp_path / file).write_text("".join(lines), encoding="utf-8")
    texts = {key: [f"{key}.tsv"] for key in ("documents", "queries")}
    data = TaskDataConfig(dir=str(tmp_path), qrels=["qrels.txt"], dev=["dev.run"], **texts)
    task = build_task("rank", data, "last")
    split = Split("dev", task.read_split("dev"), [])
    logits = rng.normal(0, 10 ** rng.uniform(-2, 2), len(split.examples)).round(rng.integers(0, 7)).astype(np.float32)
    return task, split, {"logits": logits}


def test_metrics_equal_those_of_trec_eval_on_the_written_run(random_ranking, tmp_path):
    task, split, outputs = random_ranking
    (file,) = task.write_submission(tmp_path, {"dev": task.to_predictions(split, outputs)})
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.txt")))
    run = list(ir_measures.read_trec_run(str(file)))
    assert len(run) == len(split.examples)
    results = ir_measures.iter_calc(MEASURES.values(), qrels, run)
    expected = {(str(result.measure), result.query_id): result.value for result in results}
    for query in {example.group for example in split.examples}:
        indices = [index for index, example in enumerate(split.examples) if example.group == query]
        query_split = Split("dev", [split.examples[index] for index in indices], [])
        metrics = task.compute_metrics(query_split, {"logits": outputs["logits"][indices]})
        for name, measure in MEASURES.items():
            assert metrics[name] == pytest.approx(expected[str(measure), query], abs=1e-9), (name, query)
    assert 0 in expected.values() and len(set(expected.values())) > N_QUERIES // 2
