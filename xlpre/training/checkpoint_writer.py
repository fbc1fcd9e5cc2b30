"""Asynchronous writing of checkpoints, and removal of old ones. xlpre/training/checkpoint.py describes their files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.files import FileEntries, fsync, hardlink_copy, write_text
from xlpre.common.messages import counted
from xlpre.common.os_errors import error_number, remedy, retry
from xlpre.common.safetensors_io import all_finite, write_tensors
from xlpre.training.checkpoint import (
    BEST_DIR,
    LANES_PREFIX,
    MANIFEST,
    MODEL_DIR,
    format_manifest,
    list_all,
    list_complete,
    read_manifest,
    step_of,
)
from xlpre.training.distributed import Comm, is_rank_zero, rank, world_size
from xlpre.training.optimizer_state import gather_moments, gather_weights, list_moments, read_counters

MAX_MOMENT_FILES = 16  # few, because in ZeRO stage 3 every process opens all of them to resume
# B lanes (rows of the global batch), their hidden states (L, B, M, D), and the number of valid positions of each lane (B,)
LaneMemory = tuple[Sequence[int], Tensor, Tensor]
# function of step, path and weights that writes a model folder, and returns the sizes and checksums of its files
ModelWriter = Callable[[int, Path, dict[str, Tensor]], FileEntries]


@dataclass(frozen=True)
class StepWeights:
    """Weights after a step, on the CPU of rank 0; empty on other processes."""

    step: int
    weights: dict[str, Tensor]


class SaveError(InputError):
    """Error that ends a run because checkpoints could not be written.

    Attributes:
        errno: number of the system error, which decides the exit status; see `xlpre.common.cli_main`.
    """

    def __init__(self, message: str, errno: int | None) -> None:
        super().__init__(message)
        self.errno = errno


class _Failure(NamedTuple):
    """A system error, in a form that processes can exchange."""

    errno: int | None
    text: str


class CheckpointWriter:
    """Writer of the checkpoints of a run. Training waits for the copy of the state to the CPU, not for the disk.

    A checkpoint is written in two stages, each in a background thread: every process writes its files, then rank 0 writes the
    manifest. `advance` starts the second stage when all processes have finished the first. A stage is tried again after an error. If
    it still fails, the checkpoint is removed and a warning is printed; training continues, and the latest valid checkpoint stays.

    The best weights so far are part of each checkpoint. A run that is killed resumes with the best weights and the best score of
    the same step. New best weights stay in the memory of rank 0 until the next checkpoint; later checkpoints hard-link their files.

    Args:
        folder: folder of all checkpoints of the run.
        comm: collectives for small values.
        keep_last: number of recent checkpoints that are kept; older ones are removed.
        keep_every: checkpoints whose step is a multiple of this number are never removed; None: only recent ones are kept.
        publish: called with the folder of each complete checkpoint, on rank 0, in the background.
        resumed: the checkpoint that the run resumes from; None for a new run.
        max_failed: the run ends after this number of failed checkpoints in a row.
        keep_old_memory: keep the recurrent memory of older checkpoints; False: remove it once a newer checkpoint is complete.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        keep_last: int,
        keep_every: int | None = None,
        publish: Callable[[Path], None] = lambda checkpoint: None,
        resumed: Path | None = None,
        max_failed: int = 1,
        keep_old_memory: bool = True,
    ) -> None:
        self._folder, self._comm, self._publish = folder, comm, publish
        self._keep_last, self._keep_every, self._max_failed = keep_last, keep_every, max_failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[tuple[FileEntries, _Failure | None]] | None = None
        self._keep_old_memory = keep_old_memory
        self._n_failed = 0  # in a row
        self._error: SaveError | None = None  # of the last checkpoint
        self._target = folder
        self._manifest: dict[str, Any] = {}
        self._new_best: StepWeights | None = None  # in no checkpoint yet
        self._saved_best: StepWeights | None = None  # in the checkpoint in progress
        self._latest = resumed
        if is_rank_zero():
            self._remove_incomplete(list_complete(folder))

    @property
    def is_writing(self) -> bool:
        """True while the background thread of this process is busy."""
        return self._work is not None and not self._work.done()

    @property
    def in_progress(self) -> bool:
        """True from `begin` until the checkpoint is complete."""
        return self._work is not None

    def begin(
        self,
        step: int,
        engine: Any,
        memories: Sequence[LaneMemory],
        manifest: Mapping[str, Any],
        write_model: ModelWriter,
    ) -> None:
        """Finish the previous checkpoint, copy the state, and start to write a checkpoint. Every process must call it.

        Args:
            step: number of steps done.
            engine: the DeepSpeed engine.
            memories: recurrent memory of this process, one entry per micro-step. If it is empty, no memory is saved.
            manifest: further entries of the manifest: settings that must not change when the run resumes, and counters such as the clock.
            write_model: writes the model folder; called on rank 0, in the background.

        Raises:
            InputError: a weight is not finite. Nothing is written.
        """
        self.finish()
        current = self._saved_best = self._new_best
        self._new_best = None
        if current is None or current.step != step:
            current = StepWeights(step, self.gather_finite_weights(step, engine))
        self._target = self._folder / f"step_{step:08d}"
        _, failure = self._comm.broadcast(_attempt(self._create_target) if is_rank_zero() else ({}, None))
        if failure:
            self._fail(failure)
            return
        moments = gather_moments(engine, keep=lambda index: _moments_rank(index) == rank())
        lane_tensors: dict[str, Tensor] = {}
        for micro_step, (lanes, hidden, valid) in enumerate(memories):
            lane_tensors |= {
                f"{micro_step}.lanes": torch.tensor(list(lanes)),
                f"{micro_step}.hidden": hidden.cpu(),
                f"{micro_step}.valid": valid.cpu(),
            }
        lanes_by_rank = self._comm.all_gather([lane for lanes, *_ in memories for lane in lanes])
        self._manifest = {
            "step": step,
            "world_size": world_size(),
            "counters": read_counters(engine),
            "moments": {name: _moments_file(_moments_rank(index)) for name, index in list_moments(engine).items()},
            "lanes": {_lanes_file(writer): lanes for writer, lanes in enumerate(lanes_by_rank) if lanes},
            **manifest,
        }
        write = partial(self._write_files, current, moments, lane_tensors, write_model)
        self._work = self._thread.submit(_attempt, write)

    def keep_best(self, step: int, engine: Any) -> None:
        """Keep a copy of the current weights as the best so far, for the next checkpoint. Every process must call it.

        Raises:
            InputError: a weight is not finite.
        """
        self._new_best = StepWeights(step, self.gather_finite_weights(step, engine))

    def write_best(self, path: Path, write_model: ModelWriter) -> None:
        """Write the best weights to the model folder `path`, on rank 0. No checkpoint may be in progress."""
        assert self._work is None
        if not is_rank_zero():
            return
        if self._new_best is not None:
            write_model(self._new_best.step, path, self._new_best.weights)
        elif self._latest is not None and (self._latest / BEST_DIR).is_dir():
            hardlink_copy(self._latest / BEST_DIR, path)

    def gather_finite_weights(self, step: int, engine: Any) -> dict[str, Tensor]:
        """Gather the weights on rank 0. Every process must call it.

        Raises:
            InputError: a weight is not finite. The checkpoint in progress is finished first.
        """
        weights = gather_weights(engine, keep=is_rank_zero())
        nonfinite = self._comm.broadcast(next((name for name, x in weights.items() if not all_finite(x)), ""))
        if nonfinite:
            self.finish()
            resume = (
                f" (pretraining then resumes from {self._latest.name}, whose weights are finite)"
                if self._latest
                else ""
            )
            raise InputError(
                f"the weights are not finite after step {step:,} (the first is {nonfinite}) and were not saved. Lower optim.lr{resume}, or "
                "start under another name with another train.precision. Fine-tuning needs another name in both cases."
            )
        return weights

    def advance(self) -> None:
        """End a stage of the checkpoint in progress, and start the next stage if there is one.

        Every process must call it, when `is_writing` is False on all processes.

        Raises:
            SaveError: `max_failed` checkpoints in a row could not be written.
        """
        assert self._work is not None
        results = self._comm.all_gather(self._work.result())
        self._work = None
        if failures := [failure for _, failure in results if failure]:
            self._fail(failures[0])
            return
        all_entries = {name: entry for entries, _ in results for name, entry in entries.items()}
        if not all_entries:  # the second stage is done
            self._latest, self._saved_best, self._n_failed, self._error = self._target, None, 0, None
            return
        self._work = self._thread.submit(_attempt, partial(self._complete, all_entries) if is_rank_zero() else dict)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. Every process must call it."""
        while self._work is not None:
            wait([self._work])
            self.advance()

    def close(self, needs_last: bool = True) -> None:
        """Finish the checkpoint in progress and stop the background thread. Every process must call it.

        Args:
            needs_last: True if work would be lost without the last checkpoint.

        Raises:
            SaveError: `needs_last` is True, and the last checkpoint could not be written.
        """
        self.finish()
        self._thread.shutdown()
        if needs_last and self._error is not None:
            raise self._error

    def _create_target(self) -> FileEntries:
        if self._target.exists():
            shutil.rmtree(self._target)  # an incomplete checkpoint of the same step
        self._target.mkdir(parents=True)
        return {}

    def _write_files(
        self,
        current: StepWeights,
        moments: dict[str, Tensor],
        lane_tensors: dict[str, Tensor],
        write_model: ModelWriter,
    ) -> FileEntries:
        """First stage: write the files of this process. Return their sizes and checksums."""
        target = self._target
        files = {_moments_file(rank()): moments, _lanes_file(rank()): lane_tensors}
        entries = {name: write_tensors(target / name, tensors) for name, tensors in files.items() if tensors}
        if is_rank_zero():
            model = write_model(current.step, target / MODEL_DIR, current.weights)
            best = self._write_best_of_checkpoint(model, write_model)
            entries |= {f"{MODEL_DIR}/{name}": entry for name, entry in model.items()}
            entries |= {f"{BEST_DIR}/{name}": entry for name, entry in best.items()}
        for name in entries:
            fsync(target / name)
        return entries

    def _write_best_of_checkpoint(self, model: FileEntries, write_model: ModelWriter) -> FileEntries:
        """Write the best weights into the checkpoint in progress; hard-link them if its model or the previous checkpoint has them."""
        best, target, previous = self._saved_best, self._target / BEST_DIR, self._latest
        if best is not None and best.step != self._manifest["step"]:
            return write_model(best.step, target, best.weights)
        if best is not None:
            hardlink_copy(self._target / MODEL_DIR, target)
            return model
        if previous is None or not (previous / BEST_DIR).is_dir():
            return {}
        hardlink_copy(previous / BEST_DIR, target)
        files = read_manifest(previous)["files"]
        entries = {path.name: files[f"{BEST_DIR}/{path.name}"] for path in target.iterdir()}
        return {name: (entry["bytes"], entry["crc32c"]) for name, entry in entries.items()}

    def _complete(self, entries: Mapping[str, tuple[int, int]]) -> FileEntries:
        """Second stage, on rank 0: write the manifest, remove old checkpoints and publish the new one."""
        self._manifest["files"] = {name: {"bytes": size, "crc32c": crc32c} for name, (size, crc32c) in entries.items()}
        write_text(self._target / MANIFEST, format_manifest(self._manifest))
        fsync(self._folder)
        fsync(self._folder.parent)
        self._remove_damaged()
        self._remove_old()
        self._publish(self._target)
        return {}

    def _fail(self, failure: _Failure) -> None:
        """Remove the checkpoint in progress, and raise SaveError or print a warning."""
        if is_rank_zero() and not os.path.exists(self._target / MANIFEST):
            shutil.rmtree(self._target, ignore_errors=True)
        if self._comm.broadcast(os.path.exists(self._target / MANIFEST)):
            self._latest, self._saved_best = self._target, None
            problem = "is valid, but an older checkpoint could not be removed, or the model folder could not be updated"
        else:
            problem = "could not be written"
            self._new_best = self._new_best or self._saved_best
        latest = (
            f"The latest valid checkpoint is {self._latest.name}" if self._latest else "There is no other checkpoint"
        )
        message = f"{self._target} {problem} ({failure.text}). {latest}."
        self._error = SaveError(f"{message} {remedy(failure.errno)}", failure.errno)
        self._n_failed += 1
        if self._n_failed >= self._max_failed:
            raise self._error
        if is_rank_zero():
            left = self._max_failed - self._n_failed
            print(
                f"warning: {message} Training continues, and ends after {counted(left, 'more failed save')} in a row "
                f"(train.max_failed_saves={self._max_failed}).",
                file=sys.stderr,
                flush=True,
            )

    def _remove_damaged(self) -> None:
        """Remove the damaged checkpoints of later steps that the run found when it resumed. The run repeats these steps."""
        latest = min(map(step_of, filter(None, (self._latest, self._target))))
        for path in list_all(self._folder):
            if step_of(path) > latest and path != self._target:
                _remove(path)

    def _remove_old(self) -> None:
        complete = list_complete(self._folder)  # it inspects every file, so it is called once
        for path in complete[: -self._keep_last]:
            if not (self._keep_every and read_manifest(path)["step"] % self._keep_every == 0):
                _remove(path)
        self._remove_incomplete(complete)
        for path in [] if self._keep_old_memory else complete[:-1]:
            if path.exists():
                _remove_memory(path)

    def _remove_incomplete(self, complete: Sequence[Path]) -> None:
        """Remove folders without a manifest that are older than the latest checkpoint: a kill interrupted their writing or removal.

        Args:
            complete: the complete checkpoints, oldest first.
        """
        for latest in complete[-1:]:
            for path in list_all(self._folder):
                if path.name < latest.name and not (path / MANIFEST).exists():
                    shutil.rmtree(path)


def _remove_memory(checkpoint: Path) -> None:
    """Rewrite the manifest of a checkpoint without recurrent memory, then remove the memory: a kill leaves a valid checkpoint."""
    manifest = read_manifest(checkpoint)
    files = {name: entry for name, entry in manifest["files"].items() if not name.startswith(LANES_PREFIX)}
    if len(files) < len(manifest["files"]):
        write_text(checkpoint / MANIFEST, format_manifest({**manifest, "files": files, "lanes": {}}))
    for path in checkpoint.glob(f"{LANES_PREFIX}*"):
        path.unlink()


def _moments_rank(index: int) -> int:
    """Return the rank that writes the moments of parameter `index`: one of at most `MAX_MOMENT_FILES` evenly spaced ranks."""
    n_files = min(world_size(), MAX_MOMENT_FILES)
    return index % n_files * (world_size() // n_files)


def _moments_file(writer: int) -> str:
    return f"moments_{writer:03d}.safetensors"


def _lanes_file(writer: int) -> str:
    return f"{LANES_PREFIX}{writer:03d}.safetensors"


def _remove(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that an interrupted removal leaves no checkpoint
    shutil.rmtree(checkpoint)


def _attempt(work: Callable[[], FileEntries]) -> tuple[FileEntries, _Failure | None]:
    """Run `work`, and again after an error. Return its result, or the error of the last attempt."""
    try:
        return retry(work), None
    except OSError as error:
        return {}, _Failure(error_number(error), f"process {rank()}: {error}")
