"""Tasks whose answer is a stretch of a text: windows in, the best of their spans out, and whether there is an answer at all.

Source: zihangdai/xlnet run_squad.py and squad_utils.py (`write_predictions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config import TaskDataConfig
from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.data.features import Features
from finetune.data.qa_windows import Truth, Window, windows
from finetune.metrics.squad import best_threshold, score_prediction
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.model.config import ModelConfig
from xlpre.model.heads import SpanHead
from xlpre.text import special_tokens
from xlpre.text.offsets import TokenOffsets
from xlpre.text.tokenizer import Tokenizer

N_STARTS = N_ENDS = 5  # as published, and as Hugging Face's configuration has it
N_BEST = 5  # answers told of a question


@dataclass(frozen=True)
class SpanPrediction:
    """The best answers to a question, and the log-odds that there is none.

    Attributes:
        best: up to N_BEST texts with the log-probabilities of their start and end, best first; may be empty.
        odds: the lowest of its windows.
    """

    best: list[tuple[str, float, float]]
    odds: float


class SpanTask:
    """Spans; reading and writing files is left to those who know them.

    Args:
        name: as `task=` has it.
        data: the settings.
        answerable: every question has an answer.

    Raises:
        ValueError: no room for a text beside the question.
    """

    padding_side: PaddingSide = "right"
    head_kind = "span"
    label_names: Sequence[str] = ()
    text_columns: tuple[str, ...] = ()

    def __init__(self, name: str, data: TaskDataConfig, answerable: bool) -> None:
        self.name, self.answerable, self._data = name, answerable, data
        self.main_metric = "f1" if answerable or data.null_score_threshold is not None else "best_f1"
        if data.max_seq_len < data.max_question_len + 4:
            raise ValueError(
                f"data.max_seq_len ({data.max_seq_len}) has no room for data.max_question_len ({data.max_question_len}), 3 symbols and a text; "
                f"set data.max_seq_len above {data.max_question_len + 3}"
            )

    def data_settings(self) -> dict[str, Any]:
        """What reading a question and answering it need."""
        names = ("max_seq_len", "max_question_len", "doc_stride", "max_answer_len", "null_score_threshold")
        return {name: getattr(self._data, name) for name in names}

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """A row for each window of the context, the question after it."""
        data = self._data
        found: list[Features] = []
        text = TokenOffsets("", [], np.empty(0), np.empty(0))
        for number, example in enumerate(examples):
            context, question = example.texts
            if context != text.text:  # questions about a context are next to each other
                text = tokenizer.locate(context)
            ids = tokenizer.encode(question)[: data.max_question_len]
            if not text.ids or not ids:
                raise ValueError(
                    f"{example.location}: of {question if text.ids else context!r} the vocabulary reads nothing; remove it"
                )
            found += windows(number, text, ids, data.max_seq_len, data.doc_stride, _truth(example, text))
        return found

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return SpanHead(shape)

    def head_positions(self, head: nn.Module, part: PaddedBatch) -> Tensor:
        """All."""
        B, T = part.input_ids.shape
        return torch.arange(T, device=part.input_ids.device).expand(B, T)

    def compute_losses(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> Tensor:
        """The head's own."""
        start, end, impossible = (part.labels[name] for name in ("start", "end", "impossible"))
        scores = cast(SpanHead, head)(hidden, *span_masks(part), start)
        return SpanHead.losses(scores, start, end, impossible)

    def compute_outputs(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> dict[str, Tensor]:
        """Beams of start and end, and the log-odds of there being no answer."""
        return vars(cast(SpanHead, head).beams(hidden, *span_masks(part), N_STARTS, N_ENDS))

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """As the official scorers; of 2.0 at the threshold, or, where none is set or decided yet, at even odds and the best of all."""
        answered = self._answered(split, outputs)
        truths = [[text for _, text in example.label] for example in split.examples]
        texts = [one.best[0][0] if one.best else "" for one in answered]
        of_texts = self._scores(texts, truths)
        if self.answerable:
            return {"f1": float(of_texts[:, 1].mean()), "exact": float(of_texts[:, 0].mean())}
        odds = np.array([one.odds for one in answered])
        said, exists = np.array([bool(text) for text in texts]), np.array([bool(of) for of in truths])
        found: dict[str, float] = {}
        if self._data.null_score_threshold is None:
            for column, name in ((1, "f1"), (0, "exact")):
                best, threshold = best_threshold(of_texts[:, column], said, exists, odds)
                found |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
        # no answer is worth something where there is none
        decided = np.where((odds <= self._threshold)[:, None], of_texts, ~exists[:, None])
        for column, name in ((1, "f1"), (0, "exact")):
            found[name] = float(decided[:, column].mean())
            for part, inside in (("has_answer", exists), ("no_answer", ~exists)):
                if inside.any():
                    found[f"{part}_{name}"] = float(decided[inside, column].mean())
        return found

    def chance_threshold(self, split: Split) -> float:
        """What never giving an answer gets, and two standard errors."""
        p = float(np.mean([not example.label for example in split.examples]))
        return min(p + 2 * math.sqrt(p * (1 - p) / len(split.examples)), 1.0)

    def tuned_settings(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """The threshold, if none was set."""
        if self.answerable or self._data.null_score_threshold is not None:
            return {}
        return {"null_score_threshold": scores["best_f1_threshold"]}

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The answer (empty: there is none), the best ones with their probabilities among each other, and the odds of there being none."""
        answered = self._answered(split, outputs)
        return [self._prediction(*one) for one in zip(split.examples, answered, strict=True)]

    @property
    def _threshold(self) -> float:
        """No answer is given above it: even odds, unless another was set or decided."""
        return self._data.null_score_threshold or 0.0

    def _prediction(self, example: Example, answered: SpanPrediction) -> Prediction:
        texts = [text for text, _, _ in answered.best] or [""]
        scores = np.array([start + end for _, start, end in answered.best] or [0.0])
        shares = np.exp(scores - scores.max())
        rounded = [[round(x, 6) for x in of] for of in ((shares / shares.sum()).tolist(), scores.tolist())]
        best = [
            {"text": text, "probability": p, "log_probability": score}
            for text, p, score in zip(texts, *rounded, strict=True)
        ]
        if self.answerable:
            return {"id": example.id, "prediction": texts[0], "best": best}
        given = answered.odds <= self._threshold
        return {
            "id": example.id,
            "prediction": texts[0] if given else "",
            "null_log_odds": answered.odds,
            "best": best,
        }

    def _scores(self, texts: Sequence[str], truths: Sequence[Sequence[str]]) -> np.ndarray:
        """(N, 2) exact match and F1."""
        return np.array([score_prediction(*one, self.answerable) for one in zip(texts, truths, strict=True)])

    def _answered(self, split: Split, outputs: Outputs) -> list[SpanPrediction]:
        """Of each example, from all of its windows."""
        found: list[list[tuple[str, float, float]]] = [[] for _ in split.examples]
        odds = [math.inf] * len(split.examples)
        for number, item in enumerate(split.features):
            found[item.example_index] += _spans(cast(Window, item), outputs, number, self._data.max_answer_len)
            odds[item.example_index] = min(odds[item.example_index], float(outputs["no_answer"][number]))
        return [SpanPrediction(_best(of_example), odd) for of_example, odd in zip(found, odds, strict=True)]


def span_masks(part: PaddedBatch) -> tuple[Tensor, Tensor]:
    """(B, T) bool, what is no part of an answer: all but the text and <cls>; and (B,) the place of <cls>."""
    of_text = (part.segment_ids == SEGMENT_A) & (part.input_ids != special_tokens.SEP)
    return ~(of_text | (part.segment_ids == SEGMENT_CLS)), (~part.padding_mask).sum(1) - 1


def _truth(example: Example, text: TokenOffsets) -> Truth | None:
    """Of several answers the first, as in training, where there is one."""
    if not example.label:
        return None if example.label is None else Truth(False)
    begin, answer = example.label[0]
    first, last = text.tokens(begin, begin + len(answer))
    if text.begins[first] >= begin + len(answer) or text.ends[last] <= begin:
        raise ValueError(f"{example.location}: of the answer {answer!r} the vocabulary reads nothing; remove the question")
    return Truth(True, first, last)


def _spans(window: Window, outputs: Outputs, number: int, max_len: int) -> Iterator[tuple[str, float, float]]:
    """The spans of a window that can be answers, with the log-probabilities of start and end."""
    n = len(window.central)
    for start, p, ends, end_places in zip(
        *(outputs[name][number] for name in ("start", "start_position", "end", "end_position")), strict=True
    ):
        if p < n and window.central[p]:
            for end, q in zip(ends, end_places, strict=True):
                if p <= q < min(n, p + max_len):
                    text = window.text.stretch(window.first + p, window.first + q)
                    if text:
                        yield text, float(start), float(end)


def _best(spans: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The N_BEST, each text once."""
    found: dict[str, tuple[str, float, float]] = {}
    for span in sorted(spans, key=lambda span: -(span[1] + span[2])):
        found.setdefault(span[0], span)
    return list(found.values())[:N_BEST]
