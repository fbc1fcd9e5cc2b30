"""Runs whose checkpoints have no recurrent memory fill it again."""

import shutil

import pytest

from tests.integration.conftest import damage, largest_difference, read_steps, run
from tests.integration.test_stages import DROPOUT, STAGE, train_all
from xlpre.training import checkpoint

SETTINGS = {**DROPOUT, "eval__every": 1000, "schedule__decay": "constant", "data__windows_per_run": 4}
REFILLED = (
    "has no recurrent memory (train.save_memory): to fill it, the last 1 window of each batch row were read again"
)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_memory_that_is_not_saved_is_filled_by_the_present_weights(make_args, tmp_path, stage):
    """With constant weights, it is that of an uninterrupted run if the windows go back to where the lanes moved to another position.

    Step 4 is the first of such a position, and the memory is as long as the reused part of one window.
    """
    settings = {**SETTINGS, STAGE: stage, "optim__lr": 1e-30, "train__save_memory": "none"}
    output = train_all(
        [
            make_args("whole", **settings, train__steps=8),
            make_args("resumed", **settings, train__steps=5),
            make_args("resumed", **settings, train__steps=8),
        ]
    )
    assert REFILLED in output
    assert read_steps(tmp_path / "resumed") == read_steps(tmp_path / "whole")
    assert not [*tmp_path.rglob("lanes_*")]


def test_only_the_newest_checkpoint_has_memory_and_an_older_one_is_resumed_with_refilled_memory(make_args, tmp_path):
    settings = {**SETTINGS, "train__save_every": 3}
    train_all([make_args("whole", **settings, train__steps=9), make_args("run", **settings, train__steps=6)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    old, new = checkpoint.list_complete(tmp_path / "run" / "checkpoints")
    assert not [*old.glob("lanes_*")] and [*new.glob("lanes_*")]
    result = run("pretrain/run.py", *make_args("copy", **settings, train__steps=9))
    assert result.returncode == 0 and REFILLED not in result.stdout
    assert read_steps(tmp_path / "copy") == read_steps(tmp_path / "whole")
    damage(new / "lanes_000.safetensors")
    result = run("pretrain/run.py", *make_args("run", **settings, train__steps=9))
    assert result.returncode == 0 and "at step 3" in result.stdout and REFILLED in result.stdout, result.stderr
    assert 0 < largest_difference(read_steps(tmp_path / "run"), read_steps(tmp_path / "whole")) < 0.1
