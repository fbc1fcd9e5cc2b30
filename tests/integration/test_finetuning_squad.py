"""A tiny SQuAD is learned to the last question, on any number of processes, and answered again from its folder."""

import json

import numpy as np
import pytest

from finetune.metrics.squad import score_prediction
from tests.conftest import write_folder
from tests.integration.conftest import predictions_for
from tests.integration.test_finetuning import finetune, read_jsonl

BEGIN, END = "Fo\u0301ko", "Dabi"


def write_squad(folder, documents):
    """Paragraphs of made-up args; the answer goes from one word to another, and every third question has none."""
    rng = np.random.default_rng(0)
    args = sorted(
        {word for document in documents for line in document for word in line.lower().split() if word.isalpha()}
    )
    for name, count in (("train", 150), ("dev", 21), ("more", 6), ("test", 6)):
        paragraphs = []
        for number in range(count):
            text = [str(word) for word in rng.choice(args[10:40], rng.integers(6, 30))]
            answers = []
            if number % 3:
                answer = " \u00a0".join([BEGIN, *text[: rng.integers(0, 3)], END])
                text.insert(rng.integers(len(text)), answer)
                begin = " ".join(text).index(answer)
                answers = [{"text": answer, "answer_start": begin}]
            one = {"id": f"{name}{number}", "question": "Ba bu?", "answers": answers, "is_impossible": not answers}
            paragraphs.append({"context": " ".join(text), "qas": [one]})
        (folder / f"{name}-v2.0.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))


@pytest.fixture(scope="module")
def make_args(tokenizer, documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    write_squad(folder, documents)
    settings = {
        "task": "squad/2.0",
        "init_from": write_folder(folder / "model", tokenizer),
        "from_scratch": True,
        "data.dir": folder,
        "data.dev": "[dev-v2.0.json, more-v2.0.json]",
        "data.test": "[test-v2.0.json]",
        "data.max_seq_len": 48,
        "data.max_question_len": 8,
        "data.doc_stride": 16,
        "optim.lr": 0.01,
        "train.steps": 100,
        "schedule.warmup_steps": 10,
        "train.global_batch_size": 16,
        "eval.every": 50,
    }

    def made(name, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        return [
            f"{key}={value}" for key, value in {**settings, "name": name, "run_dir": folder / name, **changed}.items()
        ]

    made.folder = folder
    return made


@pytest.fixture(scope="module")
def learned(make_args):
    finetune(make_args("learned"))
    return make_args.folder / "learned"


def test_a_tiny_squad_is_learned_to_the_last_question_and_windows_are_put_together(make_args, learned):
    scores = json.loads((learned / "seed_1" / "result.json").read_text())["metrics"]
    assert scores["dev-v2.0/best_exact"] == scores["dev-v2.0/best_f1"] == 1.0
    questions = [
        (question, paragraph["context"])
        for paragraph in json.loads((make_args.folder / "dev-v2.0.json").read_text())["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    ]
    answers, spans, odds = (
        json.loads((learned / "predictions" / f"dev-v2.0.{name}.json").read_text())
        for name in ("answers", "spans", "null_odds")
    )
    assert answers.keys() == spans.keys() == odds.keys() == {question["id"] for question, _ in questions}
    for question, context in questions:
        truths = [answer["text"] for answer in question["answers"]]
        assert score_prediction(answers[question["id"]], truths, False) == (1, 1)
        assert answers[question["id"]] == (truths[0] if truths else "")  # to the character, odd spaces and accents too
        assert spans[question["id"]] in context


def test_the_folder_answers_lines_with_the_threshold_of_dev(make_args, learned, tmp_path):
    lines = [
        json.dumps({"id": question["id"], "context": paragraph["context"], "question": question["question"]})
        for paragraph in json.loads((make_args.folder / "dev-v2.0.json").read_text())["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    ]
    found = predictions_for(learned, lines)
    expected = read_jsonl(learned / "seed_1" / "dev-v2.0.jsonl")
    assert [(x["id"], x["prediction"]) for x in found] == [(x["id"], x["prediction"]) for x in expected]
    threshold = json.loads((learned / "model" / "task.json").read_text())["data"]["null_score_threshold"]
    assert all((x["prediction"] == "") == (x["null_log_odds"] > threshold) for x in found)


def test_what_did_not_decide_the_threshold_is_measured_at_it(learned):
    scores = json.loads((learned / "seed_1" / "result.json").read_text())["metrics"]
    scores |= json.loads((learned / "predictions" / "test_metrics.json").read_text())
    for split in ("more-v2.0", "test-v2.0"):
        assert f"{split}/f1" in scores and f"{split}/best_f1" not in scores


@pytest.mark.long
def test_two_processes_answer_every_window_once_and_alike(make_args, learned):
    short = {"train__steps": 6, "schedule__warmup_steps": 2, "eval__every": 3}
    finetune(make_args("one", **short))
    finetune(make_args("two", **short), processes=2)
    one, two = (read_jsonl(make_args.folder / name / "seed_1" / "dev-v2.0.jsonl") for name in ("one", "two"))
    assert [(x["id"], x["prediction"]) for x in one] == [(x["id"], x["prediction"]) for x in two]
    for ours, theirs in zip(one, two, strict=True):
        assert ours["null_log_odds"] == pytest.approx(theirs["null_log_odds"], abs=1e-3)
