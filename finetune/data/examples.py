"""Examples as a person reads them, and items as a model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.features import Row


@dataclass(frozen=True)
class Example:
    """What a person would read.

    Attributes:
        id: its name in its file.
        texts: what is read.
        answer: the truth, as the task has it (number of a class or an option, a number); None where it is not known.
        place: file and line.
        group: a part of the split that has a score of its own; empty: none.
    """

    id: str
    texts: tuple[str, ...]
    answer: Any
    place: str
    group: str = ""


@dataclass(frozen=True)
class Reading:
    """How rows are read that may be longer than a window.

    Attributes:
        window: tokens that are read at once, counted from the row's end; those before are read first, window by window, into
            memory. null: the whole row.
        mem_len: hidden states that are remembered; null: as many as the model does.
    """

    window: int | None = None
    mem_len: int | None = None


@dataclass(frozen=True)
class Item:
    """What a model answers in one go.

    Attributes:
        example: its number in the split.
        rows: what is read, as many for every item of a task.
        answers: what a loss needs, by name; empty where the truth is not known.
        reading: of its rows; the same for every item of a task.
    """

    example: int
    rows: tuple[Row, ...]
    answers: Mapping[str, Any] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)

    @property
    def length(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.ids) for row in self.rows)


@dataclass(frozen=True)
class Split:
    """Examples of one file (or folder), and what became of them."""

    name: str
    examples: Sequence[Example]
    items: Sequence[Item]

    @property
    def labelled(self) -> bool:
        """Whether the truth is known of all."""
        return all(example.answer is not None for example in self.examples)
