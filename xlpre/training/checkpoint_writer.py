"""Asynchronous writing of checkpoints, and removal of old ones. xlpre/training/checkpoint.py describes their files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlpre.common.files import compute_crc32c, fsync, hardlink_copy, write_text
from xlpre.common.safetensors_io import all_finite, write_tensors
from xlpre.training.checkpoint import (
    BEST_DIR,
    MANIFEST,
    MODEL_DIR,
    format_manifest,
    list_all,
    list_complete,
    read_manifest,
)
from xlpre.training.distributed import Comm, is_rank_zero, rank, world_size
from xlpre.training.optimizer_state import gather_moments, gather_weights, read_counters

LaneMemory = tuple[Sequence[int], Tensor, Tensor]  # lanes, hidden (L, B, M, D), valid (B,)
FileEntries = dict[str, tuple[int, int]]  # name: bytes, CRC-32C
ModelWriter = Callable[[int, Path, dict[str, Tensor]], None]  # writes a model folder, given step, path and weights


@dataclass(frozen=True)
class StepWeights:
    """Weights after a step, on the CPU of rank 0; empty on other processes."""

    step: int
    weights: dict[str, Tensor]


class CheckpointWriter:
    """Writer of the checkpoints of a run. Training waits for the copy of the state to the CPU, not for the disk.

    A checkpoint is written in two stages, each in a background thread: every process writes its files, then rank 0 writes the
    manifest. `advance` starts the second stage when all processes have finished the first.

    The best weights so far are part of each checkpoint. A run that is killed resumes with the best weights and the best score of one
    and the same step. New best weights stay in the memory of rank 0 until the next checkpoint; later checkpoints hard-link them.

    Args:
        folder: folder of all checkpoints of the run.
        comm: collectives for small values.
        keep_last: number of recent checkpoints that are kept; older ones are removed.
        keep_every: checkpoints whose step is a multiple of this number are never removed; None: no others.
        publish: called with each complete checkpoint, on rank 0, in the background.
        resumed: the checkpoint that the run resumes from; None: the latest complete checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        keep_last: int,
        keep_every: int | None = None,
        publish: Callable[[Path], None] = lambda checkpoint: None,
        resumed: Path | None = None,
    ) -> None:
        self._folder, self._comm, self._publish = folder, comm, publish
        self._keep_last, self._keep_every = keep_last, keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[FileEntries] | None = None
        self._target = folder
        self._manifest: dict[str, Any] = {}
        self._new_best: StepWeights | None = None  # in no checkpoint yet
        self._latest = resumed or next(reversed(list_complete(folder)), None)
        if is_rank_zero():
            self._remove_incomplete()

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
        """Copy the state and start to write a checkpoint, after finishing the previous one. Every process must call it.

        Args:
            step: number of steps done.
            engine: the DeepSpeed engine.
            memories: recurrent memory of this process, one entry per micro-step.
            manifest: entries of the manifest: settings that a resumed run must share, and counters such as the clock.
            write_model: called on rank 0, in the background.

        Raises:
            ValueError: a weight is not finite. Nothing is written.
        """
        self.finish()
        best, self._new_best = self._new_best, None
        present = best
        if present is None or present.step != step:
            present = StepWeights(step, self.gather_finite_weights(step, engine))
        self._target = self._folder / f"step_{step:08d}"
        if is_rank_zero():
            shutil.rmtree(self._target, ignore_errors=True)  # an incomplete one of the same step
            self._target.mkdir(parents=True)
        self._comm.barrier()
        moments = gather_moments(engine, keep=lambda index: index % world_size() == rank())
        lane_tensors: dict[str, Tensor] = {}
        for micro_step, (lanes, hidden, valid) in enumerate(memories):
            lane_tensors |= {
                f"{micro_step}.lanes": torch.tensor(list(lanes)),
                f"{micro_step}.hidden": hidden.cpu(),
                f"{micro_step}.valid": valid.cpu(),
            }
        self._manifest = {"step": step, "world_size": world_size(), "counters": read_counters(engine), **manifest}
        self._work = self._thread.submit(self._write_files, present, best, moments, lane_tensors, write_model)

    def keep_best(self, step: int, engine: Any) -> None:
        """Keep a copy of the present weights as the best so far, for the next checkpoint. Every process must call it.

        Raises:
            ValueError: a weight is not finite.
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
            ValueError: a weight is not finite. The checkpoint in progress is finished first.
        """
        weights = gather_weights(engine, keep=is_rank_zero())
        nonfinite = self._comm.broadcast(next((name for name, x in weights.items() if not all_finite(x)), ""))
        if nonfinite:
            self.finish()
            remedy = (
                f"Lower optim.lr, and the run resumes from {self._latest.name}, whose weights are finite"
                if self._latest
                else "Lower optim.lr"
            )
            raise ValueError(
                f"the weights are not finite after step {step:,} (the first is {nonfinite}) and were not saved. {remedy}; or start under "
                "another name with another train.precision."
            )
        return weights

    def advance(self) -> None:
        """Start the next stage of the checkpoint in progress. Every process must call it, when `is_writing` is False on all.

        Raises:
            ValueError: a file could not be written. The checkpoint is removed.
        """
        assert self._work is not None
        entries, failure = {}, ""
        try:
            entries = self._work.result()
        except OSError as error:
            failure = f"process {rank()}: {error}"
        self._work = None
        results = self._comm.all_gather((entries, failure))
        if failures := [failure for _, failure in results if failure]:
            self._fail(failures[0])
        all_entries = {name: entry for entries, _ in results for name, entry in entries.items()}
        if not all_entries:  # the second stage is done
            self._latest = self._target
            return
        self._work = self._thread.submit(partial(self._complete, all_entries) if is_rank_zero() else dict)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. Every process must call it."""
        while self._work is not None:
            wait([self._work])
            self.advance()

    def close(self) -> None:
        """Finish the checkpoint in progress and stop the background thread. Every process must call it."""
        self.finish()
        self._thread.shutdown()

    def _write_files(
        self,
        present: StepWeights,
        best: StepWeights | None,
        moments: dict[str, Tensor],
        lane_tensors: dict[str, Tensor],
        write_model: ModelWriter,
    ) -> FileEntries:
        """First stage: write the files of this process, and return their sizes and the checksums read back from disk."""
        target = self._target
        names = [f"moments_{rank():03d}.safetensors", f"lanes_{rank():03d}.safetensors"]
        for name, tensors in zip(names, (moments, lane_tensors), strict=True):
            write_tensors(target / name, tensors)
        if is_rank_zero():
            write_model(present.step, target / MODEL_DIR, present.weights)
            self._write_best_of_checkpoint(best, write_model)
            names += [str(path.relative_to(target)) for path in sorted(target.glob("*/*"))]
        for name in names:
            fsync(target / name)
        return {name: ((target / name).stat().st_size, compute_crc32c(target / name)) for name in names}

    def _write_best_of_checkpoint(self, best: StepWeights | None, write_model: ModelWriter) -> None:
        """Write the weights `best` into the checkpoint in progress; None: link those of the previous checkpoint."""
        if best is not None and best.step != self._manifest["step"]:
            write_model(best.step, self._target / BEST_DIR, best.weights)
            return
        source = self._target / MODEL_DIR if best is not None else self._latest and self._latest / BEST_DIR
        if source is not None and source.is_dir():
            hardlink_copy(source, self._target / BEST_DIR)

    def _complete(self, entries: Mapping[str, tuple[int, int]]) -> FileEntries:
        """Second stage, on rank 0: write the manifest, remove old checkpoints and publish the new one."""
        self._manifest["files"] = {name: {"bytes": size, "crc32c": crc32c} for name, (size, crc32c) in entries.items()}
        write_text(self._target / MANIFEST, format_manifest(self._manifest))
        self._remove_damaged()
        self._remove_old()
        self._publish(self._target)
        return {}

    def _fail(self, failure: str) -> None:
        """Remove the checkpoint in progress and raise ValueError."""
        if is_rank_zero() and not (self._target / MANIFEST).exists():
            shutil.rmtree(self._target, ignore_errors=True)
        self._comm.barrier()
        latest = self._target if (self._target / MANIFEST).exists() else self._latest
        state = f"The latest valid checkpoint is {latest.name}" if latest else "There is no other checkpoint"
        raise ValueError(
            f"{self._target} could not be written ({failure}). {state}. Free disk space, and run the same command to resume."
        )

    def _remove_damaged(self) -> None:
        """Remove the checkpoints newer than the one that the run resumed from: they are damaged, and their steps were repeated."""
        latest = min(self._latest or self._target, self._target)
        for path in list_all(self._folder):
            if path > latest and path != self._target:
                _remove(path)

    def _remove_old(self) -> None:
        for path in list_complete(self._folder)[: -self._keep_last]:
            if not (self._keep_every and read_manifest(path)["step"] % self._keep_every == 0):
                _remove(path)
        self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        """Remove folders without a manifest that are older than the latest checkpoint: a kill interrupted their writing or removal."""
        for latest in list_complete(self._folder)[-1:]:
            for path in list_all(self._folder):
                if path.name < latest.name and not (path / MANIFEST).exists():
                    shutil.rmtree(path)


def _remove(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that an interrupted removal leaves no checkpoint
    shutil.rmtree(checkpoint)
