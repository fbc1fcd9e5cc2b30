"""What a task is: examples, how a model reads them, which head answers, and what the answers are worth.

    file -> Example -> Features (rows of tokens) -> batches -> hidden states -> head -> outputs of items -> predictions, scores, files

An example may become several items (windows of a long text), an item has one row or several that are answered together (the
options of a question).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Split
from finetune.data.features import Features, PaddingSide
from xlpre.model.config import ModelConfig
from xlpre.text.tokenizer import Tokenizer


class Task(Protocol):
    """One task. See the module for the course of things.

    Attributes:
        name: as `task=` has it.
        padding_side: the side on which rows are padded.
        dev: names of the splits to measure on; the first decides which weights are best.
        test: names of the splits to predict.
        score: the name of the score that decides; higher is better.
        head_kind: of its head, as xlpre/conversion/hf_heads.py has it.
        labels: names of its classes or options, if it has any.
        columns: names of the texts of an example, where a line of them is enough to say it; else empty.
    """

    name: str
    padding_side: PaddingSide
    dev_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    main_metric: str
    head_kind: str
    label_names: Sequence[str]
    text_columns: tuple[str, ...]

    def data_settings(self) -> dict[str, Any]:
        """The `data` settings that make this task again in another place, for reading texts one by one."""

    def read_split(self, split: str) -> list[Example]:
        """The examples of `train`, or of a split in `dev` or `test`.

        Raises:
            ValueError: what is wrong with a file, with file and line.
        """

    def parse_example(self, fields: Mapping[str, Any], place: str) -> Example:
        """An example from the fields of one line, the truth among them or not.

        Raises:
            ValueError: a field is missing, empty or unknown.
        """

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """The items of examples, in order."""

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""

    def head_positions(self, head: nn.Module, part: PaddedBatch) -> Tensor:
        """Places (B, P) of each row that the head reads, so that the last layer computes no others."""

    def compute_losses(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> Tensor:
        """Of each item (n,), from hidden states (B, P, D) at `positions`."""

    def compute_outputs(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> dict[str, Tensor]:
        """What is kept of each item's answer, each (n, ...)."""

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Scores by name, `score` first."""

    def chance_threshold(self, split: Split) -> float:
        """What `score` must exceed to say that anything was learned."""

    def tuned_settings(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """`data` settings that the scores on the first dev split decide, for all answers to come (a threshold)."""

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """An answer for each example; `id` and `prediction` are in all."""

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write predictions of the first dev split and all test splits in the official format, if those have one. Returns the files."""
