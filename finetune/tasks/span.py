"""Span extraction from a context, with or without questions that have no answer.

Source: zihangdai/xlnet run_squad.py and squad_utils.py (`write_predictions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config import TaskDataConfig
from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.data.features import Features, PaddingSide
from finetune.data.qa_windows import ContextWindow, SpanLabel, build_windows
from finetune.data.row_errors import RowErrors
from finetune.metrics.squad import best_null_threshold, score_prediction
from xlpre.common.errors import InputError
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.model.config import ModelConfig
from xlpre.model.task_heads import SpanHead
from xlpre.text import special_tokens
from xlpre.text.offsets import TokenOffsets
from xlpre.text.tokenizer import Tokenizer

N_STARTS = N_ENDS = 5  # beam sizes, as in the published code and in Hugging Face's configuration
N_BEST = 5  # predicted spans per question


class SpanCandidate(NamedTuple):
    """A predicted span.

    Attributes:
        text: characters of the span.
        log_prob: its log-probability.
    """

    text: str
    log_prob: float


@dataclass(frozen=True)
class SpanPrediction:
    """The best spans for a question, and the log-odds that it has no answer.

    Attributes:
        candidates: up to N_BEST spans, best first; may be empty.
        null_log_odds: log-odds that there is no answer: the minimum over all windows of the context.
    """

    candidates: list[SpanCandidate]
    null_log_odds: float


class SpanTask:
    """Span extraction. Subclasses read examples from files and write predictions.

    An example has the texts (context, question); its label is a tuple of true spans. Each is a pair of the index of its
    first character in the context, and its text. The tuple is empty if the question has no answer.

    Args:
        name: value of the setting `task`.
        data: settings.
        always_answerable: True if every question has an answer.

    Raises:
        InputError: `data.max_seq_len` has no room for a question and a context.
    """

    padding_side: PaddingSide = "right"
    head_kind = "span"
    label_names: Sequence[str] = ()
    text_columns: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = ("answers", "is_impossible")

    def __init__(self, name: str, data: TaskDataConfig, always_answerable: bool) -> None:
        self.name, self.always_answerable, self._data = name, always_answerable, data
        self.main_metric = "f1" if always_answerable or data.null_score_threshold is not None else "best_f1"
        if data.max_seq_len < data.max_question_len + 4:
            raise InputError(
                f"data.max_seq_len={data.max_seq_len} is invalid: it must hold data.max_question_len={data.max_question_len}, three "
                f"special tokens and a context. Set data.max_seq_len above {data.max_question_len + 3}."
            )

    def data_settings(self) -> dict[str, Any]:
        """Return the settings needed to read questions and to predict spans."""
        names = ("max_seq_len", "max_question_len", "doc_stride", "max_answer_len", "null_score_threshold")
        return {name: getattr(self._data, name) for name in names}

    def encode(self, examples: Sequence[Example], tokenizer: Tokenizer) -> list[Features]:
        """Return a row for each window of the context, followed by the question."""
        data = self._data
        features: list[Features] = []
        context, errors = TokenOffsets("", [], np.empty(0), np.empty(0)), RowErrors()
        for index, example in enumerate(examples):
            context_text, question_text = example.texts
            if context_text != context.text:  # questions about the same context are adjacent
                context = tokenizer.encode_with_offsets(context_text)
            question = tokenizer.encode(question_text)[: data.max_question_len]
            if not context.ids or not question:
                empty_text = question_text if context.ids else context_text
                errors.add(example.location, f"{empty_text!r} has no tokens in this vocabulary. Remove the question.")
                continue
            with errors.collect(example.location):
                label = _span_label(example, context)
                features += build_windows(index, context, question, data.max_seq_len, data.doc_stride, label)
        errors.raise_if_any()
        return features

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a new span head."""
        return SpanHead(config)

    def head_positions(self, head: nn.Module, batch: PaddedBatch) -> Tensor:
        """Return all positions."""
        B, T = batch.input_ids.shape
        return torch.arange(T, device=batch.input_ids.device).expand(B, T)

    def compute_losses(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the losses of the span head."""
        start, end, impossible = (batch.labels[name] for name in ("start", "end", "impossible"))
        scores = cast(SpanHead, head)(hidden, *span_masks(batch), start)
        return SpanHead.losses(scores, start, end, impossible)

    def compute_outputs(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> dict[str, Tensor]:
        """Return the beams of starts and ends, and the log-odds that there is no answer."""
        return vars(cast(SpanHead, head).beams(hidden, *span_masks(batch), N_STARTS, N_ENDS))

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return the official metrics.

        For SQuAD 2.0, "no answer" is predicted if the no-answer log-odds exceed `data.null_score_threshold`. If this setting is
        null, the threshold is 0, and the metrics at the best threshold are added.
        """
        predictions = self._predict_spans(split, outputs)
        labels = [[text for _, text in example.label] for example in split.examples]
        texts = [prediction.candidates[0].text if prediction.candidates else "" for prediction in predictions]
        scores = np.array(  # (N, 2) exact match and F1
            [
                score_prediction(text, true_texts, self.always_answerable)
                for text, true_texts in zip(texts, labels, strict=True)
            ]
        )
        if self.always_answerable:
            return {"f1": float(scores[:, 1].mean()), "exact": float(scores[:, 0].mean())}
        null_log_odds = np.array([prediction.null_log_odds for prediction in predictions])
        is_predicted, has_answer = (np.array([bool(value) for value in values]) for values in (texts, labels))
        metrics: dict[str, float] = {}
        if self._data.null_score_threshold is None:
            for column, name in ((1, "f1"), (0, "exact")):
                best, threshold = best_null_threshold(scores[:, column], is_predicted, has_answer, null_log_odds)
                metrics |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
        # above the threshold, "no answer" is predicted: this scores 1 if the question has no answer, otherwise 0
        scores_at_threshold = np.where((null_log_odds <= self._threshold)[:, None], scores, ~has_answer[:, None])
        for column, name in ((1, "f1"), (0, "exact")):
            metrics[name] = float(scores_at_threshold[:, column].mean())
            for group, in_group in (("has_answer", has_answer), ("no_answer", ~has_answer)):
                if in_group.any():
                    metrics[f"{group}_{name}"] = float(scores_at_threshold[in_group, column].mean())
        return metrics

    def chance_threshold(self, split: Split) -> float:
        """Return the score of always predicting "no answer", plus two standard errors."""
        p = float(np.mean([not example.label for example in split.examples]))
        return min(p + 2 * math.sqrt(p * (1 - p) / len(split.examples)), 1.0)

    def tuned_settings(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the no-answer threshold with the best F1, unless `data.null_score_threshold` is set."""
        if self.always_answerable or self._data.null_score_threshold is not None:
            return {}
        return {"null_score_threshold": metrics["best_f1_threshold"]}

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return the predicted text (empty for "no answer"), the best spans, and the log-odds that there is no answer.

        The values of `probability` in `nbest` are normalized: they sum to 1 for each question.
        """
        predictions = self._predict_spans(split, outputs)
        return [self._to_json(*pair) for pair in zip(split.examples, predictions, strict=True)]

    @property
    def no_answer_threshold(self) -> float | None:
        """Log-odds of "no answer" above which it is predicted; None if every question has an answer."""
        return None if self.always_answerable else self._threshold

    @property
    def _threshold(self) -> float:
        """No-answer log-odds above which "no answer" is predicted."""
        return self._data.null_score_threshold or 0.0

    def _to_json(self, example: Example, prediction: SpanPrediction) -> Prediction:
        texts = [candidate.text for candidate in prediction.candidates] or [""]
        log_probs = np.array([candidate.log_prob for candidate in prediction.candidates] or [0.0])
        shares = np.exp(log_probs - log_probs.max())
        rounded = [[round(x, 6) for x in values] for values in ((shares / shares.sum()).tolist(), log_probs.tolist())]
        nbest = [
            {"text": text, "probability": p, "log_probability": log_prob}
            for text, p, log_prob in zip(texts, *rounded, strict=True)
        ]
        if self.always_answerable:
            return {"id": example.id, "prediction": texts[0], "nbest": nbest}
        return {
            "id": example.id,
            "prediction": texts[0] if prediction.null_log_odds <= self._threshold else "",
            "null_log_odds": prediction.null_log_odds,
            "nbest": nbest,
        }

    def _predict_spans(self, split: Split, outputs: Outputs) -> list[SpanPrediction]:
        """Return the prediction for each example, from the outputs for all its windows."""
        candidates: list[list[SpanCandidate]] = [[] for _ in split.examples]
        null_log_odds = [math.inf] * len(split.examples)
        for row, feature in enumerate(split.features):
            window, index = cast(ContextWindow, feature), feature.example_index
            candidates[index] += _window_candidates(window, outputs, row, self._data.max_answer_len)
            null_log_odds[index] = min(null_log_odds[index], float(outputs["no_answer"][row]))
        return [SpanPrediction(_best(spans), odds) for spans, odds in zip(candidates, null_log_odds, strict=True)]


def span_masks(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens that cannot be part of a span, and the positions of <cls>.

    Returns:
        (B, T) bool, False for context tokens and <cls>, otherwise True; and (B,) int64, the position of <cls> in each row.
    """
    is_context = (batch.segment_ids == SEGMENT_A) & (batch.input_ids != special_tokens.SEP)
    return ~(is_context | (batch.segment_ids == SEGMENT_CLS)), (~batch.padding_mask).sum(1) - 1


def _span_label(example: Example, context: TokenOffsets) -> SpanLabel | None:
    """Return the first true span as tokens. Training uses only this one of the true spans. None: the example has no label."""
    if not example.label:
        return None if example.label is None else SpanLabel(False)
    start, text = example.label[0]
    first, last = context.token_range(start, start + len(text))
    if context.starts[first] >= start + len(text) or context.ends[last] <= start:
        raise InputError(
            f"{example.location}: the answer {text!r} has no tokens in this vocabulary. Remove the question."
        )
    return SpanLabel(True, first, last)


def _window_candidates(
    window: ContextWindow, outputs: Outputs, row: int, max_answer_len: int
) -> Iterator[SpanCandidate]:
    """Yield the valid spans in the beams of a window: inside the context, not too long, and in the window with the most context.

    Args:
        window: features of the window.
        outputs: beams of all windows.
        row: index of the window in the outputs.
        max_answer_len: maximum number of tokens in a span.
    """
    n = len(window.is_max_context)
    for start_log_prob, start, end_log_probs, ends in zip(
        *(outputs[name][row] for name in ("start", "start_position", "end", "end_position")), strict=True
    ):
        if start < n and window.is_max_context[start]:
            for end_log_prob, end in zip(end_log_probs, ends, strict=True):
                if start <= end < min(n, start + max_answer_len):
                    text = window.context.span_text(window.first_token + start, window.first_token + end)
                    if text:
                        yield SpanCandidate(text, float(start_log_prob) + float(end_log_prob))


def _best(candidates: list[SpanCandidate]) -> list[SpanCandidate]:
    """Return the N_BEST candidates with the highest probability and different texts."""
    by_text: dict[str, SpanCandidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.log_prob):
        by_text.setdefault(candidate.text, candidate)
    return list(by_text.values())[:N_BEST]
