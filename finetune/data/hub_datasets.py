"""Hugging Face datasets of the public tasks: the examples of the distributed files, with other column and label names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.table_reader import Fields
from xlpre.common.errors import InputError


def split_path(dataset: str, split: str, config: str = "") -> Path:
    """Return the path of a split for `read_rows`. The split `dev` is called `validation` on the Hub."""
    name = f"{dataset}/{config}" if config else dataset
    return Path(f"{name}:{split.replace('dev', 'validation')}")


@dataclass(frozen=True)
class HubColumns:
    """Columns of the Hub dataset of a task.

    Attributes:
        names: maps names of columns on the Hub to their names in the distributed files, where they differ.
        label_names: names of the labels in the order of their indices; empty if the dataset does not store labels as indices.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    label_names: Sequence[str] = ()

    def to_file_fields(self, fields: Fields, label_column: str, location: str) -> Fields:
        """Rename the columns of a row as in the files, and replace the label index by its name. The index -1 (hidden label) is kept.

        Args:
            fields: columns of the row.
            label_column: column with the label, by its name in the files.
            location: dataset and row, for error messages.

        Raises:
            InputError: the label index has no name.
        """
        renamed = {self.names.get(name, name): value for name, value in fields.items()}
        index, n = renamed.get(label_column), len(self.label_names)
        if not n or not isinstance(index, int) or index == -1:
            return renamed
        if not 0 <= index < n:
            raise InputError(
                f"{location}: label {index} is invalid: labels must be 0 to {n - 1}, which stand for {', '.join(self.label_names)}. "
                "Choose a dataset with these label indices."
            )
        return {**renamed, label_column: self.label_names[index]}
