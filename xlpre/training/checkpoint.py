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
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import safe_open
from torch import Tensor

from xlpre.common.files import compute_crc32c
from xlpre.training.deepspeed_engine import PRECISIONS
from xlpre.training.distributed import Comm, rank, world_size

CHECKPOINTS_DIR = "checkpoints"  # of all of them, in that of a run
NAME = re.compile(r"step_\d{8,}")
MANIFEST = "manifest.json"
MODEL_DIR = "model"


def list_all(folder: Path) -> list[Path]:
    """What training put into `folder`, whole or not, oldest first; another name, such as that of a copy, is its owner's."""
    return sorted(path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir())


def list_complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder` whose files are all there with their sizes, oldest first."""
    return [path for path in list_all(folder) if _is_whole(path)]


def list_incomplete(folder: Path, newest: Path | None) -> list[Path]:
    """Folders after `newest`, which are cut or damaged."""
    return [path for path in list_all(folder) if newest is None or path.name > newest.name]


def find_resume_checkpoint(folder: Path, comm: Comm) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; every process must call it, and reads a share of the files.

    Raises:
        ValueError: there were checkpoints, and none is as it was written.
    """
    names = comm.broadcast(" ".join(path.name for path in reversed(list_complete(folder)))).split()
    for path in (folder / name for name in names):
        (n_damaged,) = comm.all_reduce_sum(_n_damaged(path, rank(), world_size()))
        if not n_damaged:
            return path
    if damaged := [path.name for path in list_all(folder) if (path / MANIFEST).exists()]:
        raise ValueError(
            f"{folder}: {', '.join(damaged)} have files that are missing, cut or damaged, and there is no other checkpoint; put them "
            "back, or remove them to begin again at step 0"
        )
    return None


def is_valid(checkpoint: Path) -> bool:
    """Whether its every byte is as it was written; this process reads it all."""
    return not _n_damaged(checkpoint, 0, 1)


def latest_valid(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written, for a process that is alone; see newest."""
    return next(filter(is_valid, reversed(list_complete(folder))), None)


def read_manifest(checkpoint: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What its manifest says.

    Raises:
        ValueError: it was made with other facts than `expected`.
    """
    found = _read_manifest(checkpoint)
    if expected is not None:
        check_compatible(checkpoint, found, expected)
    return found


def format_manifest(facts: Mapping[str, Any]) -> str:
    """The text of a manifest: facts, and a checksum of them."""
    return json.dumps({**facts, "checksum": _checksum_of(facts)}, indent=1)


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    said = found.pop("checksum", None)  # there was none at first
    if said is not None and said != _checksum_of(found):
        raise ValueError(f"{checkpoint / MANIFEST} is not as it was written")
    return found


def _checksum_of(facts: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(facts, indent=1).encode()))


def check_compatible(saved: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if what was written in `saved` was made with other facts than `now`, one of which is `format`."""
    if was.get("format") != now["format"]:
        raise ValueError(
            f"{saved} was written by another version of xlpre; go on with that one, or give the run another name"
        )
    for key, value in now.items():
        before: Any = was.get(key)
        if isinstance(value, dict):
            before = {**dict.fromkeys(value, False), **(before or {})}  # a setting that there was not yet was off
        if before == value:
            continue
        if isinstance(value, dict):
            name = next(name for name in value if before[name] != value[name])
            key, before, value = f"{key}.{name}", before[name], value[name]
        key, before, value = _as_set(key, before, value)
        raise ValueError(
            f"{saved} was made with {key}={before}, now it is {value}; put it back, or give the run another name"
        )


def _as_set(key: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """A fact with the key and the values that a user sets, where it is kept otherwise."""
    if key == "precision":
        names = {str(dtype): name for name, dtype in PRECISIONS.items()}
        return "train.precision", names.get(before, before), names.get(now, now)
    if key == "optim.muon":
        if before and now:
            return "optim.momentum", before["momentum"], now["momentum"]
        return "optim.name", "muon" if before else "adamw", "muon" if now else "adamw"
    return key, before, now


class SavedMoments(Mapping[str, Tensor]):
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


def read_lane_memory(checkpoint: Path, lanes: Sequence[int]) -> tuple[Tensor, Tensor]:
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


def _n_damaged(path: Path, share: int, n_shares: int) -> int:
    """How many files of one of the equal shares of a checkpoint are not as they were written."""
    files = read_manifest(path)["files"]
    return sum(not _is_as_written(path / name, files[name]["crc32c"]) for name in sorted(files)[share::n_shares])


def _is_as_written(file: Path, crc32c: int) -> bool:
    try:
        return compute_crc32c(file) == crc32c
    except OSError:  # what a disk says of a part that it cannot read any more
        return False


def _is_whole(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all(
            (path / name).stat().st_size == about["bytes"] and "crc32c" in about for name, about in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut or damaged, it may hold anything
        return False
