"""Checkpoints of one's own run: what training knows, written beside it, whatever the ZeRO stage and the number of processes.

    checkpoints/step_00000500/manifest.json              written last: names, sizes and checksums of all files, and what the run was
                              model/                     the weights, as a model folder
                              moments_000.safetensors    Adam's moments of a share of the parameters, written by process 0
                              lanes_000.safetensors      the memories of the lanes of process 0
                              ...

A folder without a manifest, or with a file that is not as it says, is not a checkpoint. Nothing in one is ever unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xlpre.atomic import new_file, sync
from xlpre.training.distributed import Talk, is_main, n_processes, process
from xlpre.training.state import counters_of, moments_of, weights_of

MANIFEST = "manifest.json"
MODEL = "model"
LaneMemory = tuple[Sequence[int], Tensor, Tensor]  # lanes, hidden (L, B, M, D), valid (B,)


class CheckpointWriter:
    """Saves the checkpoints of a run. Training waits for the copy of its state, not for the disk.

    Args:
        folder: of all checkpoints of the run.
        talk: between the processes.
        keep_last: older checkpoints beyond so many are removed,
        keep_every: but those of steps divisible by it.
        publish: called with each checkpoint when it is one; on process 0, in the background.
    """

    def __init__(
        self,
        folder: Path,
        talk: Talk,
        keep_last: int,
        keep_every: int | None = None,
        publish: Callable[[Path], None] = lambda saved: None,
    ) -> None:
        self._folder, self._talk, self._publish = folder, talk, publish
        self._keep_last, self._keep_every = keep_last, keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[dict[str, tuple[int, int]]] | None = None
        self._target, self._facts = folder, {}  # type: Path, dict[str, Any]
        if is_main():
            self._remove_unfinished()

    def begin(
        self,
        step: int,
        engine: Any,
        memories: Sequence[LaneMemory],
        facts: Mapping[str, Any],
        write_model: Callable[[Path, dict[str, Tensor]], None],
    ) -> None:
        """Copy the state and begin to write it; every process must call it, when no other is being written.

        Args:
            step: updates done.
            engine: DeepSpeed's.
            memories: of the lanes of this process.
            facts: small things to know on resuming: what must agree, and what goes on (the clock).
            write_model: makes a model folder of weights; called on process 0, in the background.
        """
        assert self._work is None
        self._target = self._folder / f"step_{step:08d}"
        if is_main():
            shutil.rmtree(self._target, ignore_errors=True)  # an unfinished one of the same step
            self._target.mkdir(parents=True)
        self._talk.barrier()
        weights = weights_of(engine, keep=is_main())
        moments = moments_of(engine, keep=lambda index: index % n_processes() == process())
        lanes: dict[str, Tensor] = {}
        for group, (numbers, hidden, valid) in enumerate(memories):
            lanes |= {
                f"{group}.lanes": torch.tensor(list(numbers)),
                f"{group}.hidden": hidden.cpu(),
                f"{group}.valid": valid.cpu(),
            }
        self._facts = {"step": step, "n_processes": n_processes(), "counters": counters_of(engine), **facts}
        self._work = self._thread.submit(self._write, self._target, weights, moments, lanes, write_model)

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
        except (OSError, SafetensorError) as error:
            failure = f"process {process()}: {error}"
        self._work = None
        everywhere = self._talk.collect((files, failure))
        if failures := [failure for _, failure in everywhere if failure]:
            self._fail(failures[0])
        found = {name: numbers for files, _ in everywhere for name, numbers in files.items()}
        if found:
            work = partial(self._complete, found) if is_main() else dict
            self._work = self._thread.submit(work)

    def finish(self) -> None:
        """Wait until what was begun is a checkpoint; every process must call it."""
        while self._work is not None:
            wait([self._work])
            self.advance()

    def _fail(self, failure: str) -> None:
        if is_main() and not (self._target / MANIFEST).exists():
            shutil.rmtree(self._target, ignore_errors=True)
        self._talk.barrier()
        good = complete(self._folder)
        raise ValueError(
            f"{self._target} could not be written ({failure}); "
            + (f"{good[-1].name} is good: " if good else "there is no other: ")
            + "make room, and the same command goes on from there"
        )

    def _complete(self, files: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Make what is written a checkpoint."""
        self._facts["files"] = {name: {"bytes": size, "crc32c": checksum} for name, (size, checksum) in files.items()}
        with new_file(self._target / MANIFEST) as partial_manifest:
            partial_manifest.write_text(json.dumps(self._facts, indent=1))
        self._remove_old()
        self._publish(self._target)
        return {}

    def close(self) -> None:
        """No more checkpoints."""
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
        names = [f"moments_{process():03d}.safetensors", f"lanes_{process():03d}.safetensors"]
        for name, tensors in zip(names, (moments, lanes), strict=True):
            save_file(tensors, target / name)
        if is_main():
            write_model(target / MODEL, weights)
            names += [str(path.relative_to(target)) for path in sorted((target / MODEL).iterdir())]
        for name in names:
            sync(target / name)
        return {name: ((target / name).stat().st_size, _checksum(target / name)) for name in names}

    def _remove_old(self) -> None:
        for old in complete(self._folder)[: -self._keep_last]:
            if self._keep_every and facts_of(old)["step"] % self._keep_every == 0:
                continue
            (old / MANIFEST).unlink()  # first of all, so that a half-removed one is no checkpoint
            shutil.rmtree(old)
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """What a kill cut short, while it was written or removed, and a newer checkpoint has made useless."""
        for newest in complete(self._folder)[-1:]:
            for left in self._folder.glob("step_*"):
                if left.name < newest.name and not (left / MANIFEST).exists():
                    shutil.rmtree(left)


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder` whose files are all there with their sizes, oldest first."""
    return [path for path in sorted(folder.glob("step_*")) if _is_whole(path)]


def unfinished(folder: Path, newest: Path | None) -> list[Path]:
    """Folders after `newest`, which are cut or damaged."""
    return [path for path in sorted(folder.glob("step_*")) if newest is None or path.name > newest.name]


def newest(folder: Path, talk: Talk) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; every process must call it, and reads a share of the files.

    Raises:
        ValueError: there were checkpoints, and none is as it was written.
    """
    names = talk.from_main(" ".join(path.name for path in reversed(complete(folder)))).split()
    for path in (folder / name for name in names):
        files = facts_of(path)["files"]
        mine = sorted(files)[process() :: n_processes()]
        (n_damaged,) = talk.total(sum(_checksum(path / name) != files[name]["crc32c"] for name in mine))
        if not n_damaged:
            return path
    if damaged := sorted(path.parent.name for path in folder.glob(f"step_*/{MANIFEST}")):
        raise ValueError(
            f"{folder}: {', '.join(damaged)} have files that are missing, cut or damaged, and there is no other checkpoint; put them "
            "back, or remove them to begin again at step 0"
        )
    return None


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What its manifest says."""
    return json.loads((checkpoint / MANIFEST).read_text())


class Moments(Mapping[str, Tensor]):
    """Adam's moments in a checkpoint by their names, read when they are asked for."""

    def __init__(self, checkpoint: Path) -> None:
        files = [safe_open(path, "pt") for path in sorted(checkpoint.glob("moments_*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def memory_of(checkpoint: Path, lanes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The memory of `lanes`, whichever process had them: hidden (L, B, M, D) and valid (B,), on the CPU."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for path in sorted(checkpoint.glob("lanes_*.safetensors")):
        with safe_open(path, "pt") as file:
            for group in range(len(file.keys()) // 3):
                numbers = file.get_tensor(f"{group}.lanes").tolist()
                wanted = [row for row, lane in enumerate(numbers) if lane in lanes]
                if wanted:
                    hidden, valid = file.get_tensor(f"{group}.hidden"), file.get_tensor(f"{group}.valid")
                    rows |= {numbers[row]: (hidden[:, row], valid[row]) for row in wanted}
    return torch.stack([rows[lane][0] for lane in lanes], 1), torch.stack([rows[lane][1] for lane in lanes])


def _checksum(file: Path) -> int:
    """CRC-32C, which finds what a disk or a network did, at the speed of reading."""
    checksum = 0
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            checksum = google_crc32c.extend(checksum, block)
    return checksum


def _is_whole(path: Path) -> bool:
    try:
        files = facts_of(path)["files"]
        return all((path / name).stat().st_size == about["bytes"] for name, about in files.items())
    except (OSError, json.JSONDecodeError, KeyError):
        return False
