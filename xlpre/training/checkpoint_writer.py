"""Writing checkpoints while training goes on, and removing old ones. xlpre/training/checkpoint.py says what one is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlpre.common.files import compute_crc32c, fsync, write_text
from xlpre.common.safetensors_io import all_finite, write_tensors
from xlpre.training.checkpoint import MANIFEST, MODEL_DIR, list_all, list_complete, read_manifest, format_manifest
from xlpre.training.distributed import Comm, is_rank_zero, rank, world_size
from xlpre.training.optimizer_state import read_counters, gather_moments, gather_weights

LaneMemory = tuple[Sequence[int], Tensor, Tensor]  # lanes, hidden (L, B, M, D), valid (B,)


class CheckpointWriter:
    """Saves the checkpoints of a run. Training waits for the copy of its state, not for the disk.

    Args:
        folder: of all checkpoints of the run.
        comm: between the processes.
        keep_last: older checkpoints beyond so many are removed,
        keep_every: but those of steps divisible by it.
        publish: called with each checkpoint when it is one; on process 0, in the background.
        resumed: the checkpoint that training goes on from; if it is not said, the newest that is whole.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        keep_last: int,
        keep_every: int | None = None,
        publish: Callable[[Path], None] = lambda saved: None,
        resumed: Path | None = None,
    ) -> None:
        self._folder, self._comm, self._publish = folder, comm, publish
        self._keep_last, self._keep_every = keep_last, keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[dict[str, tuple[int, int]]] | None = None
        self._target = folder
        self._facts: dict[str, Any] = {}
        self._good = resumed or next(reversed(list_complete(folder)), None)
        if is_rank_zero():
            self._remove_unfinished()

    def begin(
        self,
        step: int,
        engine: Any,
        memories: Sequence[LaneMemory],
        facts: Mapping[str, Any],
        write_model: Callable[[Path, dict[str, Tensor]], None],
    ) -> None:
        """Finish the one before, copy the state and begin to write it; every process must call it.

        Args:
            step: updates done.
            engine: DeepSpeed's.
            memories: of the lanes of this process.
            facts: small things to know on resuming: what must agree, and what goes on (the clock).
            write_model: makes a model folder of weights; called on process 0, in the background.

        Raises:
            ValueError: the weights are not finite; nothing of them is written.
        """
        self.finish()
        weights = self.weights(step, engine)
        self._target = self._folder / f"step_{step:08d}"
        if is_rank_zero():
            shutil.rmtree(self._target, ignore_errors=True)  # an unfinished one of the same step
            self._target.mkdir(parents=True)
        self._comm.barrier()
        moments = gather_moments(engine, keep=lambda index: index % world_size() == rank())
        lanes: dict[str, Tensor] = {}
        for group, (numbers, hidden, valid) in enumerate(memories):
            lanes |= {
                f"{group}.lanes": torch.tensor(list(numbers)),
                f"{group}.hidden": hidden.cpu(),
                f"{group}.valid": valid.cpu(),
            }
        self._facts = {"step": step, "world_size": world_size(), "counters": read_counters(engine), **facts}
        self._work = self._thread.submit(self._write, self._target, weights, moments, lanes, write_model)

    def weights(self, step: int, engine: Any) -> dict[str, Tensor]:
        """The model's weights, on process 0, to be written as those of `step`; every process must call it.

        Raises:
            ValueError: they are not finite. What was begun before is a checkpoint by then.
        """
        weights = gather_weights(engine, keep=is_rank_zero())
        spoilt = self._comm.broadcast(next((name for name, weight in weights.items() if not all_finite(weight)), ""))
        if spoilt:
            self.finish()
            good = self._good
            way_out = (
                f"with a lower optim.lr the run goes on from {good.name}, whose weights are finite"
                if good
                else "lower optim.lr"
            )
            raise ValueError(
                f"the weights are not finite after step {step:,} ({spoilt} is the first of them), and were not saved; {way_out}, or begin "
                "under another name with another train.precision"
            )
        return weights

    @property
    def writing(self) -> bool:
        """Whether this process is still at it."""
        return self._work is not None and not self._work.done()

    @property
    def begun(self) -> bool:
        """Whether a checkpoint was begun that is not one yet."""
        return self._work is not None

    def advance(self) -> None:
        """Go on with what was begun; every process must call it, when none is `writing`.

        When all have written, process 0 makes it a checkpoint, again in the background; then it is one.

        Raises:
            ValueError: it could not be written; nothing of it is left.
        """
        assert self._work is not None
        files, failure = {}, ""
        try:
            files = self._work.result()
        except OSError as error:
            failure = f"process {rank()}: {error}"
        self._work = None
        everywhere = self._comm.all_gather((files, failure))
        if failures := [failure for _, failure in everywhere if failure]:
            self._fail(failures[0])
        found = {name: numbers for files, _ in everywhere for name, numbers in files.items()}
        if not found:
            self._good = self._target
            return
        self._work = self._thread.submit(partial(self._complete, found) if is_rank_zero() else dict)

    def finish(self) -> None:
        """Wait until what was begun is a checkpoint; every process must call it."""
        while self._work is not None:
            wait([self._work])
            self.advance()

    def _fail(self, failure: str) -> None:
        if is_rank_zero() and not (self._target / MANIFEST).exists():
            shutil.rmtree(self._target, ignore_errors=True)
        self._comm.barrier()
        good = self._target if (self._target / MANIFEST).exists() else self._good
        raise ValueError(
            f"{self._target} could not be written ({failure}); "
            + (f"{good.name} is good: " if good else "there is no other: ")
            + "make room, and the same command goes on from there"
        )

    def _complete(self, files: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Make what is written a checkpoint."""
        self._facts["files"] = {name: {"bytes": size, "crc32c": found} for name, (size, found) in files.items()}
        write_text(self._target / MANIFEST, format_manifest(self._facts))
        self._remove_undone()
        self._remove_old()
        self._publish(self._target)
        return {}

    def close(self) -> None:
        """Finish what was begun; no more checkpoints. Every process must call it."""
        self.finish()
        self._thread.shutdown()

    def _write(
        self,
        target: Path,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        lanes: dict[str, Tensor],
        write_model: Callable[[Path, dict[str, Tensor]], None],
    ) -> dict[str, tuple[int, int]]:
        """Write the files of this process; their sizes and checksums, as read back."""
        names = [f"moments_{rank():03d}.safetensors", f"lanes_{rank():03d}.safetensors"]
        for name, tensors in zip(names, (moments, lanes), strict=True):
            write_tensors(target / name, tensors)
        if is_rank_zero():
            write_model(target / MODEL_DIR, weights)
            names += [str(path.relative_to(target)) for path in sorted((target / MODEL_DIR).iterdir())]
        for name in names:
            fsync(target / name)
        return {name: ((target / name).stat().st_size, compute_crc32c(target / name)) for name in names}

    def _remove_undone(self) -> None:
        """What is later than the checkpoint that training went on from: damaged, and its steps were made again."""
        since = min(self._good or self._target, self._target)
        for left in list_all(self._folder):
            if left > since and left != self._target:
                _remove(left)

    def _remove_old(self) -> None:
        for old in list_complete(self._folder)[: -self._keep_last]:
            if not (self._keep_every and read_manifest(old)["step"] % self._keep_every == 0):
                _remove(old)
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """What a kill cut short, while it was written or removed, and a newer checkpoint has made useless."""
        for newest in list_complete(self._folder)[-1:]:
            for left in list_all(self._folder):
                if left.name < newest.name and not (left / MANIFEST).exists():
                    shutil.rmtree(left)


def _remove(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first of all, so that a half-removed one is no checkpoint
    shutil.rmtree(checkpoint)
