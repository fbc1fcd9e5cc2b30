"""Checkpoints of one's own run: the engine's state, and what DeepSpeed does not keep: step, clock, memory, random state.

    checkpoints/step_00000500/manifest.json    written last: names, sizes and checksums of all files, and what the run was
                              process_000.pt   memory and random state of process 0
                              ...              DeepSpeed's own files

A folder without a manifest, or with a file that is not as it says, is not a checkpoint. Reading one makes tensors and nothing
else, whatever its files ask for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from xlpre.atomic import new_file, sync
from xlpre.training.distributed import Talk, is_main, n_processes, process
from xlpre.training.engine import tensors_only

MANIFEST = "manifest.json"


def save(
    folder: Path,
    engine: Any,
    talk: Talk,
    step: int,
    memories: Sequence[tuple[Tensor, ...]],
    facts: Mapping[str, Any],
    keep_last: int,
    keep_every: int | None = None,
) -> None:
    """Write a checkpoint; every process must call it.

    Args:
        folder: of all checkpoints of the run.
        engine: DeepSpeed's.
        talk: between the processes.
        step: updates done.
        memories: the tensors of this process's memories, one tuple for each micro-step.
        facts: small things to know on resuming: what must agree, and what goes on (the clock).
        keep_last: older checkpoints beyond so many are removed,
        keep_every: but those of steps divisible by it.
    """
    target = folder / f"step_{step:08d}"
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)  # an unfinished one of the same step
    talk.barrier()
    engine.save_checkpoint(str(folder), tag=target.name, save_latest=False)
    torch.save(
        {
            "memories": list(memories),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        },
        target / f"process_{process():03d}.pt",
    )
    for file in target.iterdir():
        sync(file)
    talk.barrier()
    checksums = talk.collect({file.name: _checksum(file) for file in _share(sorted(target.iterdir()))})
    if is_main():
        sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
        found = {name: checksum for part in checksums for name, checksum in part.items()}
        manifest = {"step": step, "n_processes": n_processes(), "bytes": sizes, "crc32c": found, **facts}
        with new_file(target / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest, indent=1))
        for old in complete(folder)[:-keep_last]:
            if keep_every and facts_of(old)["step"] % keep_every == 0:
                continue
            (old / MANIFEST).unlink()  # first of all, so that a half-removed one is no checkpoint
            shutil.rmtree(old)
    talk.barrier()


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder` whose files are all there with their sizes, oldest first."""
    return [path for path in sorted(folder.glob("step_*")) if _is_whole(path)]


def unfinished(folder: Path, newest: Path | None) -> list[Path]:
    """Folders after `newest`, which are cut or damaged."""
    return [path for path in sorted(folder.glob("step_*")) if newest is None or path.name > newest.name]


def newest(folder: Path, talk: Talk) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; every process must call it, and reads a share of the files."""
    names = talk.from_main(" ".join(path.name for path in reversed(complete(folder)))).split()
    for path in (folder / name for name in names):
        checksums = facts_of(path)["crc32c"]
        (n_damaged,) = talk.total(sum(_checksum(path / name) != checksums[name] for name in _share(sorted(checksums))))
        if not n_damaged:
            return path
    return None


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What its manifest says."""
    return json.loads((checkpoint / MANIFEST).read_text())


def load(checkpoint: Path, engine: Any, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Put a checkpoint's state into `engine` and the random generators; every process must call it.

    Returns:
        The tensors of this process's memories, on `device`.

    Raises:
        ValueError: written by another number of processes; a file that cannot be read, or that holds more than tensors.
    """
    wrote = facts_of(checkpoint)["n_processes"]
    if wrote != n_processes():
        raise ValueError(
            f"{checkpoint} was written by {wrote} processes and this job has {n_processes()}; go on with {wrote} processes, or "
            "give the run another name"
        )
    with tensors_only(checkpoint):
        engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        own = torch.load(checkpoint / f"process_{process():03d}.pt", weights_only=True, map_location="cpu")
    torch.set_rng_state(own["random"])
    if own["random_cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["random_cuda"])
    return [tuple(tensor.to(device) for tensor in tensors) for tensors in own["memories"]]


def _share(items: list[Any]) -> list[Any]:
    """What of `items` falls to this process."""
    return items[process() :: n_processes()]


def _checksum(file: Path) -> int:
    """CRC-32C, which finds what a disk or a network did, at the speed of reading."""
    checksum = 0
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            checksum = google_crc32c.extend(checksum, block)
    return checksum


def _is_whole(path: Path) -> bool:
    try:
        sizes = facts_of(path)["bytes"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, json.JSONDecodeError, KeyError):
        return False
