"""Examples of a data set, its splits, and the outputs of a model for a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.features import Features

Outputs = dict[str, np.ndarray]  # model outputs by name, one entry per Features of a split, in their order
Prediction = dict[str, Any]  # one line of a .jsonl file


@dataclass(frozen=True)
class Example:
    """One example of a task.

    Attributes:
        id: id of the example in its file.
        texts: texts that the model reads.
        label: index of the true class or option, or the true number or spans; None if unknown.
        location: file and line, for error messages.
        group: name of a subset of the split with its own metric, such as a RACE level or a query; empty if there are no subsets.
    """

    id: str
    texts: tuple[str, ...]
    label: Any
    location: str
    group: str = ""


@dataclass(frozen=True)
class Split:
    """Examples of one split and their features, in the same order.

    Attributes:
        name: name of the split.
        examples: the examples.
        features: model inputs; an example has one or several, which are adjacent.
    """

    name: str
    examples: Sequence[Example]
    features: Sequence[Features]

    @property
    def is_labeled(self) -> bool:
        """True if every example has a label."""
        return all(example.label is not None for example in self.examples)
