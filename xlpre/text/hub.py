"""Hugging Face datasets: `hf:[OWNER/]NAME[/CONFIG]` on the hub, `hf:./FOLDER` on disk. The only module that imports `datasets`.

`hf:a/b` is the dataset `b` of the owner `a`. If there is no such dataset, it is the configuration `b` of the dataset `a`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError

HF_PREFIX = "hf:"
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")  # written by `save_to_disk`


def is_hf_dataset(source: str) -> bool:
    """Return True if `source` names a dataset: it starts with `hf:`."""
    return source.startswith(HF_PREFIX)


def dataset_files(source: str) -> list[Path]:
    """List the files of the dataset `hf:./FOLDER`. The list is empty for a dataset on the hub."""
    return sorted(path for path in Path(source.removeprefix(HF_PREFIX)).rglob("*") if path.is_file())


def read_hf_rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split of the dataset `source` in order.

    Raises:
        InputError: the dataset cannot be loaded or read.
    """
    return iterate_rows(open_stream(source, split), repr(source))


def open_stream(source: str, split: str, prefix: str = "") -> Any:
    """Open a split of the dataset `source` for streaming. Error messages start with `prefix` and `source`.

    Raises:
        InputError: the dataset cannot be loaded.
    """
    import datasets

    name = source.removeprefix(HF_PREFIX)
    head, _, tail = name.rpartition("/")
    try:
        if any((Path(name) / file).is_file() for file in SAVED_DATASET_FILES):
            return _load_from_disk(name, split)
        is_path = name.startswith((".", "/")) or Path(name).exists()
        if name.count("/") == 2 and not is_path:  # OWNER/NAME/CONFIG
            return datasets.load_dataset(head, tail, split=split, streaming=True)
        try:
            return datasets.load_dataset(name, None, split=split, streaming=True)
        except datasets.exceptions.DatasetNotFoundError:
            if not head or is_path:
                raise
            return datasets.load_dataset(head, tail, split=split, streaming=True)  # NAME/CONFIG
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        message = " ".join(str(error).split()).rstrip(".")
        names_splits = re.search(r"(bad|unknown) split", message, re.IGNORECASE)
        remedy = "Name one of them." if names_splits else "Check its name and the network."
        raise InputError(f"{prefix}{source!r} could not be loaded: {message}. {remedy}") from None


def iterate_rows(stream: Any, origin: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a streamed dataset, or of a shard of it.

    Args:
        stream: dataset from `open_stream`.
        origin: name of the dataset in error messages.

    Raises:
        InputError: a row cannot be read.
    """
    n_read = 0
    rows = iter(stream)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - networks and codecs raise many types
            raise InputError(
                f"{origin}, after row {n_read}: cannot be read: {' '.join(str(error).split())}. Run the same command again to resume."
            ) from None
        n_read += 1
        yield row


def _load_from_disk(folder: str, split: str) -> Any:
    """Load what `save_to_disk` wrote: a dict of splits, or a single dataset."""
    import datasets

    dataset = datasets.load_from_disk(folder)
    if isinstance(dataset, dict):
        if split not in dataset:
            raise InputError(f"Bad split: {split}. Available splits: {list(dataset)}")
        dataset = dataset[split]
    return dataset.to_iterable_dataset(num_shards=max(1, len(dataset.cache_files)))
