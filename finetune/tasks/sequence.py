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
from finetune.data.batching import Part
from finetune.data.examples import Example, Item, Split
from finetune.data.features import Padding, Row, lay_out
from finetune.data.long_text import LONG, check_whole, pooled
from finetune.data.sources import Source
from finetune.metrics import classification
from finetune.tasks.base import Outputs, Prediction
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

    padding: Padding
    labels: Sequence[str] = ()

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
        self.score_names, self.score = tuple(score_names), score_names[0]
        self.padding = "right" if summary == "first" else "left"  # what is read must be text
        if data.long_text == "memory" and self.padding == "right":
            raise ValueError(
                "data.long_text=memory reads to the end of a text, and model.pooling=first its begin; set another summary"
            )
        self.dev, self.test, self.columns = source.dev, source.test, source.texts

    def settings(self) -> dict[str, Any]:
        """The source's, and how long texts are read."""
        names = ("long_text", "mem_len", "window_stride", "window_pooling")
        return {**self.source.settings(), **{name: getattr(self.data, name) for name in names}}

    def read(self, split: str) -> list[Example]:
        """From the source."""
        return self.source.read(split)

    def example(self, fields: Mapping[str, Any], place: str) -> Example:
        """From the source."""
        return self.source.example(fields, place)

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Item]:
        """Of each a row with its text or its pair of texts, or a row for each window of it."""
        return [
            Item(number, (row,), self._answers(example), self.long.reading)
            for number, example in enumerate(examples)
            for row in self.long.rows(_read(example, tokenizer.encode), example.place)
        ]

    def positions(self, head: nn.Module, part: Part) -> Tensor:
        """What the summary reads."""
        n_rows, length = part.ids.shape
        return cast(ClassificationHead, head).summary.positions(n_rows, length, part.ids.device)

    def losses(self, head: nn.Module, hidden: Tensor, part: Part) -> Tensor:
        """The head's own."""
        return cast(ClassificationHead, head).losses(head(hidden, part.padding), part.answers["truth"])

    def outputs(self, head: nn.Module, hidden: Tensor, part: Part) -> dict[str, Tensor]:
        """Logits."""
        return {"logits": head(hidden, part.padding)}

    def measure(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores."""
        truth, answers = truth_of(split), self.answers(self.of_examples(split, outputs))
        return {name: classification.SCORES[name](truth, answers) for name in self.score_names}

    def chance_threshold(self, split: Split) -> float:
        """See classification.level_of_chance."""
        return classification.chance_threshold(self.score, truth_of(split))

    def decided(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def submit(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """The source knows its format."""
        return self.source.submit(folder, predictions)

    def answers(self, outputs: Outputs) -> np.ndarray:
        """(N,) the answer to each example, of `of_examples`: a class, an option."""
        return outputs["logits"].argmax(1)

    def of_examples(self, split: Split, outputs: Outputs) -> Outputs:
        """Outputs of examples, from those of their windows."""
        return pooled(split, outputs, self.data.window_pooling) if self.data.long_text == "windows" else outputs

    def _answers(self, example: Example) -> dict[str, Any]:
        return {} if example.answer is None else {"truth": np.int64(example.answer)}


class ClassificationTask(SequenceTask):
    """One of C classes; `labels` are their names, for the rest see OneVectorTask."""

    head_kind = "classes"

    def __init__(self, *arguments: Any, labels: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.labels = labels

    def head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return ClassificationHead(shape, len(self.labels), self.summary)

    def measure(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores, and the expected calibration error."""
        of_examples = self.of_examples(split, outputs)
        probabilities = softmax(of_examples["logits"])
        right = truth_of(split) == self.answers(of_examples)
        *_, error = classification.calibration(right, probabilities.max(1))
        return {**super().measure(split, outputs), "calibration_error": error}

    def predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The label, and the probability of each."""
        return [
            {
                "id": example.id,
                "prediction": self.labels[int(row.argmax())],
                "probabilities": {label: round(float(p), 6) for label, p in zip(self.labels, row, strict=True)},
            }
            for example, row in zip(split.examples, softmax(self.of_examples(split, outputs)["logits"]), strict=True)
        ]


class ChoiceTask(SequenceTask):
    """One of C options, each read in a row of its own with what they are about; `labels` are their names.

    The texts of an example are what the options are about, and each option; `max_option_len` is the most tokens of an option,
    the last of which are kept; for the rest see OneVectorTask.
    """

    head_kind = "choice"

    def __init__(self, *arguments: Any, labels: Sequence[str], max_option_len: int) -> None:
        super().__init__(*arguments)
        check_whole(self.data, self.name)
        self.labels, self.max_option_len = labels, max_option_len

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Item]:
        """A row for each option."""
        encode = lru_cache(16)(tokenizer.encode)  # questions about a text are next to each other
        return [
            Item(number, tuple(self._options(_read(example, encode))), self._answers(example))
            for number, example in enumerate(examples)
        ]

    def head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return ChoiceHead(shape, len(self.labels), self.summary)

    def measure(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """The task's scores, and the first of them for each group of examples."""
        found, truth, answers = super().measure(split, outputs), truth_of(split), self.answers(outputs)
        groups = np.array([example.group for example in split.examples])
        for group in sorted(set(groups) - {""}):
            inside = groups == group
            found[f"{self.score}_{group}"] = classification.SCORES[self.score](truth[inside], answers[inside])
        return found

    def predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The option, and the probability of each."""
        return [
            {
                "id": example.id,
                "prediction": self.labels[int(row.argmax())],
                "probabilities": [round(float(p), 6) for p in row],
            }
            for example, row in zip(split.examples, softmax(outputs["logits"]), strict=True)
        ]

    def _options(self, texts: Sequence[list[int]]) -> Iterator[Row]:
        about, *options = texts
        for option in options:
            kept = option[-self.max_option_len :]
            room = self.data.max_seq_len - 3 - len(kept)  # it is the text that is cut
            yield lay_out(about[: max(room, 0)], kept, self.data.max_seq_len)


def _read(example: Example, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Tokens of its texts.

    Raises:
        ValueError: there are none in any, and something is true of them.
    """
    found = [encode(text) for text in example.texts]
    if example.answer is not None and not any(found):
        raise ValueError(f"{example.place}: of {' '.join(example.texts)!r} the vocabulary reads nothing; remove it")
    return found


def truth_of(split: Split) -> np.ndarray:
    """(N,) what is true of each example."""
    return np.array([example.answer for example in split.examples])


def softmax(logits: np.ndarray) -> np.ndarray:
    """(N, C) probabilities."""
    return torch.from_numpy(logits).softmax(1).numpy()
