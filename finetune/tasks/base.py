"""Task: the interface between examples, the model, and its predictions.

    file -> Example -> Features (token rows) -> batches -> hidden states -> head -> outputs -> metrics, predictions, files

An example has one Features or several (windows of a long text). A Features has one row or several that are read together (the
options of a question).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.data.features import Features, PaddingSide
from xlpre.model.config import ModelConfig
from xlpre.text.tokenizer import Tokenizer


class Task(Protocol):
    """A fine-tuning task.

    Attributes:
        name: value of the setting `task`.
        padding_side: side on which rows are padded.
        dev_splits: names of the splits to evaluate on; the first one selects the best weights.
        test_splits: names of the splits to predict.
        main_metric: name of the metric that selects the best weights; higher is better.
        head_kind: kind of the head, a key of `HEADS` in xlpre/conversion/hf_heads.py.
        label_names: names of the classes or options; empty for other tasks.
        text_columns: names of the texts of an example, if a line can contain just these texts, separated by tabs; otherwise empty.
        label_columns: names of the columns that contain labels in some files. Predictions ignore them.
    """

    name: str
    padding_side: PaddingSide
    dev_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    main_metric: str
    head_kind: str
    label_names: Sequence[str]
    text_columns: tuple[str, ...]
    label_columns: tuple[str, ...]

    def data_settings(self) -> dict[str, Any]:
        """Return the `data` settings that are stored with a fine-tuned model, to build the task again for predictions."""

    def read_split(self, split: str) -> list[Example]:
        """Read the examples of a split.

        Args:
            split: `train`, or a split in `dev_splits` or `test_splits`.

        Raises:
            InputError: a file is missing or invalid.
            InvalidRowsError: rows are invalid. The message names file and line.
        """

    def parse_example(self, fields: Mapping[str, Any], location: str, default_id: str = "") -> Example:
        """Build the example from the fields of one line, with or without a label.

        Args:
            fields: values by column.
            location: file and line, for error messages.
            default_id: id of the example if the fields contain none.

        Raises:
            InputError: a field is missing, empty or invalid.
        """

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """Tokenize examples. Features are in the order of the examples.

        Raises:
            InvalidRowsError: examples have no tokens.
        """

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a new head for a backbone of this shape."""

    def head_positions(self, head: nn.Module, batch: PaddedBatch) -> Tensor:
        """Return the positions (B, P) that the head reads. The last layer computes only these."""

    def compute_losses(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the loss of each feature.

        Args:
            head: head of the model.
            hidden: (B, P, D) hidden states at `head_positions`.
            batch: n features in B rows, with labels.

        Returns:
            (n,) losses.
        """

    def compute_outputs(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> dict[str, Tensor]:
        """Return model outputs by name, each (n, ...) with one entry per feature. See compute_losses for the arguments."""

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return metrics by name, `main_metric` first."""

    def chance_threshold(self, split: Split) -> float:
        """Return the value that `main_metric` must exceed to show that the model has learned anything."""

    def tuned_settings(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return `data` settings tuned on the first dev split, such as a threshold. They are stored with the model.

        Args:
            metrics: metrics on the first dev split.
        """

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return a prediction for each example, with the keys `id`, `prediction`, and others that depend on the task."""

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write predictions in the official format, if there is one.

        Args:
            folder: folder to write to.
            predictions: predictions of the first dev split and of all test splits.

        Returns:
            The files written.
        """
