"""Official tasks out of datasets: `data.dir` is hf: and the name of one, which has the same rows in other words than the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.table_reader import Fields


def split_path(dataset: str, split: str, config: str = "") -> Path:
    """A split as `read_rows` reads it; `dev` is called `validation` there."""
    name = f"{dataset}/{config}" if config else dataset
    return Path(f"{name}:{split.replace('dev', 'validation')}")


@dataclass(frozen=True)
class HubColumns:
    """How the dataset of a task's name has its rows, in other words than its files.

    Attributes:
        names: of columns that are called otherwise there, and what they are in the files.
        labels: in the order in which it numbers them; empty: it has them as they are.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()

    def as_in_files(self, fields: Fields, label: str, place: str) -> Fields:
        """The fields of a row, of which `label` is the truth's; -1 is how that is hidden.

        Raises:
            ValueError: a number that stands for no label.
        """
        found = {self.names.get(name, name): value for name, value in fields.items()}
        number, n = found.get(label), len(self.labels)
        if not n or not isinstance(number, int) or number == -1:
            return found
        if not 0 <= number < n:
            raise ValueError(
                f"{place}: the label {number} is none of 0 to {n - 1}, which stand for {', '.join(self.labels)}; "
                "name a dataset that numbers labels so"
            )
        return {**found, label: self.labels[number]}
