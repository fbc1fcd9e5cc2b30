"""A tiny SQuAD is learned to the last question, on any number of processes, and predicted again from the model folder."""

import json

import numpy as np
import pytest

from finetune.metrics.squad import score_prediction
from tests.conftest import write_folder
from tests.integration.conftest import predictions_for
from tests.integration.test_finetuning import finetune, read_jsonl

pytestmark = pytest.mark.xdist_group("squad")  # on one worker, which fine-tunes the shared model once
FIRST, LAST = "Fo\u0301ko", "Dabi"  # first and last word of every answer


def write_squad(folder, documents):
    """Write paragraphs of invented words. An answer goes from one fixed word to another; every third question has none."""
    rng = np.random.default_rng(0)
    words = sorted(
        {word for document in documents for line in document for word in line.lower().split() if word.isalpha()}
    )
    for name, count in (("train", 150), ("dev", 21), ("more", 6), ("test", 6)):
        paragraphs = []
        for number in range(count):
            text = [str(word) for word in rng.choice(words[10:40], rng.integers(6, 30))]
            answers = []
            if number % 3:
                answer = " \u00a0".join([FIRST, *text[: rng.integers(0, 3)], LAST])
                text.insert(rng.integers(len(text)), answer)
                answers = [{"text": answer, "answer_start": " ".join(text).index(answer)}]
            question = {"id": f"{name}{number}", "question": "Ba bu?", "answers": answers, "is_impossible": not answers}
            paragraphs.append({"context": " ".join(text), "qas": [question]})
        (folder / f"{name}-v2.0.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))


def read_dev_questions(folder):
    """Return questions and their contexts."""
    content = json.loads((folder / "dev-v2.0.json").read_text())
    return [
        (question, paragraph["context"])
        for paragraph in content["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    ]


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

    def make(name, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        merged = {**settings, "name": name, "run_dir": folder / name, **changed}
        return [f"{key}={value}" for key, value in merged.items()]

    make.folder = folder
    return make


@pytest.fixture(scope="module")
def learned(make_args):
    finetune(make_args("learned"))
    return make_args.folder / "learned"


def test_a_tiny_squad_is_learned_to_the_last_question_and_its_windows_combined(make_args, learned):
    metrics = json.loads((learned / "seed_1" / "result.json").read_text())["metrics"]
    assert metrics["dev-v2.0/best_exact"] == metrics["dev-v2.0/best_f1"] == 1.0
    questions = read_dev_questions(make_args.folder)
    predictions, spans, log_odds = (
        json.loads((learned / "predictions" / f"dev-v2.0.{name}.json").read_text())
        for name in ("predictions", "spans", "null_odds")
    )
    assert predictions.keys() == spans.keys() == log_odds.keys() == {question["id"] for question, _ in questions}
    for question, context in questions:
        labels = [answer["text"] for answer in question["answers"]]
        prediction = predictions[question["id"]]
        assert score_prediction(prediction, labels, False) == (1, 1)
        assert prediction == (labels[0] if labels else "")  # to the character, including odd spaces and accents
        assert spans[question["id"]] in context


def test_the_model_folder_predicts_with_the_threshold_tuned_on_dev(make_args, learned):
    lines = [
        json.dumps({"id": question["id"], "context": context, "question": question["question"]})
        for question, context in read_dev_questions(make_args.folder)
    ]
    predictions = predictions_for(learned, lines)
    expected = read_jsonl(learned / "seed_1" / "dev-v2.0.jsonl")
    assert [(x["id"], x["prediction"]) for x in predictions] == [(x["id"], x["prediction"]) for x in expected]
    threshold = json.loads((learned / "model" / "task.json").read_text())["data"]["null_score_threshold"]
    assert all((x["prediction"] == "") == (x["null_log_odds"] > threshold) for x in predictions)


def test_other_splits_are_measured_at_the_threshold_tuned_on_dev(learned):
    metrics = json.loads((learned / "seed_1" / "result.json").read_text())["metrics"]
    metrics |= json.loads((learned / "predictions" / "test_metrics.json").read_text())
    for split in ("more-v2.0", "test-v2.0"):
        assert f"{split}/f1" in metrics and f"{split}/best_f1" not in metrics


@pytest.mark.long
def test_two_processes_give_the_same_predictions(make_args, learned):
    short = {"train__steps": 6, "schedule__warmup_steps": 2, "eval__every": 3}
    finetune(make_args("one", **short))
    finetune(make_args("two", **short), processes=2)
    one, two = (read_jsonl(make_args.folder / name / "seed_1" / "dev-v2.0.jsonl") for name in ("one", "two"))
    assert [(x["id"], x["prediction"]) for x in one] == [(x["id"], x["prediction"]) for x in two]
    for prediction, expected in zip(two, one, strict=True):
        assert prediction["null_log_odds"] == pytest.approx(expected["null_log_odds"], abs=1e-3)
