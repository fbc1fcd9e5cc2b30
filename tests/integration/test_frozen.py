"""Artifacts and numbers of an earlier version: formats stay readable, and losses stay what they were."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY
from tests.integration.conftest import predictions_for, run
from xlpre.batch import Batch
from xlpre.conversion.model_folder import load_folder
from xlpre.data.lanes import Lanes
from xlpre.data.store import TokenStore
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.model.memory import initial_memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective
from xlpre.training.metrics_writer import read_metrics

FROZEN = REPOSITORY / "tests/frozen"
ROWS, SEED = 2, 7
# the losses of another CPU or torch version differ by rounding
TOLERANCE = {"rel": 1e-4, "abs": 1e-5}


@cache
def expected() -> dict:
    return json.loads((FROZEN / "expected.json").read_text())


def test_the_store_has_the_recorded_tokens_and_vocabulary():
    store = TokenStore(FROZEN / "store")
    store.verify()
    tokenizer = store.tokenizer()
    assert (tokenizer.sha256, store.vocab_size) == (expected()["store"]["vocabulary_sha256"], 64)
    assert store.fingerprint == expected()["store"]["fingerprint"]
    assert {text: tokenizer.encode(text) for text in expected()["encoded"]} == expected()["encoded"]


def test_batches_logits_losses_and_memory_are_the_recorded_ones():
    store, folder = TokenStore(FROZEN / "store"), load_folder(FROZEN / "run/model")
    data = DataConfig(seq_len=32, reuse_len=16, windows_per_run=8)
    lanes = Lanes(
        store.train,
        ROWS,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=8,
        bidirectional=True,
        seed=SEED,
    )
    objective = build_objective(ObjectiveConfig(partial_k=4), data, store.tokenizer().starts_word)
    loader, model = Loader(lanes, data, objective, seed=SEED), folder.model()
    memory, arrays = initial_memory(folder.config, ROWS), np.load(FROZEN / "expected.npz")
    with torch.no_grad():
        for step, recorded_loss in enumerate(expected()["losses_of_batches"]):
            batch = loader.batch(step, range(ROWS))
            for name in Batch.__dataclass_fields__:
                if name != "reuse_len":
                    assert np.array_equal(getattr(batch, name), arrays[f"batch_{step}/{name}"]), (step, name)
            logits, _ = model.logits(batch, memory)
            assert np.allclose(logits, arrays[f"logits_{step}"], atol=1e-5)
            loss, memory = model(batch, memory)
            assert loss.item() == pytest.approx(recorded_loss, rel=1e-5)
            assert np.allclose(memory.hidden, arrays[f"memory_{step}/hidden"], atol=1e-5)
            assert np.array_equal(memory.valid, arrays[f"memory_{step}/valid"])


def curve(folder) -> dict[tuple[int, str], float]:
    """Return the numbers of a metrics file by step and name."""
    return {(line["step"], name): value for line in read_metrics(folder) for name, value in line.items()}


def recorded(key: str) -> dict[tuple[int, str], float]:
    return {(line["step"], name): value for line in expected()[key] for name, value in line.items()}


def test_a_run_with_the_frozen_settings_has_the_recorded_losses(tmp_path):
    result = run("pretrain/run.py", "--config", FROZEN / "run/config.yaml", f"run_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    measured = curve(tmp_path / "run")
    assert {key: measured[key] for key in recorded("curve")} == pytest.approx(recorded("curve"), **TOLERANCE)


def test_the_frozen_run_resumes_with_the_recorded_losses(tmp_path):
    shutil.copytree(FROZEN / "run", tmp_path / "run")
    args = ("--config", FROZEN / "run/config.yaml", f"run_dir={tmp_path / 'run'}", "train.steps=26")
    result = run("pretrain/run.py", *args)
    assert result.returncode == 0 and "step 20" in result.stdout, result.stdout + result.stderr
    measured = curve(tmp_path / "run")
    assert {key: measured[key] for key in recorded("resumed")} == pytest.approx(recorded("resumed"), **TOLERANCE)


def test_the_frozen_fine_tuned_folder_predicts_the_recorded_probabilities():
    lines = [line.rpartition(",")[0] for line in (FROZEN / "dev.csv").read_text().splitlines()[1:]]
    predictions = predictions_for(FROZEN / "finetuned/model", lines)
    assert [one["prediction"] for one in predictions] == ["odd"] * 16
    odd = expected()["probabilities_of_odd"]
    assert [one["probabilities"]["odd"] for one in predictions] == pytest.approx(odd, **TOLERANCE)
    assert [one["probabilities"]["even"] for one in predictions] == pytest.approx([1 - p for p in odd], **TOLERANCE)
