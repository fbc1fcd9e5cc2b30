"""Tasks with one pooled vector per row: classification and multiple choice. Regression is in regression.py.

Source: zihangdai/xlnet function_builder.py (`get_classification_loss`, `get_regression_loss`, `get_race_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config import TaskDataConfig
from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.data.features import Features, PaddingSide, Row, pair_to_row
from finetune.data.long_text import STRATEGIES, pool_windows, require_truncation
from finetune.data.row_errors import RowErrors
from finetune.data.sources import Source
from finetune.metrics import chance
from finetune.metrics.classification import METRICS, calibration
from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig
from xlpre.model.pooling import Pooling
from xlpre.model.task_heads import ChoiceHead, ClassificationHead
from xlpre.text.tokenizer import Tokenizer


class SequenceTask:
    """Base class of tasks with one pooled vector per row.

    Args:
        name: value of the setting `task`.
        source: source of the examples.
        data: settings of row length and long texts.
        pooling: pooling of a row into one vector.
        metric_names: names of the metrics to compute; the first one selects the best weights.
    """

    padding_side: PaddingSide
    label_names: Sequence[str] = ()

    def __init__(
        self,
        name: str,
        source: Source,
        data: TaskDataConfig,
        pooling: Pooling,
        metric_names: Sequence[str] = ("accuracy",),
    ) -> None:
        self.name, self.source, self.data, self.pooling = name, source, data, pooling
        self.long_text = STRATEGIES[data.long_text](data)
        self.metric_names, self.main_metric = tuple(metric_names), metric_names[0]
        self.padding_side = "right" if pooling == "first" else "left"  # the pooled token must not be padding
        if data.long_text == "memory" and self.padding_side == "right":
            raise InputError(
                "model.pooling=first is invalid: with data.long_text=memory, the head reads the end of the text, not its first token. "
                "Set model.pooling=last."
            )
        self.dev_splits, self.test_splits = source.dev_splits, source.test_splits
        self.text_columns, self.label_columns = source.text_columns, source.label_columns

    def data_settings(self) -> dict[str, Any]:
        """Return the settings of the data source and the settings for long texts."""
        names = ("long_text", "mem_len", "window_stride", "window_pooling")
        return {**self.source.data_settings(), **{name: getattr(self.data, name) for name in names}}

    def read_split(self, split: str) -> list[Example]:
        """Read the examples of a split from the source."""
        return self.source.read_split(split)

    def parse_example(self, fields: Mapping[str, Any], location: str, default_id: str = "") -> Example:
        """Build the example from the fields of one line."""
        return self.source.parse_example(fields, location, default_id)

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """Return a row for each example, or one for each of its windows."""
        features, errors = list[Features](), RowErrors()
        for index, example in enumerate(examples):
            texts = _tokenize(example, tokenizer.encode, errors)
            if texts:
                rows, labels = self.long_text.rows(texts, example.location), self._labels(example)
                features += [Features(index, (row,), labels, self.long_text.chunking) for row in rows]
        errors.raise_if_any()
        return features

    def head_positions(self, head: nn.Module, batch: PaddedBatch) -> Tensor:
        """Return the positions that are pooled."""
        n_rows, length = batch.input_ids.shape
        return cast(ClassificationHead, head).summary.positions(n_rows, length, batch.input_ids.device)

    def compute_losses(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the loss of each feature (n,), from the head."""
        return cast(ClassificationHead, head).losses(head(hidden, batch.padding_mask), batch.labels["label"])

    def compute_outputs(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> dict[str, Tensor]:
        """Return the logits."""
        return {"logits": head(hidden, batch.padding_mask)}

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return the metrics of the task."""
        labels, predicted = stack_labels(split), self.predict_values(self.pool_outputs(split, outputs))
        return {name: METRICS[name](labels, predicted) for name in self.metric_names}

    def chance_threshold(self, split: Split) -> float:
        """Return the threshold of the main metric. See metrics/chance.py."""
        return chance.chance_threshold(self.main_metric, stack_labels(split))

    def tuned_settings(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return no settings: these tasks tune nothing on the dev examples."""
        return {}

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write the official prediction files of the source, if it has any."""
        return self.source.write_submission(folder, predictions)

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """Return the predicted class or option of each example.

        Args:
            outputs: outputs of examples, from `pool_outputs`.

        Returns:
            (N,) int64.
        """
        return outputs["logits"].argmax(1)

    def pool_outputs(self, split: Split, outputs: Outputs) -> Outputs:
        """Return one entry per example: with data.long_text=windows, the windows of each example are pooled."""
        return pool_windows(split, outputs, self.data.window_pooling) if self.data.long_text == "windows" else outputs

    def _labels(self, example: Example) -> dict[str, Any]:
        return {} if example.label is None else {"label": np.int64(example.label)}


class ClassificationTask(SequenceTask):
    """Classification of a text or a text pair.

    Args:
        arguments: see SequenceTask.
        label_names: names of the C classes.
    """

    head_kind = "classification"

    def __init__(self, *arguments: Any, label_names: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.label_names = label_names

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a head with C logits."""
        return ClassificationHead(config, len(self.label_names), self.pooling)

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return the metrics of the task and the expected calibration error."""
        example_outputs = self.pool_outputs(split, outputs)
        probabilities = softmax(example_outputs["logits"])
        is_correct = stack_labels(split) == self.predict_values(example_outputs)
        *_, error = calibration(is_correct, probabilities.max(1))
        return {**super().compute_metrics(split, outputs), "calibration_error": error}

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return the predicted label and the probability of every label."""
        probabilities = softmax(self.pool_outputs(split, outputs)["logits"])
        return [
            {
                "id": example.id,
                "prediction": self.label_names[int(row.argmax())],
                "probabilities": {name: round(float(p), 6) for name, p in zip(self.label_names, row, strict=True)},
            }
            for example, row in zip(split.examples, probabilities, strict=True)
        ]


class ChoiceTask(SequenceTask):
    """Multiple choice: C options, each in a row with the text that the question is about.

    The first text of an example is the text that the question is about. Each other text is the question with one option.

    Args:
        arguments: see SequenceTask.
        label_names: names of the C options.
        max_option_len: maximum number of tokens of a question with its option, or fewer if a row holds fewer. The last tokens are kept.
    """

    head_kind = "multiple_choice"

    def __init__(self, *arguments: Any, label_names: Sequence[str], max_option_len: int) -> None:
        super().__init__(*arguments)
        require_truncation(self.data, self.name)
        self.label_names, self.max_option_len = label_names, max_option_len

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """Return C rows for each example, one for each option."""
        encode = lru_cache(16)(tokenizer.encode)  # questions about the same text are adjacent
        features, errors = list[Features](), RowErrors()
        for index, example in enumerate(examples):
            texts = _tokenize(example, encode, errors)
            if texts:
                features.append(Features(index, tuple(self._option_rows(texts)), self._labels(example)))
        errors.raise_if_any()
        return features

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a head with one logit for each row."""
        return ChoiceHead(config, len(self.label_names), self.pooling)

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return the metrics of the task, and the main metric for each group of examples, such as a level of RACE."""
        metrics, labels, predicted = (
            super().compute_metrics(split, outputs),
            stack_labels(split),
            self.predict_values(outputs),
        )
        groups = np.array([example.group for example in split.examples])
        for group in sorted(set(groups) - {""}):
            in_group = groups == group
            metrics[f"{self.main_metric}_{group}"] = METRICS[self.main_metric](labels[in_group], predicted[in_group])
        return metrics

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return the predicted option and the probability of every option."""
        return [
            {
                "id": example.id,
                "prediction": self.label_names[int(row.argmax())],
                "probabilities": [round(float(p), 6) for p in row],
            }
            for example, row in zip(split.examples, softmax(outputs["logits"]), strict=True)
        ]

    def _option_rows(self, texts: Sequence[list[int]]) -> Iterator[Row]:
        passage, *options = texts
        n_tokens = self.data.max_seq_len - 3  # without special tokens
        for option in options:
            truncated = option[-min(self.max_option_len, n_tokens) :]
            # all further truncation is in the passage
            yield pair_to_row(passage[: n_tokens - len(truncated)], truncated, self.data.max_seq_len)


def stack_labels(split: Split) -> np.ndarray:
    """Return the labels (N,) of all examples."""
    return np.array([example.label for example in split.examples])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities (N, C) that belong to logits (N, C)."""
    return torch.from_numpy(logits).softmax(1).numpy()


def _tokenize(example: Example, encode: Callable[[str], list[int]], errors: RowErrors) -> list[list[int]]:
    """Return the token ids of each text. For a labeled example without tokens, add an error and return an empty list."""
    token_ids = [encode(text) for text in example.texts]
    if example.label is not None and not any(token_ids):
        text = " ".join(example.texts)
        errors.add(example.location, f"{text!r} has no tokens in this vocabulary. Remove the example.")
        return []
    return token_ids
