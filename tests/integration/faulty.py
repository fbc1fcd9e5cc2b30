"""`pretrain/run.py` with an injected fault: FAULT={"phase": ..., "do": ..., "steps": [first, last], "process": N} in the environment.

The fault happens on process N, in one of the steps, when the phase is reached; see PHASES. `do` is `kill` (the default), `kill_all`
(the process group), `stop` (the process hangs), `SIGTERM`, a system error such as `ENOSPC` (a full disk), or in the phase `loss` one of
`nan`, `inf`, `inf_gradient` and `nan_memory`. A killed process first prints a line to stderr. If the last argument is a JSON list of
lists of arguments, each is trained in turn, and `each` lists the value of `do` for each.
"""

import dataclasses
import errno
import json
import os
import signal
import sys
from pathlib import Path

import torch

import pretrain.run
import pretrain.trainer.trainer
from pretrain.config import PretrainConfig
from pretrain.trainer.trainer import Trainer
from xlpre.common import files, os_errors
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.model.language_model import LanguageModel
from xlpre.training import checkpoint, checkpoint_writer, distributed
from xlpre.training.checkpoint_writer import CheckpointWriter

FAULT = json.loads(os.environ.get("FAULT", "{}"))


def is_half_removed(path, **_) -> bool:
    """Return True for an old checkpoint whose manifest is removed already."""
    return Path(path).name.startswith("step_") and Path(path).is_dir()


def is_between_renames(source, target) -> bool:
    """Return True if the old folder has been moved away, and the new one is not in its place yet."""
    return any(Path(target).parent.glob(f".{Path(target).name}.replaced-*"))


# the function before whose call the fault happens, and a condition on its arguments
PHASES = {
    "meeting": (distributed, "_list_dir"),  # check that all processes see the run folder
    "start": (Trainer, "_build"),  # processes have joined, nothing is built
    "loading": (checkpoint, "read_lane_memory"),  # resumed runs only
    "forward": (LanguageModel, "forward"),
    "backward": (torch.autograd, "backward"),
    "update": (torch.optim.AdamW, "step"),  # inside the step of the engine
    "after_update": (Trainer, "end_step"),
    "measuring": (Trainer, "evaluate"),
    "copying": (checkpoint_writer, "gather_moments"),  # copy of the state to the CPU
    "writing": (CheckpointWriter, "_write_files"),
    "half_written": (checkpoint_writer, "fsync"),  # all files are written
    "model": (Trainer, "_write_model"),
    "manifest": (checkpoint_writer, "write_text"),  # only the manifest is missing
    "removing": (CheckpointWriter, "_remove_old"),  # the manifest is written
    "half_removed": (checkpoint_writer.shutil, "rmtree", is_half_removed),
    "publishing": (pretrain.trainer.trainer, "hardlink_copy"),
    "between_renames": (files.os, "replace", is_between_renames),
    "closing": (Trainer, "close"),
}
for owner, name, *_ in PHASES.values():
    assert hasattr(owner, name), f"{owner} has no {name}"
STEP = {"now": 0}


def is_due() -> bool:
    first, last = FAULT.get("steps", [0, 10**9])
    return int(os.environ.get("RANK", "0")) == FAULT["process"] and first <= STEP["now"] <= last


def raise_fault() -> None:
    action = FAULT.get("do", "kill")
    if hasattr(errno, action):
        raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)))
    if action.startswith("kill"):
        os.write(2, f"fault: {action} in {FAULT['phase']} at step {STEP['now']}\n".encode())
    if action == "kill_all":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}[action])


def inject_before(owner, name, condition=lambda *args, **kwargs: True) -> None:
    """Raise the fault before a call of `owner.name` whose arguments pass `condition`."""
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        if is_due() and condition(*args, **kwargs):
            raise_fault()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def inject_nonfinite() -> None:
    """Make the loss, its gradient or the memory infinite or NaN."""
    original = LanguageModel.forward

    def forward(self, batch, memory):
        loss, memory = original(self, batch, memory)
        if not is_due():
            return loss, memory
        if FAULT["do"] == "nan_memory":
            return loss, dataclasses.replace(memory, hidden=memory.hidden * torch.nan)
        if FAULT["do"] == "inf_gradient":
            loss.register_hook(lambda gradient: gradient * torch.inf)
            return loss, memory
        return loss * float(FAULT["do"]), memory

    LanguageModel.forward = forward


def track_steps() -> None:
    begin_step, end_step = Trainer.begin_step, Trainer.end_step

    def tracked_begin_step(trainer):
        STEP["now"] = trainer.progress.step
        return begin_step(trainer)

    def tracked_end_step(trainer):
        STEP["now"] = trainer.progress.step + 1
        return end_step(trainer)

    Trainer.begin_step, Trainer.end_step = tracked_begin_step, tracked_end_step


def main() -> None:
    """Run the command once, or with each list of arguments."""
    if not sys.argv[-1].startswith("[["):
        pretrain.run.main()
        return
    for args, action in zip(json.loads(sys.argv[-1]), FAULT["each"], strict=True):
        FAULT["do"], STEP["now"] = action, 0
        Trainer(load_config(PretrainConfig, None, args)).train()


if __name__ == "__main__":
    os_errors.RETRY_SECONDS = ()  # a second attempt would be in a later step
    track_steps()
    if FAULT.get("phase") == "loss":
        inject_nonfinite()
    elif FAULT:
        inject_before(*PHASES[FAULT["phase"]])
    run_main(main)
