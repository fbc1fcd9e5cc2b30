"""Scores of attention on processors, part by part, and their gradients by hand.

    s = c.key + p.place_keys + place_offsets + different * t.step        c, p, t: queries with the term's bias, scaled

    dc = ds key              d key = ds^T c
    dp = ds' place_keys      d place_keys = ds'^T p       ds': ds moved back from keys to distances
    dt = d different step    d step = d different^T t     d different: the sum of ds where segments differ

All tensors have heads before rows here, as views: (B, H, N, E).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from xlpre.model.kernels.cpu_parts import Block, Part, Plan


class Terms(NamedTuple):
    """Keys (B, K, H, E) and what else scores are made of: see xlpre.model.terms.Scores."""

    query: Tensor
    content_bias: Tensor | None
    place_bias: Tensor | None
    place_keys: Tensor | None
    place_offsets: Tensor | None
    step_bias: Tensor | None
    step: Tensor | None
    key: Tensor


class Scorer:
    """Probabilities of parts.

    Args:
        terms: what scores are made of.
        scale: 1/sqrt(E).
        plan: of the parts.

    Attributes:
        content: c, (B, H, N, E).
        place: p, likewise.
    """

    def __init__(self, terms: Terms, scale: float, plan: Plan) -> None:
        self.terms, self.scale, self.plan = terms, scale, plan
        self.key, self.content = terms.key.transpose(1, 2), self.with_bias(terms.content_bias)
        if terms.place_keys is not None:
            self.place_keys, self.place = terms.place_keys.transpose(1, 2), self.with_bias(terms.place_bias)
        if terms.place_offsets is not None:
            self.place_offsets = terms.place_offsets.transpose(1, 2)[:, :, None] * scale  # (2, H, 1, R)

    @cached_property
    def of_step(self) -> Tensor:
        """t.step, (B, H, N, 1), which the backward pass does not need where probabilities were kept."""
        return torch.einsum("bhne,he->bhn", self.with_bias(self.terms.step_bias), self.terms.step)[..., None]

    def probabilities(self, part: Part) -> Tensor:
        """(h, n, k)."""
        masks = self.plan.masks(part.block)
        score = self._of_places(part, masks.hidden, masks.columns)
        score.baddbmm_(self.content[part.rows], self.key[part.keys].transpose(1, 2))
        if self.terms.step is not None:
            score.addcmul_(self.of_step[part.rows], masks.different)
        torch.softmax(score, -1, out=score)
        return score if part.block.sees is None else score.mul_(part.block.sees)

    def with_bias(self, bias: Tensor | None) -> Tensor:
        """Queries with a term's bias (H, E), scaled: (B, H, N, E)."""
        query, scale = self.terms.query, self.scale
        return (query * scale if bias is None else torch.add(bias * scale, query, alpha=scale)).transpose(1, 2)

    def _of_places(self, part: Part, hidden: Tensor, columns: Tensor) -> Tensor:
        """Position scores, and NEVER where a row does not see a key. (h, n, k)."""
        block, n_heads = part.block, part.rows[1].stop - part.rows[1].start
        if self.terms.place_keys is None:
            return hidden.repeat(n_heads, 1, 1)
        by_distance = torch.bmm(self.place[part.rows], self.place_keys[part.distances].transpose(1, 2))
        if self.terms.place_offsets is not None:
            direction, heads, distances = part.distances
            by_distance += self.place_offsets[direction, heads, :, distances]
        score = hidden.new_empty(n_heads, *hidden.shape)
        ordered = block.n_in_order
        torch.add(self.plan.aligned(by_distance, block), hidden[:ordered], out=score[:, :ordered])
        if ordered < len(hidden):
            others = score[:, ordered:]
            torch.gather(by_distance[:, ordered:], 2, columns.expand(n_heads, -1, -1), out=others)
            others += hidden[ordered:]
        return score


class Gradients:
    """Of all terms, from those of scores, part by part.

    Args:
        scorer: of the scores.
    """

    def __init__(self, scorer: Scorer) -> None:
        terms, new, shape = scorer.terms, scorer.key.new_empty, scorer.content.shape
        self._scorer, self._key, self._content = scorer, torch.empty_like(terms.key), new(shape)
        if terms.step is not None:
            self._of_step = new(*shape[:3], 1)
        if terms.place_keys is not None:
            self._place, self._place_keys = new(shape), new(scorer.place_keys.shape).zero_()
            self._moved: tuple[Tensor, tuple[int, ...]] = new(0), ()
        if terms.place_offsets is not None:
            self._place_offsets = torch.zeros_like(scorer.place_offsets)

    def add(self, d_score: Tensor, part: Part) -> None:
        """What the gradient of a part's scores, (h, n, k), gives."""
        scorer = self._scorer
        torch.bmm(d_score, scorer.key[part.keys], out=self._content[part.rows])
        add_to_keys(self._key.transpose(1, 2), part, d_score, scorer.content[part.rows])
        if scorer.terms.step is not None:
            torch.sum(d_score * scorer.plan.masks(part.block).different, 2, keepdim=True, out=self._of_step[part.rows])
        if scorer.terms.place_keys is not None:
            self._add_places(d_score, part)

    def _add_places(self, d_score: Tensor, part: Part) -> None:
        scorer, moved = self._scorer, self._by_distance(d_score, part.block)
        torch.bmm(moved, scorer.place_keys[part.distances], out=self._place[part.rows])
        self._place_keys[part.distances].baddbmm_(moved.transpose(1, 2), scorer.place[part.rows])
        if scorer.terms.place_offsets is not None:
            direction, heads, distances = part.distances
            self._place_offsets[direction, heads, :, distances] += moved.sum(1, keepdim=True)

    def _by_distance(self, d_score: Tensor, block: Block) -> Tensor:
        """(h, n, W), zero where there is no key."""
        plan, (moved, layout) = self._scorer.plan, self._moved
        width = block.distances.stop - block.distances.start
        wanted = (*d_score.shape, block.n_in_order, width)
        if layout != wanted:  # else the same places are written again, and the rest is zero already
            moved = d_score.new_zeros(*d_score.shape[:2], width)
            self._moved = moved, wanted
        ordered = block.n_in_order
        plan.aligned(moved, block).copy_(d_score[:, :ordered])
        if ordered < d_score.size(1):
            columns = plan.masks(block).columns.expand(d_score.size(0), -1, -1)
            moved[:, ordered:].zero_().scatter_(2, columns, d_score[:, ordered:])
        return moved

    def of_terms(self) -> Terms:
        """None for a term that there is not."""
        scorer, terms, d_query = self._scorer, self._scorer.terms, torch.empty_like(self._scorer.terms.query)
        content = place = place_keys = place_offsets = step = step_bias = None
        if terms.content_bias is not None:
            content = self._content.sum((0, 2)).mul_(scorer.scale)
        if terms.place_keys is not None:
            place_keys = self._place_keys.transpose(1, 2)
            place = None if terms.place_bias is None else self._place.sum((0, 2)).mul_(scorer.scale)
            self._content += self._place
        if terms.place_offsets is not None:
            place_offsets = self._place_offsets[:, :, 0].transpose(1, 2) * scorer.scale
        if terms.step is not None:
            step = torch.einsum("bhnx,bhne->he", self._of_step, scorer.with_bias(terms.step_bias))
            step_bias = self._of_step.sum((0, 2)) * terms.step * scorer.scale
            self._content.addcmul_(self._of_step, terms.step[:, None])
        torch.mul(self._content, scorer.scale, out=d_query.transpose(1, 2))
        return Terms(d_query, content, place, place_keys, place_offsets, step_bias, step, self._key)


def add_to_keys(gradient: Tensor, part: Part, of_rows: Tensor, rows: Tensor) -> None:
    """Add what a part gives to the gradient of keys (B, H, K, E), which its window's first part finds unwritten.

    Args:
        gradient: of all keys, a view.
        part: which.
        of_rows: (h, n, k) by row and key.
        rows: (h, n, E).
    """
    found, mine = torch.bmm(of_rows.transpose(1, 2), rows), gradient[part.keys]
    if part.block.first:
        mine += found
    else:
        mine.copy_(found)
        gradient[part.block.row, part.rows[1], part.block.n_keys :] = 0
