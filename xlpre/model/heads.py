"""Heads for fine-tuning: from hidden states of the content stream to an answer.

Source: zihangdai/xlnet modeling.py (`classification_loss`, `regression_loss`) and function_builder.py
(`get_qa_outputs`, `get_race_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.initialization import initialize_linear
from xlpre.model.pooling import SequenceSummary, Pooling


class ClassificationHead(nn.Module):
    """Logits of C classes (GLUE, text classification)."""

    def __init__(self, config: ModelConfig, n_classes: int, kind: Pooling = "last", project: bool = True) -> None:
        super().__init__()
        self.summary = SequenceSummary(config, kind, project)
        self.logits_proj = nn.Linear(config.d_model, n_classes)
        initialize_linear(self.logits_proj, config)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """(B, P, D), (B, T) -> (B, C)."""
        return self.logits_proj(self.summary(hidden, padding))

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each row in nats, (B,); labels (B,) int64."""
        return F.cross_entropy(logits.float(), labels, reduction="none")


class RegressionHead(ClassificationHead):
    """One number (STS-B)."""

    def __init__(self, config: ModelConfig, kind: Pooling = "last", project: bool = True) -> None:
        super().__init__(config, 1, kind, project)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """(B, P, D), (B, T) -> (B,)."""
        return super().forward(hidden, padding).squeeze(1)

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Squared error of each row, (B,); labels (B,) float."""
        return (logits.float() - labels) ** 2


class ChoiceHead(RegressionHead):
    """One score for each of C choices, which are rows of their own, those of a question next to each other (RACE)."""

    def __init__(self, config: ModelConfig, n_choices: int, kind: Pooling = "last", project: bool = True) -> None:
        super().__init__(config, kind, project)
        self.n_choices = n_choices

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """(B*C, P, D), (B*C, T) -> (B, C)."""
        return super().forward(hidden, padding).view(-1, self.n_choices)

    @staticmethod
    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each question in nats, (B,); labels (B,) int64."""
        return ClassificationHead.losses(logits, labels)


@dataclass(frozen=True)
class SpanScores:
    """Where an answer lies, as log-probabilities over T tokens, and how likely there is none.

    Attributes:
        start: (B, T).
        end: (B, T) in training, given the true start.
        no_answer: (B,) logit.
    """

    start: Tensor
    end: Tensor
    no_answer: Tensor


@dataclass(frozen=True)
class SpanBeams:
    """The likeliest starts, and for each the likeliest ends.

    Attributes:
        start, start_position: (B, S) log-probabilities and places, best first.
        end, end_position: (B, S, N), the ends of each start.
        no_answer: (B,) logit.
    """

    start: Tensor
    start_position: Tensor
    end: Tensor
    end_position: Tensor
    no_answer: Tensor


class SpanHead(nn.Module):
    """A span of the text, the end chosen given the start, and whether there is an answer at all (SQuAD 2.0; XLNet section 3.4)."""

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
        """Scores in training.

        Args:
            hidden: (B, T, D).
            excluded: (B, T) bool, tokens that are no part of an answer.
            cls_position: (B,) place of <cls>.
            start_position: (B,) the true start.
        """
        start = _log_probabilities(self.start(hidden), excluded)
        end = self._ends(hidden, _row_at(hidden, start_position)[:, None], excluded)[:, 0]
        return SpanScores(start, end, self._no_answer(hidden, start, cls_position))

    def beams(self, hidden: Tensor, excluded: Tensor, cls_position: Tensor, n_starts: int, n_ends: int) -> SpanBeams:
        """The `n_starts` best starts and `n_ends` best ends of each; see forward for the rest."""
        start = _log_probabilities(self.start(hidden), excluded)
        best = start.topk(n_starts)
        states = hidden.gather(1, best.indices[:, :, None].expand(-1, -1, hidden.size(2)))  # (B, S, D)
        ends = self._ends(hidden, states, excluded).topk(n_ends)
        no_answer = self._no_answer(hidden, start, cls_position)
        return SpanBeams(best.values, best.indices, ends.values, ends.indices, no_answer)

    @staticmethod
    def losses(scores: SpanScores, start: Tensor, end: Tensor, impossible: Tensor) -> Tensor:
        """Half of each: cross entropy of start and of end, and of there being no answer; (B,) in nats.

        Args:
            scores: of forward.
            start: (B,) int64.
            end: (B,) int64.
            impossible: (B,) float, 1 where there is no answer.

        Source: zihangdai/xlnet run_squad.py.
        """
        spans = F.nll_loss(scores.start, start, reduction="none") + F.nll_loss(scores.end, end, reduction="none")
        answerable = F.binary_cross_entropy_with_logits(scores.no_answer.float(), impossible, reduction="none")
        return 0.5 * (spans + answerable)

    def _ends(self, hidden: Tensor, starts: Tensor, excluded: Tensor) -> Tensor:
        """(B, T, D), S start states (B, S, D) -> (B, S, T) log-probabilities."""
        B, T, D = hidden.shape
        pairs = torch.cat(
            [hidden[:, None].expand(-1, starts.size(1), -1, -1), starts[:, :, None].expand(-1, -1, T, -1)], dim=3
        )
        inner = self.end_norm(torch.tanh(self.end_inner(pairs)))
        return _log_probabilities(self.end_outer(inner), excluded[:, None])

    def _no_answer(self, hidden: Tensor, start: Tensor, cls_position: Tensor) -> Tensor:
        expected = (start.exp().to(hidden.dtype)[:, None] @ hidden)[:, 0]  # the start state, over all starts
        both = torch.cat([expected, _row_at(hidden, cls_position)], dim=1)
        return self.no_answer_outer(self.dropout(torch.tanh(self.no_answer_inner(both)))).squeeze(1)


def _log_probabilities(logits: Tensor, excluded: Tensor) -> Tensor:
    """(..., T, 1) logits -> (..., T) over the tokens that are not excluded."""
    return logits.squeeze(-1).float().masked_fill(excluded, -1e30).log_softmax(-1)


def _row_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """(B, T, D), (B,) -> (B, D)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), positions]
