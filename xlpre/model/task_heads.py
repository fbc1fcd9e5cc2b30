"""Task heads for fine-tuning, which read hidden states of the content stream.

Source: zihangdai/xlnet modeling.py (`classification_loss`, `regression_loss`) and function_builder.py (`get_qa_outputs`, `get_race_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.initialization import initialize_linear
from xlpre.model.pooling import Pooling, SequenceSummary


class ClassificationHead(nn.Module):
    """Logits of C classes (GLUE, text classification).

    Args:
        config: shape of the model.
        n_classes: C.
        pooling: see SequenceSummary.
        project: see SequenceSummary.
    """

    def __init__(self, config: ModelConfig, n_classes: int, pooling: Pooling = "last", project: bool = True) -> None:
        super().__init__()
        self.summary = SequenceSummary(config, pooling, project)
        self.logits_proj = nn.Linear(config.d_model, n_classes)
        initialize_linear(self.logits_proj, config)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Compute logits.

        Args:
            hidden: (B, P, D) hidden states at `summary.positions`.
            padding: (B, T) bool, True at padding.

        Returns:
            (B, C).
        """
        return self.logits_proj(self.summary(hidden, padding))

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each row in nats, (B,). Labels are (B,) int64."""
        return F.cross_entropy(logits.float(), labels, reduction="none")


class RegressionHead(ClassificationHead):
    """One number per sequence (STS-B)."""

    def __init__(self, config: ModelConfig, pooling: Pooling = "last", project: bool = True) -> None:
        super().__init__(config, 1, pooling, project)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Compute the numbers, (B,). See ClassificationHead."""
        return super().forward(hidden, padding).squeeze(1)

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of each row, (B,). Labels are (B,) float."""
        return (logits.float() - labels) ** 2


class ChoiceHead(RegressionHead):
    """One score for each of C choices (RACE). The choices of a question are consecutive rows."""

    def __init__(self, config: ModelConfig, n_choices: int, pooling: Pooling = "last", project: bool = True) -> None:
        super().__init__(config, pooling, project)
        self.n_choices = n_choices

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Compute scores, (B*C, P, D) and (B*C, T) -> (B, C). See ClassificationHead."""
        return super().forward(hidden, padding).view(-1, self.n_choices)

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each question in nats, (B,). Labels are (B,) int64."""
        return ClassificationHead.losses(logits, labels)


@dataclass(frozen=True)
class SpanScores:
    """Distributions over the T tokens for start and end of the answer span, for training.

    Attributes:
        start: (B, T) log-probabilities of the start.
        end: (B, T) log-probabilities of the end, given the true start.
        no_answer: (B,) logit of "no answer".
    """

    start: Tensor
    end: Tensor
    no_answer: Tensor


@dataclass(frozen=True)
class SpanBeams:
    """The S most likely starts of the answer span and, for each start, the N most likely ends.

    Attributes:
        start: (B, S) log-probabilities of the starts, highest first.
        start_position: (B, S) int64, positions of the starts.
        end: (B, S, N) log-probabilities of the ends, given the start, highest first.
        end_position: (B, S, N) int64, positions of the ends.
        no_answer: (B,) logit of "no answer".
    """

    start: Tensor
    start_position: Tensor
    end: Tensor
    end_position: Tensor
    no_answer: Tensor


class SpanHead(nn.Module):
    """Predict the start of the answer, its end given the start, and whether there is an answer (SQuAD 2.0; XLNet, section 3.4).

    Args:
        config: shape of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        self.start = nn.Linear(D, 1)
        self.end_inner, self.end_outer = nn.Linear(2 * D, D), nn.Linear(D, 1)
        self.end_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.no_answer_inner, self.no_answer_outer = nn.Linear(2 * D, D), nn.Linear(D, 1, bias=False)
        self.dropout = Dropout(config.dropout)
        for linear in (self.start, self.end_inner, self.end_outer, self.no_answer_inner, self.no_answer_outer):
            initialize_linear(linear, config)

    def forward(self, hidden: Tensor, excluded: Tensor, cls_position: Tensor, start_position: Tensor) -> SpanScores:
        """Compute scores for training.

        Args:
            hidden: (B, T, D).
            excluded: (B, T) bool, True at tokens that cannot be part of an answer.
            cls_position: (B,) int64, position of <cls>.
            start_position: (B,) int64, position of the true start.
        """
        start = _log_probabilities(self.start(hidden), excluded)
        end = self._ends(hidden, _take_positions(hidden, start_position)[:, None], excluded)[:, 0]
        return SpanScores(start, end, self._no_answer(hidden, start, cls_position))

    def beams(self, hidden: Tensor, excluded: Tensor, cls_position: Tensor, n_starts: int, n_ends: int) -> SpanBeams:
        """Find the most likely spans.

        Args:
            hidden: (B, T, D).
            excluded: (B, T) bool, True at tokens that cannot be part of an answer.
            cls_position: (B,) int64, position of <cls>.
            n_starts: S, number of starts.
            n_ends: N, number of ends of each start.
        """
        start = _log_probabilities(self.start(hidden), excluded)
        best = start.topk(n_starts)
        start_hidden = hidden.gather(1, best.indices[:, :, None].expand(-1, -1, hidden.size(2)))  # (B, S, D)
        ends = self._ends(hidden, start_hidden, excluded).topk(n_ends)
        no_answer = self._no_answer(hidden, start, cls_position)
        return SpanBeams(best.values, best.indices, ends.values, ends.indices, no_answer)

    @staticmethod
    def losses(scores: SpanScores, start: Tensor, end: Tensor, impossible: Tensor) -> Tensor:
        """Return half the sum of the cross entropies of start, end and answerability, (B,) in nats.

        Args:
            scores: result of `forward`.
            start: (B,) int64.
            end: (B,) int64.
            impossible: (B,) float, 1 if there is no answer, else 0.

        Source: zihangdai/xlnet run_squad.py.
        """
        spans = F.nll_loss(scores.start, start, reduction="none") + F.nll_loss(scores.end, end, reduction="none")
        answerable = F.binary_cross_entropy_with_logits(scores.no_answer.float(), impossible, reduction="none")
        return 0.5 * (spans + answerable)

    def _ends(self, hidden: Tensor, start_hidden: Tensor, excluded: Tensor) -> Tensor:
        """Return the log-probabilities of the ends (B, S, T), from hidden states (B, T, D) and those of S starts (B, S, D)."""
        T, S = hidden.size(1), start_hidden.size(1)
        pairs = torch.cat(
            [hidden[:, None].expand(-1, S, -1, -1), start_hidden[:, :, None].expand(-1, -1, T, -1)], dim=3
        )
        inner = self.end_norm(torch.tanh(self.end_inner(pairs)))
        return _log_probabilities(self.end_outer(inner), excluded[:, None])

    def _no_answer(self, hidden: Tensor, start: Tensor, cls_position: Tensor) -> Tensor:
        expected_start = (start.exp().to(hidden.dtype)[:, None] @ hidden)[:, 0]  # expected hidden state of the start
        both = torch.cat([expected_start, _take_positions(hidden, cls_position)], dim=1)
        return self.no_answer_outer(self.dropout(torch.tanh(self.no_answer_inner(both)))).squeeze(1)


def _log_probabilities(logits: Tensor, excluded: Tensor) -> Tensor:
    """(..., T, 1) logits -> (..., T) log-probabilities over the tokens that are not excluded."""
    return logits.squeeze(-1).float().masked_fill(excluded, -1e30).log_softmax(-1)


def _take_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden state at one position of each row, (B, T, D) and (B,) -> (B, D)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]
