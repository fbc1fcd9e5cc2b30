"""Files that the ranking task writes are read by an evaluation library, whose measures, trec_eval's own, are those of the task."""

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.registry import build_task

ir_measures = pytest.importorskip("ir_measures")

N_QUERIES, NAMES = 60, [f"{kind}{number}" for kind in ("d", "D-", "é", "文") for number in range(12)]
MEASURES = {"ndcg@20": ir_measures.nDCG @ 20, "mrr": ir_measures.RR}
GRADES = [0, 1, [-2, 0, 1, 2, 4], [-1, 3], [0, 0, 0, 1]]  # of a query: one of a list, or all alike


@pytest.fixture(params=range(6))
def drawn(request, tmp_path):
    """A task, its dev split and logits: queries with and without relevant documents, ties, documents that nobody judged."""
    rng = np.random.default_rng(request.param)
    qrels, run = [], []
    for query in range(N_QUERIES + 5):  # of some there are no candidates
        grades = np.atleast_1d(GRADES[rng.integers(len(GRADES))])
        for name in rng.permutation(NAMES)[: rng.integers(1, len(NAMES))]:
            qrels.append(f"{query} 0 {name} {rng.choice(grades)}\n")
        if query < N_QUERIES:
            run += [f"{query} Q0 {name} 1 0 x\n" for name in rng.permutation(NAMES)[: rng.integers(1, len(NAMES))]]
    texts = {"documents.tsv": NAMES, "queries.tsv": range(N_QUERIES)}
    for name, lines in {
        "qrels.txt": rng.permutation(qrels),
        "dev.run": run,
        **{file: [f"{one}\tt\n" for one in ids] for file, ids in texts.items()},
    }.items():
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    names = {key: [f"{key}.tsv"] for key in ("documents", "queries")}
    data = TaskDataConfig(dir=str(tmp_path), qrels=["qrels.txt"], dev=["dev.run"], **names)
    task = build_task("rank", data, "last")
    split = Split("dev", task.read_split("dev"), [])
    logits = rng.normal(0, 10 ** rng.uniform(-2, 2), len(split.examples)).round(rng.integers(0, 7)).astype(np.float32)
    return task, split, {"logits": logits}


def test_measures_of_what_is_written_are_those_of_the_library(drawn, tmp_path):
    task, split, outputs = drawn
    (file,) = task.source.submit(tmp_path, {"dev": task.to_predictions(split, outputs)})
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels.txt")))
    run = list(ir_measures.read_trec_run(str(file)))
    assert len(run) == len(split.examples)
    by_query = {(str(x.measure), x.query_id): x.value for x in ir_measures.iter_calc(MEASURES.values(), qrels, run)}
    for query in {example.group for example in split.examples}:
        of_query = [number for number, example in enumerate(split.examples) if example.group == query]
        part = Split("dev", [split.examples[number] for number in of_query], [])
        found = task.compute_metrics(part, {"logits": outputs["logits"][of_query]})
        for name, measure in MEASURES.items():
            assert found[name] == pytest.approx(by_query[str(measure), query], abs=1e-9), (name, query)
    assert 0 in by_query.values() and len(set(by_query.values())) > N_QUERIES // 2
