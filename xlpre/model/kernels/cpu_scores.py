"""Scores of attention on processors, part by part, and their gradients by hand.

    s = c.key + p.place_keys + place_offsets + different * t.step        c, p, t: queries with the term's bias, scaled

    dc = ds key              d key = ds^T c
    dp = ds' place_keys      d place_keys = ds'^T p       ds': ds moved back from keys to distances
    dt = d different step    d step = d different^T t     d different: the sum of ds where segments differ

All tensors have heads before rows here, as views: (B, H, N, E).
"""

from __future__ import annotations

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
    """

    def __init__(self, terms: Terms, scale: float, plan: Plan) -> None:
        self.terms, self.scale, self.plan = terms, scale, plan
        self.query, self.key = terms.query.transpose(1, 2), terms.key.transpose(1, 2)
        none = terms.query.new_zeros(terms.query.size(2), 1, terms.query.size(3))  # (H, 1, E)
        self._content_bias, self._place_bias, step_bias = (
            none if bias is None else bias[:, None] * scale
            for bias in (terms.content_bias, terms.place_bias, terms.step_bias)
        )
        if terms.place_keys is not None:
            self.place_keys = terms.place_keys.transpose(1, 2)
        if terms.place_offsets is not None:
            self.place_offsets = terms.place_offsets.transpose(1, 2)[:, :, None] * scale  # (2, H, 1, R)
        if terms.step is not None:
            self.step = terms.step[:, :, None]  # (H, E, 1)
            self.above_content = step_bias - self._content_bias  # t - c
            self._step_of_it = self.above_content @ self.step  # (H, 1, 1)

    def probabilities(self, part: Part) -> Tensor:
        """(h, n, k)."""
        masks, heads = self.plan.masks(part.block), part.rows[1]
        score, content = self._of_places(part, masks.hidden, masks.columns), self.content(part)
        score.baddbmm_(content, self.key[part.keys].transpose(1, 2))
        if self.terms.step is not None:
            score.addcmul_(torch.baddbmm(self._step_of_it[heads], content, self.step[heads]), masks.different)
        torch.softmax(score, -1, out=score)
        return score if part.block.sees is None else score.mul_(part.block.sees)

    def content(self, part: Part) -> Tensor:
        """c, (h, n, E)."""
        return torch.add(self._content_bias[part.rows[1]], self.query[part.rows], alpha=self.scale)

    def place(self, part: Part) -> Tensor:
        """p, (h, n, E)."""
        return torch.add(self._place_bias[part.rows[1]], self.query[part.rows], alpha=self.scale)

    def _of_places(self, part: Part, hidden: Tensor, columns: Tensor) -> Tensor:
        """Position scores, and NEVER where a row does not see a key. (h, n, k)."""
        block, n_heads = part.block, part.rows[1].stop - part.rows[1].start
        if self.terms.place_keys is None:
            return hidden.repeat(n_heads, 1, 1)
        by_distance = torch.bmm(self.place(part), self.place_keys[part.distances].transpose(1, 2))
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
        terms, plan = scorer.terms, scorer.plan
        self._scorer, self._query, self._key = scorer, torch.empty_like(terms.query), torch.empty_like(terms.key)
        self._heads_first = self._query.transpose(1, 2), self._key.transpose(1, 2)
        # of each block, to be summed at the end
        self._content, self._place, self._step = terms.query.new_empty(
            3, len(plan.blocks), *terms.query.shape[2:]
        ).unbind()
        self._steps = terms.query.new_empty(len(plan.blocks), terms.query.size(2), 1)
        if terms.place_keys is not None:
            self._place_keys = torch.zeros_like(scorer.place_keys, memory_format=torch.contiguous_format)
            self._moved: tuple[Tensor, tuple[int, ...]] = terms.query.new_empty(0), ()
        if terms.place_offsets is not None:
            self._place_offsets = torch.zeros_like(scorer.place_offsets)

    def add(self, d_score: Tensor, part: Part) -> None:
        """What the gradient of a part's scores, (h, n, k), gives."""
        scorer, (number, heads), (d_all, d_keys) = self._scorer, (part.block.number, part.rows[1]), self._heads_first
        content = scorer.content(part)
        add_to_keys(d_keys, part, d_score, content)
        d_query = torch.bmm(d_score, scorer.key[part.keys])
        torch.sum(d_query, 1, out=self._content[number, heads])
        if scorer.terms.step is not None:
            d_step = (d_score * scorer.plan.masks(part.block).different).sum(2, keepdim=True)
            torch.sum(d_step, 1, out=self._steps[number, heads])
            torch.bmm(d_step.transpose(1, 2), content, out=self._step[number, heads, None])
            d_query.addcmul_(d_step, scorer.terms.step[heads, None])
        if scorer.terms.place_keys is not None:
            d_query += self._add_places(d_score, part)
        torch.mul(d_query, scorer.scale, out=d_all[part.rows])

    def _add_places(self, d_score: Tensor, part: Part) -> Tensor:
        """The gradient of queries, (h, n, E), as position scores see them."""
        scorer, moved = self._scorer, self._by_distance(d_score, part.block)
        d_query = torch.bmm(moved, scorer.place_keys[part.distances])
        torch.sum(d_query, 1, out=self._place[part.block.number, part.rows[1]])
        self._place_keys[part.distances] += torch.bmm(moved.transpose(1, 2), scorer.place(part))
        if scorer.terms.place_offsets is not None:
            direction, heads, distances = part.distances
            self._place_offsets[direction, heads, :, distances] += moved.sum(1, keepdim=True)
        return d_query

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
        terms, scale = self._scorer.terms, self._scorer.scale
        content = None if terms.content_bias is None else self._content.sum(0) * scale
        place = place_keys = place_offsets = step = step_bias = None
        if terms.place_keys is not None:
            place_keys = self._place_keys.transpose(1, 2)
            place = None if terms.place_bias is None else self._place.sum(0) * scale
        if terms.place_offsets is not None:
            place_offsets = self._place_offsets[:, :, 0].transpose(1, 2) * scale
        if terms.step is not None:
            steps = self._steps.sum(0)  # (H, 1)
            step = self._step.sum(0) + steps * self._scorer.above_content[:, 0]
            step_bias = steps * terms.step * scale
        return Terms(self._query, content, place, place_keys, place_offsets, step_bias, step, self._key)


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
