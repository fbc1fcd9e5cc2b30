"""`pretrain/run.py` with a fault put into it: FAULT={"phase": ..., "do": ..., "steps": [first, last], "process": N} in the environment.

A fault happens on process N, once it is in one of the steps (updates done) and in the phase. See PHASES for where one can be killed;
`do` is `kill` (by default), `kill_all` (the whole process group at once), `stop` (it hangs), `full` (no room on the disk) or, in the
phase `loss`, `nan`, `inf`, `inf_gradient` and `nan_memory`. What is killed says so first, on stderr. Given a JSON list of lists of
args, it pretrains with each in turn, and `each` says what is done in them.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch

import pretrain.run
import pretrain.trainer.loop
import pretrain.trainer.trainer
from pretrain.config import PretrainConfig
from pretrain.trainer.trainer import Trainer
from xlpre.common import files
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.model.language_model import LanguageModel
from xlpre.training import checkpoint, checkpoint_writer, distributed
from xlpre.training.checkpoint_writer import CheckpointWriter

FAULT = json.loads(os.environ.get("FAULT", "{}"))


def only_half_removed(path, **_) -> bool:
    """Whether it is an old checkpoint, whose manifest is gone already."""
    return Path(path).name.startswith("step_") and Path(path).is_dir()


def between_renames(source, target) -> bool:
    """Whether the folder that is to be replaced has been moved away, and the new one is not there yet."""
    return any(Path(target).parent.glob(f".{Path(target).name}.replaced-*"))


PHASES = {  # before a call of what; of those calls, before which
    "meeting": (distributed, "_names_in"),  # whether all see the run folder
    "start": (Trainer, "_start"),  # processes joined, nothing built
    "loading": (checkpoint, "memory_of"),  # of a resumed run only
    "forward": (LanguageModel, "forward"),
    "backward": (torch.autograd, "backward"),
    "update": (torch.optim.AdamW, "step"),  # inside the engine's step
    "after_update": (Trainer, "end_update"),
    "measuring": (Trainer, "measure"),
    "copying": (checkpoint_writer, "gather_moments"),  # what is to be saved
    "writing": (CheckpointWriter, "_write"),
    "half_written": (checkpoint_writer, "compute_crc32c"),  # all is written, or read back
    "model": (Trainer, "_write_model"),
    "manifest": (checkpoint_writer, "write_text"),  # all is there but the manifest
    "removing": (CheckpointWriter, "_remove_old"),  # the manifest is there
    "half_removed": (checkpoint_writer.shutil, "rmtree", only_half_removed),
    "publishing": (pretrain.trainer.trainer, "hardlink_copy"),
    "between_renames": (files.os, "replace", between_renames),
    "closing": (Trainer, "close"),
}
STEP = {"now": 0}


def due() -> bool:
    first, last = FAULT.get("steps", [0, 10**9])
    return int(os.environ.get("RANK", "0")) == FAULT["process"] and first <= STEP["now"] <= last


def happen() -> None:
    what = FAULT.get("do", "kill")
    if what == "full":
        raise OSError(28, "No space left on device")
    if what.startswith("kill"):
        os.write(2, f"fault: {what} in {FAULT['phase']} at step {STEP['now']}\n".encode())
    if what == "kill_all":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def before(owner, name, when=lambda *args, **kwargs: True) -> None:
    """Let the fault happen before a call of `owner.name` that is as `when` says."""
    original = getattr(owner, name)

    def replaced(*args, **kwargs):
        if due() and when(*args, **kwargs):
            happen()
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def spoil() -> None:
    """Let the loss, its gradient or the memory not be finite."""
    original = LanguageModel.forward

    def forward(self, batch, memory):
        loss, memory = original(self, batch, memory)
        if not due():
            return loss, memory
        if FAULT["do"] == "nan_memory":
            return loss, dataclasses.replace(memory, hidden=memory.hidden * torch.nan)
        if FAULT["do"] == "inf_gradient":
            loss.register_hook(lambda gradient: gradient * torch.inf)
            return loss, memory
        return loss * float(FAULT["do"]), memory

    LanguageModel.forward = forward


def note_steps() -> None:
    begin, end = Trainer.begin_step, Trainer.end_step

    def began(job):
        STEP["now"] = job.course.step
        return begin(job)

    def ended(job):
        STEP["now"] = job.course.step + 1
        return end(job)

    Trainer.begin_step, Trainer.end_step = began, ended


def main() -> None:
    """The command, or several."""
    if not sys.argv[-1].startswith("[["):
        pretrain.run.main()
        return
    for args, do in zip(json.loads(sys.argv[-1]), FAULT["each"], strict=True):
        FAULT["do"], STEP["now"] = do, 0
        pretrain.trainer.loop.pretrain(load_config(PretrainConfig, None, args))


if __name__ == "__main__":
    note_steps()
    if FAULT.get("phase") == "loss":
        spoil()
    elif FAULT:
        before(*PHASES[FAULT["phase"]])
    run_main(main)
