"""`pretrain/run.py --dry-run`: what a run would be, in args, and not a file."""

import dataclasses
import sys

import pytest

from pretrain.config import PretrainConfig
from pretrain.run import main
from tests.integration.conftest import damage, run, run_together
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.data.store_builder import write_store
from xlpre.model.language_model import meta_model
from xlpre.training import checkpoint

SCRIPT = "pretrain/run.py"


@pytest.fixture
def rehearsed(tmp_path, monkeypatch, capsys):
    """Call the command in this process, look that nothing was written, hand over what it printed."""

    def rehearse(*args):
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr("sys.argv", ["run.py", "--dry-run", *args])
        run_main(main)
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().out

    return rehearse


def test_a_dry_run_prints_settings_that_load_and_sizes_and_writes_nothing(make_args, store, tmp_path, rehearsed):
    said = rehearsed(*make_args(), "train.hours=2")
    (tmp_path / "config.yaml").write_text(said)
    config = load_config(PretrainConfig, tmp_path / "config.yaml")
    typed = load_config(PretrainConfig, None, [*make_args(), "train.hours=2"])
    assert config.model == dataclasses.replace(typed.model, vocab_size=300) and config.train == typed.train
    n_parameters = sum(parameter.numel() for parameter in meta_model(config.model, True).parameters())
    share = 20 * 4 * 16 / len(store.train)
    assert said.endswith(
        f"# {n_parameters:,} parameters\n"
        "# an update: 4 rows, 128 window tokens, 20 targets\n"
        f"# 20 updates, or what 2 hours allow: 1,280 tokens of text read, {share:.2f} times the training text\n"
        "# here 1 process(es) on cpu, fp32, ZeRO stage 0\n"
        "# starts at step 0\n"
    )


@pytest.mark.parametrize(
    ("word", "stage"),
    [
        ("deepspeed.zero_optimization.stage=1", 1),
        ("deepspeed.zero_optimization.stage=3", 3),
        ("deepspeed.zero_optimization.offload_optimizer.device=cpu", 1),
        ("train.precision=bf16", 1),
    ],
)
def test_a_dry_run_says_the_stage_that_a_start_would_take(make_args, rehearsed, word, stage):
    assert f"ZeRO stage {stage}\n" in rehearsed(*make_args(), word)


def test_a_dry_run_says_where_the_start_would_come_from(make_args, tmp_path, documents, tokenizer, rehearsed, capsys):
    two = make_args("first", train__steps=2, train__save_every=1)
    assert run(SCRIPT, *two).returncode == 0
    assert rehearsed(*two).endswith("# finished already at step 2\n")
    before, newest = sorted((tmp_path / "first" / "checkpoints").glob("step_*"))
    assert rehearsed(*make_args("first")).endswith(f"# goes on from {newest} at step 2\n")
    model = tmp_path / "first" / "model"
    assert f"# starts from the weights of {model} (xlpre)" in rehearsed(*make_args("second"), f"init_from={model}")
    other = write_store(tmp_path / "other", documents[:300], tokenizer, 0.1, {"source": "docstrings"}, {})
    for word, message in [
        ("seed=9", "seed=1, now"),
        (f"init_from={model}", f"init=, now it is {model}; put it back"),
        (f"data.store_dir={other.path}", "another text than data.store_dir="),
    ]:
        with pytest.raises(SystemExit):
            rehearsed(*make_args("first"), word)
        assert f"{newest} was made with {message}" in capsys.readouterr().err
    facts = checkpoint.read_manifest(newest)
    del facts["init"]  # as before it was one
    (newest / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(facts))
    assert rehearsed(*two).endswith("# finished already at step 2\n")
    damage(newest / "model" / "model.safetensors")
    assert rehearsed(*two).endswith(f"# goes on from {before} at step 1\n")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.reuse_len=31", "set data.reuse_len=16"),
        ("data.store_dir=nowhere", "make it with pretrain/prepare.py"),
        ("data.seq_len=999998", "data.seq_len needs"),
        ("model.vocab_size=5", "leave it out, it is taken from the store"),
        ("train.accumulation=3", "set train.global_batch_size=3"),
        ("train.wandb=mine", "`pip install wandb`, or leave train.wandb empty"),
        ("init=nowhere", "init: nowhere: there is no such folder"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(make_args, tmp_path, monkeypatch, capsys, word, message):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("sys.argv", ["run.py", *make_args(), "--dry-run", word])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_one_of_several_processes_prints(make_args, tmp_path):
    done = run_together(2, SCRIPT, "--dry-run", *make_args())
    assert done.returncode == 0 and done.stdout.count("# starts at step 0") == 1, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
