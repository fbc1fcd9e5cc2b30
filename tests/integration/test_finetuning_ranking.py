"""A ranking is learned by the real command, from TREC files to a run."""

import json

import numpy as np

from finetune.data.trec import read_candidates
from tests.conftest import write_folder
from tests.integration.conftest import run


def write_collection(folder, documents):
    """Write documents of invented words. For every query, a document is relevant if it contains one fixed word."""
    rng = np.random.default_rng(0)
    words = {word for document in documents for line in document for word in line.lower().split() if word.isalpha()}
    relevant_word, *others = sorted(words)[:9]
    texts, grades = {}, {}
    for number in range(80):
        text = [str(word) for word in rng.choice(others, rng.integers(2, 10))]
        grades[f"d{number}"] = int(number % 3 == 0)
        texts[f"d{number}"] = " ".join([*text, relevant_word] if number % 3 == 0 else text)
    (folder / "documents.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in texts.items()))
    (folder / "queries.tsv").write_text("".join(f"{query}\t{others[query % 8]}\n" for query in range(24)))
    qrels, runs = [], {"train": [], "dev": [], "test": []}
    for query in range(24):
        split = "train" if query < 18 else "dev" if query < 22 else "test"
        for name in rng.choice(list(texts), 10, replace=False):
            qrels.append(f"{query} 0 {name} {grades[name]}\n" if split != "test" else "")
            runs[split].append(f"{query} Q0 {name} 1 0.5 first\n")
    (folder / "qrels.txt").write_text("".join(qrels))
    for split, lines in runs.items():
        (folder / f"{split}.run").write_text("".join(lines))


def test_a_ranking_is_learned_and_written_as_a_run(tokenizer, documents, tmp_path):
    write_collection(tmp_path, documents)
    settings = {
        "task": "rank",
        "init_from": write_folder(tmp_path / "model", tokenizer),
        "run_dir": tmp_path / "run",
        "data.dir": tmp_path,
        "data.queries": "[queries.tsv]",
        "data.documents": "[documents.tsv]",
        "data.qrels": "[qrels.txt]",
        **{f"data.{split}": f"[{split}.run]" for split in ("train", "dev", "test")},
        "optim.lr": 0.01,
        "schedule.warmup_steps": 30,
        "train.steps": 120,
        "train.global_batch_size": 16,
        "eval.every": 60,
    }
    command = run("finetune/run.py", *(f"{key}={value}" for key, value in settings.items()), timeout=300)
    assert command.returncode == 0, command.stdout[-2000:] + command.stderr[-4000:]
    result = json.loads((tmp_path / "run/seed_1/result.json").read_text())
    assert result["metrics"]["dev/ndcg@20"] > 0.95 > result["chance_threshold"]
    predicted = read_candidates(tmp_path / "run/predictions/test.run")
    assert {row[:2] for row in predicted} == {row[:2] for row in read_candidates(tmp_path / "test.run")}
