"""Encoded examples that the processes of a machine share.

One process of each machine tokenizes the examples and writes the features to a temporary file. All processes of the machine map that file
into memory, so the arrays exist once per machine. The file is removed as soon as all processes have mapped it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from finetune.data.features import Features
from xlpre.common.errors import InputError
from xlpre.common.files import machine_id, with_filename
from xlpre.training.distributed import Comm, rank

FILE = "features"
ALIGNMENT = 8  # bytes

FeaturesOfSplits = list[Sequence[Features]]


def encode_once_per_machine(encode: Callable[[], FeaturesOfSplits], comm: Comm) -> FeaturesOfSplits:
    """Call `encode` in one process of each machine, and return its result in all of them. Every process must call this function.

    Args:
        encode: tokenizes the examples of all splits.
        comm: collectives of the job. Waiting for `encode` is limited by `train.timeout_minutes`.

    Raises:
        InputError: `encode` has raised it, or the temporary file cannot be written.
    """
    folders = comm.all_gather(_temporary_folder())
    folder, error = None, None
    if folders.index(folders[rank()]) == rank():
        folder = Path(tempfile.mkdtemp(prefix="xlpre-features-"))
    try:
        if folder:
            write_features(folder / FILE, encode())
    except (ValueError, OSError) as raised:
        error = raised
    outcomes = comm.all_gather((folder, "" if error is None else str(error)))
    try:
        if error is not None:
            raise error
        for message in (message for _, message in outcomes if message):
            raise InputError(message)
        shared, _ = outcomes[folders.index(folders[rank()])]
        return map_features(shared / FILE)
    finally:
        comm.barrier()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def write_features(path: Path, features: FeaturesOfSplits) -> None:
    """Write features to a file for `map_features`: number and sizes of its parts, the pickled objects, and the content of each array."""
    buffers: list[pickle.PickleBuffer] = []
    objects = pickle.dumps(features, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(objects), *(buffer.raw() for buffer in buffers)]
    with with_filename(path), open(path, "wb") as file:
        np.array([len(parts), *map(len, parts)], np.int64).tofile(file)
        for part in parts:
            file.write(part)
            file.write(bytes(-len(part) % ALIGNMENT))


def map_features(path: Path) -> FeaturesOfSplits:
    """Return the features in a file from `write_features`. Their arrays are read-only views of the mapped file, which may be removed."""
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    n_parts = int(np.frombuffer(content, np.int64, 1)[0])
    sizes = np.frombuffer(content, np.int64, n_parts, offset=8)
    begins = 8 * (n_parts + 1) + np.cumsum([0, *(sizes + -sizes % ALIGNMENT)])
    parts = [content[begin : begin + size] for begin, size in zip(begins[:-1].tolist(), sizes.tolist(), strict=True)]
    return pickle.loads(parts[0], buffers=parts[1:])


def _temporary_folder() -> tuple[str, int, int]:
    """Return an identifier of the temporary folder of this process. Containers on one machine may have different ones."""
    status = os.stat(tempfile.gettempdir())
    return machine_id(), status.st_dev, status.st_ino
