"""Datasets by name: `hf:NAME[/CONFIG]` of the Hugging Face hub, `hf:./FOLDER` on disk. The one door to `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = "hf:"
SAVED = ("dataset_dict.json", "state.json")  # what `datasets` puts beside what it saves to disk


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset's name, and no file's or folder's."""
    return source.startswith(PREFIX)


def files_of(source: str) -> list[Path]:
    """The files of the dataset `hf:./FOLDER`; none of one that is not on disk."""
    return sorted(path for path in Path(source.removeprefix(PREFIX)).rglob("*") if path.is_file())


def hub_rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a split of the dataset `hf:NAME[/CONFIG]`, in their order.

    Raises:
        ValueError: it cannot be loaded, or not be read to its end.
    """
    return rows_of(streamed(source, split, ""), repr(source))


def streamed(source: str, split: str, key: str = "text.source=") -> Any:
    """The split of the dataset `source`, as `datasets` streams it; messages name `source` after `key`.

    Raises:
        ValueError: it cannot be loaded.
    """
    import datasets

    name = source.removeprefix(PREFIX)
    head, _, tail = name.rpartition("/")
    try:
        if any((Path(name) / file).is_file() for file in SAVED):
            return _saved(name, split)
        try:
            return datasets.load_dataset(name, None, split=split, streaming=True)
        except datasets.exceptions.DatasetNotFoundError:
            if not head or name.startswith((".", "/")):
                raise
            return datasets.load_dataset(head, tail, split=split, streaming=True)  # "owner/data", "data/config"
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{key}{source!r} could not be loaded: {' '.join(str(error).split())}") from None


def rows_of(share: Any, origin: str) -> Iterator[dict[str, Any]]:
    """The rows of a streamed dataset, or a share of one.

    Raises:
        ValueError: it cannot be read to its end; the message begins with `origin`.
    """
    number = 0
    rows = iter(share)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - whatever a network or a codec makes of it
            raise ValueError(
                f"{origin}, after row {number}: cannot be read: {' '.join(str(error).split())}; run again to go on"
            ) from None
        number += 1
        yield row


def _saved(folder: str, split: str) -> Any:
    """The split, or all if there are none, of what `save_to_disk` wrote."""
    import datasets

    found = datasets.load_from_disk(folder)
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(f"Bad split: {split}. Available splits: {list(found)}")
        found = found[split]
    return found.to_iterable_dataset(num_shards=max(1, len(found.cache_files)))
