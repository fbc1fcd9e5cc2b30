"""Weights that travel: a run is exported, another goes on from any kind of folder."""

import json
import shutil

import pytest

from tests.integration.conftest import run, tiny_args
from tests.unit.conversion.folders import write_release
from xlpre.conversion.model_folder import load_folder
from xlpre.training.metrics import read_metrics

pytestmark = pytest.mark.xdist_group("exchange")  # on one worker, so that the run that is exported is made once
SCRIPT = "pretrain/run.py"


def held_out(run_dir):
    return {x["step"]: x["val_loss"] for x in read_metrics(run_dir) if "val_loss" in x}


@pytest.fixture(scope="module")
def finished(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    done = run(SCRIPT, *tiny_args(store, folder, "first", train__steps=10))
    assert done.returncode == 0, done.stderr
    return folder / "first"


@pytest.fixture
def trained(finished, tmp_path):
    """A finished run, in a folder that the test may change."""
    return shutil.copytree(finished, tmp_path / "first")


def test_training_goes_on_from_any_kind_of_folder(trained, make_args, tmp_path):
    ours = trained / "model"
    for kind in ("hf", "tf"):
        done = run("pretrain/export.py", trained, tmp_path / kind, f"--{kind}")
        assert done.returncode == 0 and "step 10" in done.stdout, done.stderr
    jobs = [
        make_args(f"from{number}", train__steps=2, schedule__warmup_steps=2, init=source)
        for number, source in enumerate((ours, tmp_path / "hf", tmp_path / "tf"))
    ]
    done = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    end = held_out(trained)[10]
    for number in range(len(jobs)):
        assert held_out(tmp_path / f"from{number}")[0] == end  # measured before the first step, on the same targets
        first = next(x for x in read_metrics(tmp_path / f"from{number}") if "lr" in x)
        assert first["lr"] == 0  # warms up anew


def test_training_goes_on_from_a_tensorflow_release(trained, make_args, text_file, tmp_path):
    release = tmp_path / "release"
    write_release(release, load_folder(trained / "model"))
    refused = run(SCRIPT, *make_args("refused", init=release))
    assert refused.returncode == 2 and "tokenizer.preprocess=cased" in refused.stderr, refused.stderr
    made = [
        f"tokenizer.path={release / 'spiece.model'}",
        "tokenizer.preprocess=cased",
        f"data.store_dir={tmp_path / 'cased'}",
    ]
    done = run("pretrain/prepare.py", f"text.source={text_file}", "text.val_fraction=0.1", *made)
    assert done.returncode == 0, done.stderr
    # the shape is not said again: it is the release's
    shape = ("model.n_layer", "model.d_model", "model.n_head", "model.d_inner", "tokenizer.", "data.store_dir")
    changed = [word for word in make_args("goes_on", init=release, train__steps=2) if not word.startswith(shape)]
    done = run(SCRIPT, *changed, *made)
    assert done.returncode == 0 and f"from the weights of {release} (tensorflow)" in done.stdout, done.stderr
    # the text is so plain that preprocessing changes nothing: the model predicts as it did where it was trained
    assert held_out(tmp_path / "goes_on")[0] == pytest.approx(held_out(trained)[10], abs=1e-6)


def test_another_shape_or_vocabulary_is_refused_by_name(trained, make_args, text_file, tmp_path):
    done = run(SCRIPT, *make_args("wider", init=trained / "model", model__d_model=32))
    assert done.returncode == 2 and "model.d_model (32) is 16 in init=" in done.stderr
    store, vocabulary = tmp_path / "other_store", tmp_path / "other.model"
    made = [
        f"text.source={text_file}",
        f"tokenizer.path={vocabulary}",
        f"data.store_dir={store}",
        "text.val_fraction=0.1",
    ]
    for script in ("pretrain/train_tokenizer.py", "pretrain/prepare.py"):
        assert run(script, *made, "tokenizer.vocab_size=250").returncode == 0
    changed = make_args("other", init=trained / "model", data__store_dir=store, tokenizer__path=vocabulary)
    done = run(SCRIPT, *changed)
    assert done.returncode == 2 and "vocabulary (sha256)" in done.stderr and "tokenizer.path=" in done.stderr


def test_a_file_of_settings_gives_way_to_the_folder_and_a_word_does_not(trained, make_args, tmp_path):
    (tmp_path / "wider.yaml").write_text("model: {n_layer: 3, d_inner: 64, mem_len: 8}\n")
    shape = ("model.n_layer", "model.d_model", "model.n_head", "model.d_inner", "model.mem_len")
    fewer = [
        word for word in make_args("gives_way", init=trained / "model", train__steps=1) if not word.startswith(shape)
    ]
    done = run(SCRIPT, "--config", tmp_path / "wider.yaml", *fewer)
    assert done.returncode == 0 and "not as configured: n_layer=2 (3), d_inner=32 (64)" in done.stdout, done.stderr
    assert load_folder(tmp_path / "gives_way" / "model").config.mem_len == 8  # no part of the weights
    done = run(
        SCRIPT, "--config", tmp_path / "wider.yaml", *make_args("said", init=trained / "model", model__d_inner=64)
    )
    assert done.returncode == 2 and "model.d_inner (64) is 32 in init=" in done.stderr


def test_a_run_goes_on_when_the_folder_it_started_from_is_gone(trained, make_args, tmp_path):
    (trained / "model").rename(tmp_path / "elsewhere")
    begun = make_args("begun", init=tmp_path / "elsewhere", train__steps=2)
    assert run(SCRIPT, *begun).returncode == 0
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    finished = run(SCRIPT, *begun)
    assert finished.returncode == 0 and "finished already" in finished.stdout, finished.stderr
    further = run(SCRIPT, *begun, "train.steps=4")
    assert further.returncode == 0 and "resumes from" in further.stdout, further.stderr


def test_a_folder_that_transformers_saved_takes_the_stores_preprocessing(trained, make_args, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert run("pretrain/export.py", trained, tmp_path / "hf", "--hf").returncode == 0
    transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    lost = run(SCRIPT, *make_args("lost", init=tmp_path / "saved"))
    assert lost.returncode == 2 and "put the model's own vocabulary there" in lost.stderr
    (tmp_path / "saved" / "spiece.model").write_bytes((tmp_path / "hf" / "spiece.model").read_bytes())
    done = run(SCRIPT, *make_args("goes_on", init=tmp_path / "saved", train__steps=1))
    assert done.returncode == 0 and "does not say how its text was prepared, the store's is none" in done.stdout
    assert held_out(tmp_path / "goes_on")[0] == held_out(trained)[10]
    guessed = run("pretrain/export.py", tmp_path / "saved", tmp_path / "guessed")
    assert "taken as cased; --preprocess says otherwise" in guessed.stdout
    assert run("pretrain/export.py", tmp_path / "saved", tmp_path / "said", "--preprocess", "none").returncode == 0
    assert load_folder(tmp_path / "said").tokenizer.preprocess == "none"


def test_an_export_never_overwrites(trained, tmp_path):
    (tmp_path / "there").mkdir()
    done = run("pretrain/export.py", trained, tmp_path / "there")
    assert done.returncode == 2 and "is there already" in done.stderr and not list((tmp_path / "there").iterdir())
