"""`pretrain/run.py --dry-run` prints settings, size and start of a run, and writes no file."""

import dataclasses
import sys

import pytest

from pretrain.config import PretrainConfig
from pretrain.run import main
from tests.conftest import only_error, refused
from tests.integration.conftest import call, damage, run, run_together
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.data.store_builder import write_store
from xlpre.model.language_model import meta_model
from xlpre.training import checkpoint

SCRIPT = "pretrain/run.py"


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Run the command in this process, check that it writes nothing, and return its output."""

    def call(*args):
        files = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr("sys.argv", ["run.py", "--dry-run", *args])
        run_main(main)
        assert sorted(tmp_path.rglob("*")) == files
        return capsys.readouterr().out

    return call


def test_a_dry_run_prints_settings_that_load_and_sizes_and_writes_nothing(make_args, store, tmp_path, dry_run):
    output = dry_run(*make_args(), "train.hours=2")
    (tmp_path / "config.yaml").write_text(output)
    config = load_config(PretrainConfig, tmp_path / "config.yaml")
    expected = load_config(PretrainConfig, None, [*make_args(), "train.hours=2"])
    assert config.model == dataclasses.replace(expected.model, vocab_size=300) and config.train == expected.train
    n_parameters = sum(parameter.numel() for parameter in meta_model(config.model, True).parameters())
    fraction = 20 * 4 * 16 / len(store.train)
    assert output.endswith(
        f"# {n_parameters:,} parameters\n"
        "# a step: 4 windows of 32 tokens, of which 16 are new text; 20 targets\n"
        f"# 20 steps, at most 2 hours: 1,280 text tokens, {fraction:.2f} times the training text\n"
        "# here: global batch size 4 = 1 process x micro-batch size 4 x accumulation 1; cpu, fp32, ZeRO stage 0\n"
        "# starts at step 0\n"
    )


def test_a_dry_run_reports_a_vocabulary_size_that_is_ignored(make_args, dry_run):
    assert "# note: tokenizer.vocab_size=500 is ignored" in dry_run(*make_args(), "tokenizer.vocab_size=500")


def test_a_dry_run_reports_settings_without_effect(make_args, dry_run):
    causal = ("objective.name=causal", "data.pairs=false", "data.bidirectional=false", "data.reuse_len=32")
    args = (*causal, "objective.partial_k=3", "eval.sentences=[a ____]", "optim.matrix_lr=1e-3")
    output = dry_run(*make_args(), *args)
    assert "# note: objective.partial_k, eval.sentences have no effect with objective.name=causal.\n" in output
    assert "# note: optim.matrix_lr has no effect with optim.name=adamw.\n" in output


def test_a_dry_run_reports_text_settings_that_are_ignored(make_args, dry_run):
    output = dry_run(*make_args(), "text.deduplicate=true", "text.num_processes=1")
    assert "# note: text.deduplicate=true is ignored: the token store was built with text.deduplicate=false." in output
    assert "is ignored" not in dry_run(*make_args(), "text.deduplicate=false")


def test_a_dry_run_warns_of_a_causal_model_that_reads_backward(make_args, dry_run):
    causal = ["objective.name=causal", "data.reuse_len=32"]
    assert "# warning: every second row of the batch is read from right to left" in dry_run(*make_args(), *causal)
    assert "warning" not in dry_run(*make_args(), *causal, "data.bidirectional=false")


@pytest.mark.parametrize(
    ("override", "stage"),
    [
        ("deepspeed.zero_optimization.stage=1", 1),
        ("deepspeed.zero_optimization.stage=3", 3),
        ("deepspeed.zero_optimization.offload_optimizer.device=cpu", 1),
        ("train.precision=bf16", 1),
    ],
)
def test_a_dry_run_prints_the_zero_stage(make_args, dry_run, override, stage):
    assert f"ZeRO stage {stage}\n" in dry_run(*make_args(), override)


def test_a_dry_run_prints_where_the_run_would_start(make_args, tmp_path, documents, tokenizer, dry_run, capsys):
    two = make_args("first", train__steps=2, train__save_every=1)
    assert run(SCRIPT, *two).returncode == 0
    assert dry_run(*two).endswith("# already finished at step 2\n")
    older, latest = sorted((tmp_path / "first" / "checkpoints").glob("step_*"))
    assert dry_run(*make_args("first")).endswith(f"# resumes from {latest} at step 2\n")
    model = tmp_path / "first" / "model"
    assert f"# starts from the weights of {model} (xlpre)" in dry_run(*make_args("second"), f"init_from={model}")
    other = write_store(tmp_path / "other", documents[:300], tokenizer, 0.1, {"source": "docstrings"}, {})
    for override, message in [
        ("seed=9", f"seed=9 is invalid: {latest} was written with seed=1"),
        (f"init_from={model}", f"init_from={model} is invalid: {latest} was written with init_from=null"),
        (
            f"data.store_dir={other.path}",
            f"data.store_dir={other.path} is invalid: {latest} was written with another text",
        ),
    ]:
        with pytest.raises(SystemExit):
            dry_run(*make_args("first"), override)
        assert message in capsys.readouterr().err
    manifest = checkpoint.read_manifest(latest)
    (latest / checkpoint.MANIFEST).write_text(checkpoint.format_manifest({**manifest, "format": 3}))
    with pytest.raises(SystemExit):
        dry_run(*two)
    assert f"{latest} was written by another version of xlpre" in capsys.readouterr().err
    (latest / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(manifest))
    damage(latest / "model" / "model.safetensors")
    assert dry_run(*two).endswith(f"# resumes from {older} at step 1\n")
    damage(older / "model" / "model.safetensors")
    with pytest.raises(SystemExit):
        dry_run(*two)
    assert "has no valid checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("train.micro_batch_size", 3, "Set train.micro_batch_size=2 or 4, or train.global_batch_size=3 or 6"),
        ("train.wandb", "mine", "pip install wandb.*train.wandb=null"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(make_args, tmp_path, monkeypatch, key, value, remedy):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(call(SCRIPT, *make_args(), "--dry-run", f"{key}={value}"), key, value, remedy)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override", ["init_from=nowhere", "eval.minimal_pairs=[nowhere.jsonl]", "deepspeed.wall_clock_breakdwn=true"]
)
def test_a_dry_run_names_what_is_missing_and_an_unknown_key_of_deepspeed(make_args, tmp_path, override):
    assert override.partition("=")[0] in only_error(call(SCRIPT, *make_args(), "--dry-run", override).stderr)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_config_file_and_without_a_length_is_refused_with_presets():
    result = call(SCRIPT, "model.n_layer=2", "--dry-run")
    assert result.returncode == 2 and "--config configs/pretrain/quickstart.yaml" in only_error(result.stderr)


def test_only_rank_zero_prints(make_args, tmp_path):
    done = run_together(2, SCRIPT, "--dry-run", *make_args())
    assert done.returncode == 0 and done.stdout.count("# starts at step 0") == 1, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
