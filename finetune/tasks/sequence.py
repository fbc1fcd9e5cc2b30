"""Tasks that read each row by one vector: classes, options; numbers are in number_task.py.

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
from finetune.data.features import Features, Row, pair_to_row
from finetune.data.long_text import LONG, check_checksum, pooled
from finetune.data.sources import Source
from finetune.metrics import classification
from xlpre.model.config import ModelConfig
from xlpre.model.heads import ChoiceHead, ClassificationHead
from xlpre.model.pooling import Summary
from xlpre.text.tokenizer import Tokenizer


class SequenceTask:
    """What the three have in common.

    Args:
        name: as `task=` has it.
        source: of the examples.
        data: tokens of a row at most, and what becomes of longer texts.
        summary: how a row becomes a vector.
        score_names: what is measured; the first decides.
    """

    padding_side: PaddingSide
    label_names: Sequence[str] = ()

    def __init__(
        self,
        name: str,
        source: Source,
        data: TaskDataConfig,
        summary: Summary,
        score_names: Sequence[str] = ("accuracy",),
    ) -> None:
        self.name, self.source, self.data, self.summary = name, source, data, summary
        self.long = LONG[data.long_text](data)
        self.metric_names, self.main_metric = tuple(score_names), score_names[0]
        self.padding_side = "right" if summary == "first" else "left"  # what is read must be text
        if data.long_text == "memory" and self.padding_side == "right":
            raise ValueError(
                "data.long_text=memory reads to the end of a text, and model.pooling=first its begin; set another summary"
            )
        self.dev_splits, self.test_splits, self.text_columns = source.dev_splits, source.test_splits, source.text_columns

    def data_settings(self) -> dict[str, Any]:
        """The source's, and how long texts are read."""
        names = ("long_text", "mem_len", "window_stride", "window_pooling")
        return {**self.source.data_settings(), **{name: getattr(self.data, name) for name in names}}

    def read_split(self, split: str) -> list[Example]:
        """From the source."""
        return self.source.read_split(split)

    def parse_example(self, fields: Mapping[str, Any], place: str) -> Example:
        """From the source."""
        return self.source.parse_example(fields, place)

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """Of each a row with its text or its pair of texts, or a row for each window of it."""
        return [
            Features(number, (row,), self._answers(example), self.long.chunking)
            for number, example in enumerate(examples)
            for row in self.long.rows(_read(example, tokenizer.encode), example.location)
        ]

    def head_positions(self, head: nn.Module, part: PaddedBatch) -> Tensor:
        """What the summary reads."""
        n_rows, length = part.input_ids.shape
        return cast(ClassificationHead, head).summary.positions(n_rows, length, part.input_ids.device)

    def compute_losses(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> Tensor:
        """The head's own."""
        return cast(ClassificationHead, head).losses(head(hidden, part.padding_mask), part.labels["label"])

    def compute_outputs(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> dict[str, Tensor]:
        """Logits."""
        return {"logits": head(hidden, part.padding_mask)}

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores."""
        truth, answers = stack_labels(split), self.predict_values(self.pool_outputs(split, outputs))
        return {name: classification.METRICS[name](truth, answers) for name in self.metric_names}

    def chance_threshold(self, split: Split) -> float:
        """See classification.level_of_chance."""
        return classification.chance_threshold(self.main_metric, stack_labels(split))

    def tuned_settings(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """The source knows its format."""
        return self.source.write_submission(folder, predictions)

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """(N,) the answer to each example, of `of_examples`: a class, an option."""
        return outputs["logits"].argmax(1)

    def pool_outputs(self, split: Split, outputs: Outputs) -> Outputs:
        """Outputs of examples, from those of their windows."""
        return pooled(split, outputs, self.data.window_pooling) if self.data.long_text == "windows" else outputs

    def _answers(self, example: Example) -> dict[str, Any]:
        return {} if example.label is None else {"label": np.int64(example.label)}


class ClassificationTask(SequenceTask):
    """One of C classes; `labels` are their names, for the rest see OneVectorTask."""

    head_kind = "classification"

    def __init__(self, *arguments: Any, labels: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.label_names = labels

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return ClassificationHead(shape, len(self.label_names), self.summary)

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores, and the expected calibration error."""
        of_examples = self.pool_outputs(split, outputs)
        probabilities = softmax(of_examples["logits"])
        right = stack_labels(split) == self.predict_values(of_examples)
        *_, error = classification.calibration(right, probabilities.max(1))
        return {**super().compute_metrics(split, outputs), "calibration_error": error}

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The label, and the probability of each."""
        return [
            {
                "id": example.id,
                "prediction": self.label_names[int(row.argmax())],
                "probabilities": {label: round(float(p), 6) for label, p in zip(self.label_names, row, strict=True)},
            }
            for example, row in zip(split.examples, softmax(self.pool_outputs(split, outputs)["logits"]), strict=True)
        ]


class ChoiceTask(SequenceTask):
    """One of C options, each read in a row of its own with what they are about; `labels` are their names.

    The texts of an example are what the options are about, and each option; `max_option_len` is the most tokens of an option,
    the last of which are kept; for the rest see OneVectorTask.
    """

    head_kind = "multiple_choice"

    def __init__(self, *arguments: Any, labels: Sequence[str], max_option_len: int) -> None:
        super().__init__(*arguments)
        check_checksum(self.data, self.name)
        self.label_names, self.max_option_len = labels, max_option_len

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """A row for each option."""
        encode = lru_cache(16)(tokenizer.encode)  # questions about a text are next to each other
        return [
            Features(number, tuple(self._options(_read(example, encode))), self._answers(example))
            for number, example in enumerate(examples)
        ]

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return ChoiceHead(shape, len(self.label_names), self.summary)

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores, and the first of them for each group of examples."""
        found, truth, answers = super().compute_metrics(split, outputs), stack_labels(split), self.predict_values(outputs)
        groups = np.array([example.group for example in split.examples])
        for group in sorted(set(groups) - {""}):
            inside = groups == group
            found[f"{self.main_metric}_{group}"] = classification.METRICS[self.main_metric](truth[inside], answers[inside])
        return found

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The option, and the probability of each."""
        return [
            {
                "id": example.id,
                "prediction": self.label_names[int(row.argmax())],
                "probabilities": [round(float(p), 6) for p in row],
            }
            for example, row in zip(split.examples, softmax(outputs["logits"]), strict=True)
        ]

    def _options(self, texts: Sequence[list[int]]) -> Iterator[Row]:
        about, *options = texts
        for option in options:
            kept = option[-self.max_option_len :]
            room = self.data.max_seq_len - 3 - len(kept)  # it is the text that is cut
            yield pair_to_row(about[: max(room, 0)], kept, self.data.max_seq_len)


def _read(example: Example, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Tokens of its texts.

    Raises:
        ValueError: there are none in any, and something is true of them.
    """
    found = [encode(text) for text in example.texts]
    if example.label is not None and not any(found):
        raise ValueError(f"{example.location}: of {' '.join(example.texts)!r} the vocabulary reads nothing; remove it")
    return found


def stack_labels(split: Split) -> np.ndarray:
    """(N,) what is true of each example."""
    return np.array([example.label for example in split.examples])


def softmax(logits: np.ndarray) -> np.ndarray:
    """(N, C) probabilities."""
    return torch.from_numpy(logits).softmax(1).numpy()
