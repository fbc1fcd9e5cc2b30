"""Export of a run, and training from each kind of model folder."""

import json
import shutil

import pytest

from tests.conftest import refused
from tests.integration.conftest import call, run, tiny_args
from tests.unit.conversion.folders import write_release
from xlpre.conversion.model_folder import load_folder
from xlpre.training.metrics_writer import read_metrics

pytestmark = pytest.mark.xdist_group("exchange")  # on one worker, which trains the exported run once
SCRIPT = "pretrain/run.py"


def val_losses(run_dir):
    return {x["step"]: x["val_loss"] for x in read_metrics(run_dir) if "val_loss" in x}


@pytest.fixture(scope="module")
def finished_run(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    result = run(SCRIPT, *tiny_args(store, folder, "first", train__steps=10))
    assert result.returncode == 0, result.stderr
    return folder / "first"


@pytest.fixture
def trained(finished_run, tmp_path):
    """Return a copy of a finished run, which the test may change."""
    return shutil.copytree(finished_run, tmp_path / "first")


def test_training_starts_from_any_kind_of_folder(trained, make_args, tmp_path):
    for kind in ("hf", "tf"):
        result = call("pretrain/export.py", trained, tmp_path / kind, f"--{kind}")
        assert result.returncode == 0 and "step 10" in result.stdout, result.stderr
    jobs = [
        make_args(f"from{number}", train__steps=2, schedule__warmup_steps=2, init_from=source)
        for number, source in enumerate(
            (trained, tmp_path / "hf", tmp_path / "tf")
        )  # the folder of the run, and exported folders
    ]
    result = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    final_loss = val_losses(trained)[10]
    for number in range(len(jobs)):
        assert (
            val_losses(tmp_path / f"from{number}")[0] == final_loss
        )  # evaluated before the first step on the same targets
        first = next(x for x in read_metrics(tmp_path / f"from{number}") if "lr" in x)
        assert first["lr"] == 0  # the warm-up starts again


def test_training_starts_from_a_tensorflow_release(trained, make_args, text_file, tmp_path):
    release = tmp_path / "release"
    write_release(release, load_folder(trained / "model"))
    done = call(SCRIPT, *make_args("refused", init_from=release))
    assert done.returncode == 2 and "tokenizer.preprocess=cased" in done.stderr, done.stderr
    store_args = [
        f"tokenizer.path={release / 'spiece.model'}",
        "tokenizer.preprocess=cased",
        f"data.store_dir={tmp_path / 'cased'}",
    ]
    result = call("pretrain/prepare.py", f"text.source={text_file}", "text.val_fraction=0.1", *store_args)
    assert result.returncode == 0, result.stderr
    # the model config is that of the release
    shape = ("model.n_layer", "model.d_model", "model.n_head", "model.d_inner", "tokenizer.", "data.store_dir")
    args = [arg for arg in make_args("continued", init_from=release, train__steps=2) if not arg.startswith(shape)]
    result = run(SCRIPT, *args, *store_args)
    assert result.returncode == 0 and f"from the weights of {release} (tensorflow)" in result.stdout, result.stderr
    # preprocessing does not change this text, so the loss is that of the original run
    assert val_losses(tmp_path / "continued")[0] == pytest.approx(val_losses(trained)[10], abs=1e-6)


def test_another_model_config_or_vocabulary_is_refused_by_name(trained, make_args, text_file, tmp_path):
    refused(call(SCRIPT, *make_args("wider", init_from=trained / "model", model__d_model=32)), "model.d_model", 32)
    store, vocabulary = tmp_path / "other_store", tmp_path / "other.model"
    store_args = [
        f"text.source={text_file}",
        f"tokenizer.path={vocabulary}",
        f"data.store_dir={store}",
        "text.val_fraction=0.1",
    ]
    for script in ("pretrain/train_tokenizer.py", "pretrain/prepare.py"):
        assert call(script, *store_args, "tokenizer.vocab_size=250").returncode == 0
    args = make_args("other", init_from=trained / "model", data__store_dir=store, tokenizer__path=vocabulary)
    result = call(SCRIPT, *args)
    assert result.returncode == 2 and "vocabulary" in result.stderr and "tokenizer.path=" in result.stderr


def test_the_folder_overrides_the_config_file_and_contradicting_arguments_are_refused(trained, make_args, tmp_path):
    (tmp_path / "wider.yaml").write_text("model: {n_layer: 3, d_inner: 64, mem_len: 8}\n")
    shape = ("model.n_layer", "model.d_model", "model.n_head", "model.d_inner", "model.mem_len")
    args = [
        arg for arg in make_args("overridden", init_from=trained / "model", train__steps=1) if not arg.startswith(shape)
    ]
    result = run(SCRIPT, "--config", tmp_path / "wider.yaml", *args)
    assert (
        result.returncode == 0 and "instead of the configured ones: n_layer=2 (3), d_inner=32 (64)" in result.stdout
    ), result.stderr
    assert load_folder(tmp_path / "overridden" / "model").config.mem_len == 8  # independent of the weights
    args = make_args("refused", init_from=trained / "model", model__d_inner=64)
    refused(call(SCRIPT, "--config", tmp_path / "wider.yaml", *args), "model.d_inner", 64)


def test_a_run_resumes_after_its_initial_folder_was_removed(trained, make_args, tmp_path):
    (trained / "model").rename(tmp_path / "elsewhere")
    args = make_args("started", init_from=tmp_path / "elsewhere", train__steps=2)
    assert run(SCRIPT, *args).returncode == 0
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    finished = call(SCRIPT, *args)
    assert finished.returncode == 0 and "already finished" in finished.stdout, finished.stderr
    resumed = run(SCRIPT, *args, "train.steps=4")
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout, resumed.stderr


def test_a_folder_saved_by_transformers_has_the_preprocessing_of_the_store(trained, make_args, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert call("pretrain/export.py", trained, tmp_path / "hf", "--hf").returncode == 0
    transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    missing = call(SCRIPT, *make_args("missing", init_from=tmp_path / "saved"))
    assert missing.returncode == 2 and "Put the vocabulary of this model there" in missing.stderr
    (tmp_path / "saved" / "spiece.model").write_bytes((tmp_path / "hf" / "spiece.model").read_bytes())
    result = run(SCRIPT, *make_args("continued", init_from=tmp_path / "saved", train__steps=1))
    assert result.returncode == 0 and "preprocessing is unknown" in result.stdout
    assert val_losses(tmp_path / "continued")[0] == val_losses(trained)[10]
    assumed = call("pretrain/export.py", tmp_path / "saved", tmp_path / "assumed")
    assert "assumed to be cased" in assumed.stdout
    assert call("pretrain/export.py", tmp_path / "saved", tmp_path / "stated", "--preprocess", "none").returncode == 0
    assert load_folder(tmp_path / "stated").tokenizer.preprocess == "none"


def test_an_export_never_overwrites(trained, tmp_path):
    (tmp_path / "there").mkdir()
    result = call("pretrain/export.py", trained, tmp_path / "there")
    assert result.returncode == 2 and "exists already" in result.stderr and not list((tmp_path / "there").iterdir())


def test_the_model_card_of_a_run_has_its_numbers_and_no_path(trained, store, tmp_path):
    text = {}
    for kind, options in (("hf", ["--hf"]), ("native", []), ("best", ["--hf"])):
        source = trained / "best" if kind == "best" else trained
        result = call("pretrain/export.py", source, tmp_path / kind, *options)
        assert result.returncode == 0 and "fill in license and language" in result.stdout, result.stderr
        text[kind] = (tmp_path / kind / "README.md").read_text()
        assert str(tmp_path) not in text[kind] and str(store.path.parent) not in text[kind]
    last = read_metrics(trained)[-1]
    assert f"| Validation loss | {last['val_loss']:.3f} nats per target |" in text["hf"]
    assert f"| Unigram baseline | {last['val_unigram_loss']:.3f} nats per target |" in text["hf"]
    assert f"| Bits per byte | {last['val_bpb']:.3f} |" in text["hf"]
    assert (
        f"| Training | {store.meta['train_n_tokens']:,} tokens, {store.meta['train_n_documents']:,} documents"
        in text["hf"]
    )
    assert (
        "| Steps | 10 of 10, each with 4 windows |" in text["native"]
        and "| Arrangement | 1 DeepSpeed" in text["native"]
    )
    step = json.loads((trained / "best" / "provenance.json").read_text())["step"]
    assert f"| Evaluated at step | {step} |" in text["best"]


def test_the_model_card_leaves_out_what_the_run_does_not_record(trained, tmp_path):
    assert call("pretrain/export.py", trained / "model", tmp_path / "known", "--hf").returncode == 0
    config = (trained / "config.yaml").read_text()
    (trained / "config.yaml").write_text(config.replace("store_dir:", f"store_dir: {tmp_path / 'gone'} #"))
    (trained / "metrics.jsonl").unlink()
    assert call("pretrain/export.py", trained, tmp_path / "moved", "--hf").returncode == 0
    moved = (tmp_path / "moved" / "README.md").read_text()
    assert "Unknown: the token store of the run did not exist" in moved and "| Training |" not in moved
    assert "| Text | docstrings of installed Python packages |" in moved  # the settings have it
    assert "No evaluation of these weights is recorded" in moved and "| Optimizer | AdamW" in moved
    (trained / "config.yaml").write_text("model: [")
    damaged = call("pretrain/export.py", trained, tmp_path / "damaged", "--hf")
    assert damaged.returncode == 0 and "warning: the model card does not describe the training: " in damaged.stdout
    # an export has no run beside it
    result = call("pretrain/export.py", tmp_path / "known", tmp_path / "again")
    assert result.returncode == 0 and "README.md was not copied" in result.stdout
    again = (tmp_path / "again" / "README.md").read_text()
    assert again.count("Unknown: the export did not find the run of this model") == 2 and "Optimizer" not in again
