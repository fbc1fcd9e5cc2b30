"""Checkpoints of a run: one folder per checkpoint, independent of the ZeRO stage and the number of processes.

    checkpoints/step_00000500/manifest.json              written last: settings of the run; names, sizes and checksums of all files
                              model/                     the weights, as a model folder
                              best/                      the weights of the best evaluation so far, if there was one
                              moments_000.safetensors    moments of a share of the parameters, written by rank 0
                              lanes_000.safetensors      recurrent memory of the lanes of rank 0
                              ...

A folder without a manifest, or with a file that differs from it, is not a checkpoint. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import safe_open
from torch import Tensor

from xlpre.common.files import compute_crc32c
from xlpre.common.os_errors import is_transient, retry
from xlpre.training.distributed import Comm, rank, world_size

CHECKPOINTS_DIR = "checkpoints"  # folder of all checkpoints, in the folder of the run
NAME_PATTERN = re.compile(r"step_\d{8,}")
MANIFEST = "manifest.json"
MODEL_DIR, BEST_DIR = "model", "best"


def list_all(folder: Path) -> list[Path]:
    """List the checkpoint folders in `folder`, valid or not, oldest first. Folders with other names, such as copies, are ignored."""
    return sorted(path for path in folder.glob("step_*") if NAME_PATTERN.fullmatch(path.name) and path.is_dir())


def list_complete(folder: Path) -> list[Path]:
    """List the checkpoints in `folder` whose files all exist with the recorded sizes, oldest first. Checksums are not computed."""
    return [path for path in list_all(folder) if _is_complete(path)]


def list_incomplete(folder: Path, latest: Path | None) -> list[Path]:
    """List the checkpoint folders newer than `latest`, the latest valid checkpoint: they are incomplete or damaged."""
    return [path for path in list_all(folder) if latest is None or path.name > latest.name]


def find_resume_checkpoint(folder: Path, comm: Comm) -> Path | None:
    """Return the latest checkpoint whose checksums are correct, or None if there is no checkpoint.

    Every process must call it; each reads a share of the files.

    Raises:
        ValueError: there are checkpoints, and none is valid.
    """
    names = comm.broadcast(" ".join(path.name for path in reversed(list_complete(folder)))).split()
    for path in (folder / name for name in names):
        (n_damaged,) = comm.all_reduce_sum(_count_damaged_files(path, rank(), world_size()))
        if not n_damaged:
            return path
    if damaged := [path.name for path in list_all(folder) if (path / MANIFEST).exists()]:
        raise ValueError(
            f"{folder} has no valid checkpoint: files of {', '.join(damaged)} are missing, cut or damaged. Restore them, or remove "
            "these folders to start again at step 0."
        )
    return None


def latest_valid(folder: Path) -> Path | None:
    """Return the latest checkpoint whose checksums are correct, or None. For a single process; see `find_resume_checkpoint`."""
    return next(filter(is_valid, reversed(list_complete(folder))), None)


def is_valid(checkpoint: Path) -> bool:
    """Return True if the checksums of all files are correct. This process reads all of them."""
    return not _count_damaged_files(checkpoint, 0, 1)


def read_manifest(checkpoint: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Args:
        checkpoint: its folder.
        expected: entries that must be equal; see `check_compatible`.

    Raises:
        ValueError: the manifest is damaged, or an entry of `expected` differs.
    """
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    checksum = manifest.pop("checksum", None)  # the first versions wrote none
    if checksum is not None and checksum != _compute_checksum(manifest):
        raise ValueError(
            f"{checkpoint / MANIFEST} is damaged: its checksum is wrong. Restore it, or remove {checkpoint}."
        )
    if expected is not None:
        check_compatible(checkpoint, manifest, expected)
    return manifest


def format_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the content of a manifest file: the entries and their checksum."""
    return json.dumps({**manifest, "checksum": _compute_checksum(manifest)}, indent=1)


def check_compatible(checkpoint: Path, manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written with the present settings.

    Args:
        checkpoint: its folder, for the error message.
        manifest: its manifest.
        expected: the present settings, `format` among them. A group of settings is a nested mapping.

    Raises:
        ValueError: the format or a setting differs.
    """
    if manifest.get("format") != expected["format"]:
        raise ValueError(
            f"{checkpoint} was written by another version of xlpre (format {manifest.get('format')}, this version reads "
            f"{expected['format']}). Resume with that version, or give the run another name."
        )
    for key, value in expected.items():
        saved: Any = manifest.get(key)
        if isinstance(value, dict):
            # a setting that is newer than the checkpoint was off
            saved = {**dict.fromkeys(value, False), **(saved or {})}
        if saved == value:
            continue
        if isinstance(value, dict):
            name = next(name for name in [*value, *saved] if saved.get(name) != value.get(name))
            key, saved, value = f"{key}.{name}", saved.get(name), value.get(name)
        written = f"{key}={_as_yaml(saved)}"
        raise ValueError(
            f"{key}={_as_yaml(value)} is invalid: {checkpoint} was written with {written}. Set {written}, or give the run another name."
        )


class SavedMoments(Mapping[str, Tensor]):
    """Optimizer moments of a checkpoint by name (`PARAMETER/exp_avg`), each read from disk when it is accessed."""

    def __init__(self, checkpoint: Path) -> None:
        files = [safe_open(path, "pt") for path in sorted(checkpoint.glob("moments_*.safetensors"))]
        self._file_by_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        return self._file_by_name[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_name)

    def __len__(self) -> int:
        return len(self._file_by_name)


def read_lane_memory(checkpoint: Path, lanes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Read the recurrent memory of `lanes`, whichever processes wrote it.

    Returns:
        hidden: (L, B, M, D) on the CPU, B in the order of `lanes`.
        valid: (B,) on the CPU.
    """
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for path in sorted(checkpoint.glob("lanes_*.safetensors")):
        with safe_open(path, "pt") as file:
            for micro_step in range(len(file.keys()) // 3):
                saved_lanes = file.get_tensor(f"{micro_step}.lanes").tolist()
                selected = [row for row, lane in enumerate(saved_lanes) if lane in lanes]
                if selected:
                    hidden, valid = file.get_tensor(f"{micro_step}.hidden"), file.get_tensor(f"{micro_step}.valid")
                    rows |= {saved_lanes[row]: (hidden[:, row], valid[row]) for row in selected}
    return torch.stack([rows[lane][0] for lane in lanes], 1), torch.stack([rows[lane][1] for lane in lanes])


def _as_yaml(value: Any) -> str:
    """Return a value as a user writes it in settings."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _compute_checksum(manifest: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(manifest, indent=1).encode()))


def _count_damaged_files(checkpoint: Path, share: int, n_shares: int) -> int:
    """Count the files with a wrong checksum in one of `n_shares` equal shares of a checkpoint."""
    files = read_manifest(checkpoint)["files"]
    return sum(not _has_checksum(checkpoint / name, files[name]["crc32c"]) for name in sorted(files)[share::n_shares])


def _has_checksum(file: Path, crc32c: int) -> bool:
    try:
        return retry(partial(compute_crc32c, file)) == crc32c
    except OSError as error:
        _raise_if_transient(error)
        return False


def _is_complete(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all(
            (path / name).stat().st_size == entry["bytes"] and "crc32c" in entry for name, entry in files.items()
        )
    except OSError as error:
        _raise_if_transient(error)
        return False
    except (ValueError, KeyError, TypeError, AttributeError):  # a cut or damaged manifest may hold anything
        return False


def _raise_if_transient(error: OSError) -> None:
    """Raise an error that says nothing about the checkpoint. EIO is also that of a disk that cannot read a block any more."""
    if is_transient(error) and error.errno != errno.EIO:
        raise error
