"""Weights that travel: a run is exported, another goes on from any kind of folder."""

import json

import pytest

from tests.integration.conftest import run
from tests.unit.exchange.test_folder import write_release
from xlpre.exchange.folder import load_folder
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"


def held_out(run_dir):
    return {x["step"]: x["held_out_loss"] for x in read_metrics(run_dir) if "held_out_loss" in x}


@pytest.fixture
def trained(words, tmp_path):
    """A finished run; its preprocessing is as Hugging Face and the release have it."""
    done = run(SCRIPT, *words("first", train__steps=10))
    assert done.returncode == 0, done.stderr
    return tmp_path / "first"


def test_training_goes_on_from_any_kind_of_folder(trained, words, tmp_path):
    ours = trained / "model"
    done = run("pretrain/export.py", trained, tmp_path / "hf", "--hf")
    assert done.returncode == 0 and "step 10" in done.stdout, done.stderr
    folder = load_folder(ours)
    write_release(tmp_path / "release", folder)
    jobs = [
        words(f"from{number}", train__steps=2, schedule__warmup_steps=2, init=source)
        for number, source in enumerate((ours, tmp_path / "hf"))
    ]
    done = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    end = held_out(trained)[10]
    for number in range(len(jobs)):
        assert held_out(tmp_path / f"from{number}")[0] == end  # measured before the first step, on the same targets
        first = next(x for x in read_metrics(tmp_path / f"from{number}") if "lr" in x)
        assert first["lr"] == 0  # warms up anew
    refused = run(SCRIPT, *words("from_release", init=tmp_path / "release"))
    assert (
        refused.returncode == 2
        and "preprocess cased" in refused.stderr
        and "tokenizer.preprocess=cased" in refused.stderr
    )


def test_another_shape_or_vocabulary_is_refused_by_name(trained, words, text_file, tmp_path):
    done = run(SCRIPT, *words("wider", init=trained / "model", model__d_model=32))
    assert done.returncode == 2 and "model.d_model (32) is 16 in init=" in done.stderr
    store, vocabulary = tmp_path / "other_store", tmp_path / "other.model"
    made = [f"text.source={text_file}", f"tokenizer.path={vocabulary}", f"data.store={store}", "text.held_out=0.1"]
    for script in ("pretrain/train_tokenizer.py", "pretrain/prepare.py"):
        assert run(script, *made, "tokenizer.vocab_size=250").returncode == 0
    changed = words("other", init=trained / "model", data__store=store, tokenizer__path=vocabulary)
    done = run(SCRIPT, *changed)
    assert done.returncode == 2 and "vocabulary (sha256)" in done.stderr and "tokenizer.path=" in done.stderr


def test_an_export_never_overwrites(trained, tmp_path):
    (tmp_path / "there").mkdir()
    done = run("pretrain/export.py", trained, tmp_path / "there")
    assert done.returncode == 2 and "is there already" in done.stderr and not list((tmp_path / "there").iterdir())
