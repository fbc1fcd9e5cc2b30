"""Choice of the next token from logits: repetition penalty, temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xlpre.text import special_tokens

GENERATED_SPECIAL = (special_tokens.EOD, special_tokens.EOP)  # the special tokens that occur in text


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of tokens that occur in the text by `penalty`, and multiply negative ones by it.

    Args:
        logits: (B, V).
        seen: (B, V) bool, tokens that occur in the text of the row.
        penalty: 1 changes nothing; above 1, repetition is less likely.

    Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1; the treatment of negative logits is that of Hugging Face.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all logits (B, V) except the `k` largest of each row to -inf. Logits equal to the k-th are kept, too."""
    smallest = logits.topk(min(k, logits.size(1)), dim=1).values[:, -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set all logits (B, V) except those of the most likely tokens to -inf. Per row, the fewest tokens with a total probability of at least
    `p` are kept.

    Source: Holtzman et al. 2020 (arXiv:1904.09751), section 3.1.
    """
    ordered, index = logits.sort(dim=1, descending=True)
    probabilities = ordered.softmax(1)
    before = probabilities.cumsum(1) - probabilities  # probability of the tokens that are more likely
    before[:, 0] = -1.0  # the most likely token stays
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(before >= p, -torch.inf))


def never_generated(vocab_size: int, device: torch.device) -> Tensor:
    """Return (V,) bool, True for the special tokens that do not occur in text."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    mask[: special_tokens.N_SPECIAL] = True
    mask[list(GENERATED_SPECIAL)] = False
    return mask


class TokenSampler:
    """Chooses the next token of B rows. Each row has a random generator of its own, so its tokens do not depend on the other rows.

    Args:
        prompts: (B, n) token ids of the prompts. Their tokens count as repeated; `<eod>` and `<eop>` never do.
        seeds: seed of each row, a sequence of integers.
        vocab_size: V.
        temperature: the logits are divided by it. 0: always the most likely token.
        top_k: see `keep_top_k`. None: all tokens.
        top_p: see `keep_top_p`. 1: all tokens.
        repetition_penalty: see `penalize_repetition`. 1: none.
    """

    def __init__(
        self,
        prompts: Tensor,
        seeds: Sequence[Sequence[int]],
        vocab_size: int,
        temperature: float,
        top_k: int | None,
        top_p: float,
        repetition_penalty: float,
    ) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._penalty = repetition_penalty
        self._generators = [_generator(seed) for seed in seeds]
        self._never = never_generated(vocab_size, prompts.device)
        self._seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=prompts.device)
        self._mark_seen(prompts)
        self._starts_document = prompts[:, -1:] == special_tokens.EOD

    def next_tokens(self, logits: Tensor) -> Tensor:
        """Return the next token of each row, (B,) int64, from the logits (B, V)."""
        logits = logits.float().masked_fill(self._never, -torch.inf)
        # no document is empty or starts with an empty line
        logits[:, list(GENERATED_SPECIAL)] = logits[:, list(GENERATED_SPECIAL)].masked_fill(
            self._starts_document, -torch.inf
        )
        if self._penalty != 1:
            logits = penalize_repetition(logits, self._seen, self._penalty)
        tokens = logits.argmax(1) if self._temperature == 0 else self._sample(logits)
        self._mark_seen(tokens[:, None])
        self._starts_document = tokens[:, None] == special_tokens.EOD
        return tokens

    def _sample(self, logits: Tensor) -> Tensor:
        # relative to the largest, so that they stay finite after the division by a tiny temperature
        logits = (logits.double() - logits.max(1, keepdim=True).values) / self._temperature
        if self._top_k is not None:
            logits = keep_top_k(logits, self._top_k)
        if self._top_p < 1:
            logits = keep_top_p(logits, self._top_p)
        cumulative = logits.softmax(1).cumsum(1)
        uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=g) for g in self._generators])
        total = cumulative[:, -1:]
        # below the total even after rounding, so that the chosen token has a probability above 0
        threshold = torch.minimum(uniform.to(logits.device) * total, total.nextafter(torch.zeros_like(total)))
        return torch.searchsorted(cumulative, threshold, right=True)[:, 0]

    def _mark_seen(self, tokens: Tensor) -> None:
        self._seen.scatter_(1, tokens, True)
        self._seen[:, : special_tokens.N_SPECIAL] = False


def _generator(seed: Sequence[int]) -> torch.Generator:
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))  # below 2^63
