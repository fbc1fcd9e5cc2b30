"""Checkpoints of a run: one folder per checkpoint, independent of the ZeRO stage and the number of processes.

    checkpoints/step_00000500/manifest.json              written last: settings of the run; names, sizes and checksums of all files
                              model/                     the weights, as a model folder
                              best/                      the weights of the best evaluation so far, if there was one
                              moments_000.safetensors    optimizer moments of a part of the parameters, written by rank 0
                              lanes_000.safetensors      recurrent memory of the lanes of rank 0
                              ...

A lane is a row of the global batch that reads consecutive windows of the text, so it has recurrent memory from one step to the next.

A folder is a valid checkpoint only if it has a manifest, and all files in the manifest have the recorded checksums. Nothing is unpickled.

Only rank 0 checks that all files exist. The manifest names the file of each moment and of each lane, so that every other process opens only
the files that it reads tensors from.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import safe_open
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.files import compute_crc32c, write_text
from xlpre.common.messages import as_yaml
from xlpre.common.os_errors import is_transient, retry
from xlpre.training.distributed import Comm, rank, world_size

CHECKPOINTS_DIR = "checkpoints"  # folder of all checkpoints, in the folder of the run
NAME_PATTERN = re.compile(r"step_\d{8,}")
MANIFEST = "manifest.json"
MODEL_DIR, BEST_DIR = "model", "best"
LANES_PREFIX = "lanes_"  # of the files with recurrent memory


def list_all(folder: Path) -> list[Path]:
    """List the checkpoint folders in `folder`, valid or not, oldest first. Folders with other names, such as copies, are ignored."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((folder / name for name in names), key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder, which is in its name."""
    return int(path.name.removeprefix("step_"))


def list_complete(folder: Path) -> list[Path]:
    """List the checkpoints in `folder` whose files exist with the recorded sizes, oldest first. The best weights are not inspected.

    Every file is inspected. To read only the newest settings, call `read_newest_manifest`.
    """
    return [path for path in list_all(folder) if _is_complete(path)]


def read_newest_manifest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint in `folder` whose manifest can be read, and that manifest. Other files are not inspected."""
    for path in reversed(list_all(folder)):
        try:
            return path, read_manifest(path)
        except OSError as error:
            _raise_if_transient(error)
        except (ValueError, AttributeError):  # damaged manifests may contain anything
            continue
    return None


def list_incomplete(folder: Path, latest: Path | None) -> list[Path]:
    """List the checkpoint folders newer than the latest valid checkpoint, `latest`. They are incomplete or damaged."""
    return [path for path in list_all(folder) if latest is None or step_of(path) > step_of(latest)]


def describe_incomplete(folder: Path, latest: Path | None) -> str:
    """Return a note on the checkpoints that `list_incomplete` lists, in parentheses; an empty string if all are complete."""
    names = ", ".join(path.name for path in list_incomplete(folder, latest))
    return f" (skipped checkpoints with missing, truncated or damaged files: {names})" if names else ""


def find_latest_valid(folder: Path, comm: Comm | None = None) -> Path | None:
    """Return the latest checkpoint whose checksums are correct, or None if there is no checkpoint.

    All checkpoints with the same best weights share their files. If no checkpoint is valid for this reason only, the latest one is
    returned. With `comm`, its best weights are removed: training does not need them.

    Args:
        folder: the folder of all checkpoints.
        comm: collectives of the job. Every process must then call this function: rank 0 lists the checkpoints, and each process verifies a
            part of the files. None: this process does everything.

    Raises:
        InputError: there are checkpoints, but none of them is valid.
    """

    def list_newest_first() -> list[str]:
        return [path.name for path in reversed(list_complete(folder))]

    names = list_newest_first() if comm is None else comm.call_on_rank_zero(list_newest_first)
    without_best = None
    for path in (folder / name for name in names):
        n_damaged, n_damaged_best = _count_all_damaged_files(path, comm)
        if not n_damaged and not n_damaged_best:
            return path
        if not n_damaged and without_best is None:
            without_best = path
    if without_best is not None:
        if comm is not None:
            comm.call_on_rank_zero(partial(_drop_best, without_best))
        return without_best
    if damaged := [path.name for path in list_all(folder) if (path / MANIFEST).exists()]:
        raise InputError(
            f"{folder} has no valid checkpoint: files of {', '.join(damaged)} are missing, truncated or damaged. Restore the files, or "
            "start again at step 0 under another name."
        )
    return None


def is_valid(checkpoint: Path, comm: Comm | None = None) -> bool:
    """Return True if the checksums of all files are correct.

    Args:
        checkpoint: folder of the checkpoint.
        comm: collectives of the job. Every process must then call this function, and each reads a part of the files. None: this process
            reads all files.
    """
    return not any(_count_all_damaged_files(checkpoint, comm))


def _count_all_damaged_files(checkpoint: Path, comm: Comm | None) -> tuple[float, float]:
    """Return the numbers of damaged files that training needs, and of damaged files of the best weights; see `is_valid`."""
    if comm is None:
        return _count_damaged_files(checkpoint, 0, 1)
    n_damaged, n_damaged_best = comm.all_reduce_sum(*_count_damaged_files(checkpoint, rank(), world_size()))
    return n_damaged, n_damaged_best


def _drop_best(checkpoint: Path) -> None:
    """Remove the damaged best weights from a checkpoint, so that the run continues as if it had not been evaluated yet."""
    manifest = read_manifest(checkpoint)
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not _is_of_best(name)}
    manifest |= {key: None for key in ("best", "best_val_loss") if key in manifest}
    shutil.rmtree(checkpoint / BEST_DIR, ignore_errors=True)
    write_text(checkpoint / MANIFEST, format_manifest(manifest))
    print(
        f"warning: the best weights in {checkpoint} are damaged and were removed. If the run continues, its best weights are "
        "those of its next evaluations.",
        file=sys.stderr,
        flush=True,
    )


def _is_of_best(name: str) -> bool:
    return name.startswith(f"{BEST_DIR}/")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Args:
        checkpoint: its folder.

    Raises:
        InputError: the manifest is damaged.
    """
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    checksum = manifest.pop("checksum", None)  # the first versions of xlpre wrote no checksum
    if checksum is not None and checksum != _compute_checksum(manifest):
        raise InputError(
            f"{checkpoint / MANIFEST} is damaged: its checksum is wrong. Restore it, or remove {checkpoint}."
        )
    return manifest


def format_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the content of a manifest file: the entries and their checksum."""
    return json.dumps({**manifest, "checksum": _compute_checksum(manifest)}, indent=1)


def check_compatible(checkpoint: Path, manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written with the current settings.

    Args:
        checkpoint: its folder, for the error message.
        manifest: its manifest.
        expected: the current settings, including `format`. A group of settings is a nested mapping.

    Raises:
        InputError: the format or a setting differs.
    """
    if manifest.get("format") != expected["format"]:
        raise InputError(
            f"{checkpoint} was written by another version of xlpre (in format {manifest.get('format')}; this version reads "
            f"format {expected['format']}). Resume with that version, or give the run another name."
        )
    for key, value in expected.items():
        saved: Any = manifest.get(key)
        if isinstance(value, dict):
            # a setting that did not exist when the checkpoint was written counts as off
            saved = {**dict.fromkeys(value, False), **(saved or {})}
        if saved == value:
            continue
        if isinstance(value, dict):
            name = next(name for name in [*value, *saved] if saved.get(name) != value.get(name))
            key, saved, value = f"{key}.{name}", saved.get(name), value.get(name)
        written = f"{key}={as_yaml(saved)}"
        raise InputError(
            f"{key}={as_yaml(value)} is invalid: {checkpoint} was written with {written}, and this setting must not change when the "
            f"run resumes. Set {written}, or give the run another name."
        )


class SavedTensors(Mapping[str, Any]):
    """Tensors in safetensors files by name. A file is opened when one of its tensors is accessed.

    A value is a slice of safetensors: `value[:]` reads the whole tensor, and `value[begin:end]` reads a part of its first dimension.

    Args:
        path_by_name: the file of each tensor.
    """

    def __init__(self, path_by_name: Mapping[str, Path]) -> None:
        self._path_by_name, self._file_by_path = path_by_name, dict[Path, Any]()

    @classmethod
    def in_files(cls, paths: Iterable[Path]) -> SavedTensors:
        """Return all tensors in `paths`. Every file is opened once to read the names."""
        path_by_name: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                path_by_name |= dict.fromkeys(file.keys(), path)
        return cls(path_by_name)

    def __getitem__(self, name: str) -> Any:
        path = self._path_by_name[name]
        if path not in self._file_by_path:
            self._file_by_path[path] = safe_open(path, "pt")
        return self._file_by_path[path].get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_by_name)

    def __len__(self) -> int:
        return len(self._path_by_name)


def saved_weights(checkpoint: Path) -> SavedTensors:
    """Return the weights of a checkpoint by the names of parameters, to be read one by one."""
    return SavedTensors.in_files(sorted((checkpoint / MODEL_DIR).glob("*.safetensors")))


def saved_moments(checkpoint: Path, manifest: Mapping[str, Any]) -> SavedTensors:
    """Return the optimizer moments of a checkpoint by name (`PARAMETER/exp_avg`), to be read one by one."""
    return SavedTensors({name: checkpoint / file for name, file in manifest["moments"].items()})


def has_memory(manifest: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint with this manifest includes recurrent memory."""
    return any(name.startswith(LANES_PREFIX) for name in manifest["files"])


def read_lane_memory(
    checkpoint: Path, manifest: Mapping[str, Any], groups: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Read the recurrent memory of groups of lanes. Other processes may have written it, with other groups.

    Args:
        checkpoint: its folder.
        manifest: its manifest, which names the lanes in each file. Files without a requested lane are not opened.
        groups: the lanes of each micro-step.

    Returns:
        For each group, with its B lanes in the given order: hidden states (L, B, M, D), and the number of valid positions of each lane
        (B,). The tensors are on the CPU.
    """
    wanted = {lane for lanes in groups for lane in lanes}
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for name, lanes_in_file in manifest["lanes"].items():
        if wanted.isdisjoint(lanes_in_file):
            continue
        with safe_open(checkpoint / name, "pt") as file:
            for micro_step in range(len(file.keys()) // 3):
                saved_lanes = file.get_tensor(f"{micro_step}.lanes").tolist()
                selected = [row for row, lane in enumerate(saved_lanes) if lane in wanted]
                if selected:
                    hidden, valid = file.get_tensor(f"{micro_step}.hidden"), file.get_tensor(f"{micro_step}.valid")
                    rows |= {saved_lanes[row]: (hidden[:, row], valid[row]) for row in selected}
    return [
        (torch.stack([rows[lane][0] for lane in lanes], 1), torch.stack([rows[lane][1] for lane in lanes]))
        for lanes in groups
    ]


def _compute_checksum(manifest: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(manifest, indent=1).encode()))


def _count_damaged_files(checkpoint: Path, share: int, n_shares: int) -> tuple[int, int]:
    """Divide the files of a checkpoint into `n_shares` shares, and count the missing or damaged files in number `share`.

    Returns:
        The number of files that training needs, and of files of the best weights.
    """
    files = read_manifest(checkpoint)["files"]
    names = sorted(files)[share::n_shares]
    damaged = [name for name in names if not _has_checksum(checkpoint / name, files[name]["crc32c"])]
    n_of_best = sum(map(_is_of_best, damaged))
    return len(damaged) - n_of_best, n_of_best


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
            (path / name).stat().st_size == entry["bytes"] and "crc32c" in entry
            for name, entry in files.items()
            if not _is_of_best(name)
        )
    except OSError as error:
        _raise_if_transient(error)
        return False
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged manifests may contain anything
        return False


def _raise_if_transient(error: OSError) -> None:
    """Raise `error` if it is temporary, so the checkpoint may be intact. EIO is not raised, because a disk block may be unreadable."""
    if is_transient(error) and error.errno != errno.EIO:
        raise error
