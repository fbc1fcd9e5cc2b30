"""Attention on processors, in fp32: a few heads of a block of rows at a time, with a backward pass by hand.

So few scores stay in the cache from product to softmax to product. Everything is read and written where it stands, (B, N, H, E), without
copies for products of heads. A block has only the keys that any of its rows sees: the reused part of a window never sees the rest.

With scores s (kernels/cpu_scores.py), probabilities P = softmax(s), P' after dropout, output o = P' value:

    d value = P'^T do        dP' = do value^T        ds = P' * dP' - P * do.o

because the sum of P' * dP' over a row's keys is do.o. Probabilities are kept for the backward pass, those that dropout took with their
sign changed; where a layer has more than KEPT of them they are computed again, so that memory grows with the window, not its square.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlpre.model.dropout import random_bits, threshold
from xlpre.model.geometry import Geometry
from xlpre.model.kernels import cpu_parts
from xlpre.model.kernels.cpu_parts import Plan
from xlpre.model.kernels.cpu_scores import Gradients, Scorer, Terms, add_to_keys
from xlpre.model.terms import Scores


class Cpu:
    """See the module."""

    def prepare(self, geometry: Geometry, like: Tensor) -> Plan:
        """In which parts."""
        return Plan(geometry, like.dtype)

    def attend(self, scores: Scores, key: Tensor, value: Tensor, geometry: Geometry, dropout: float) -> Tensor:
        """See Backend."""
        place = (scores.place_bias, scores.place_keys, scores.place_offsets)
        terms = (scores.query, scores.content_bias, *place, scores.step_bias, scores.step, key)
        return _Attention.apply(scores.scale, geometry, dropout, value, *terms)


class _Attention(torch.autograd.Function):
    """Part by part."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, geometry: Geometry, dropout: float, value: Tensor, *given: Tensor | None
    ) -> Tensor:
        terms = Terms(*given)  # type: ignore[arg-type]  # query and key are there
        keep = terms.query.shape[:3].numel() * geometry.n_keys <= cpu_parts.KEPT
        noise = Noise(int(torch.randint(2**62, ())) if dropout else 0, dropout)
        scorer, out, kept = Scorer(terms, scale, geometry.prepared), torch.empty_like(terms.query), []
        values, means = value.transpose(1, 2), out.transpose(1, 2)
        for part in geometry.prepared.parts(terms.query.size(2)):
            signed = noise.signed(scorer.probabilities(part))
            torch.bmm(noise.used(signed), values[part.keys], out=means[part.rows])
            if keep:
                kept.append(signed)
        ctx.save_for_backward(value, noise.grown(out, out=out), *given, *kept)
        ctx.scale, ctx.plan, ctx.noise = scale, geometry.prepared, (noise.seed, dropout)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, out, *saved = ctx.saved_tensors
        terms, kept = Terms(*saved[: len(Terms._fields)]), iter(saved[len(Terms._fields) :])
        noise, scorer = Noise(*ctx.noise), Scorer(terms, ctx.scale, ctx.plan)
        gradients, d_value = Gradients(scorer), torch.empty_like(value)
        total = (grad * out).sum(-1, keepdim=True).transpose(1, 2)  # (B, H, N, 1)
        values, d_values, grad = value.transpose(1, 2), d_value.transpose(1, 2), noise.grown(grad).transpose(1, 2)
        for part in ctx.plan.parts(terms.query.size(2)):
            signed = next(kept, None)
            if signed is None:
                signed = noise.signed(scorer.probabilities(part))
            mine, used = grad[part.rows], noise.used(signed)
            add_to_keys(d_values, part, used, mine)
            d_score = torch.bmm(mine, values[part.keys].transpose(1, 2))
            gradients.add(noise.d_score(d_score, signed, used, total[part.rows]), part)
        return None, None, None, d_value, *gradients.of_terms()


class Noise:
    """Dropout of probabilities: the same for the same seed, part after part. What it takes has its sign changed, also a zero's."""

    def __init__(self, seed: int, dropout: float) -> None:
        self.seed, self._dropout = seed, dropout
        self._generator = torch.Generator().manual_seed(seed)

    def signed(self, probability: Tensor) -> Tensor:
        """(h, n, k) with signs changed, in place."""
        if not self._dropout:
            return probability
        bits = random_bits(probability.numel(), self._generator).to(probability.dtype)
        return probability.copysign_(bits.sub_(threshold(self._dropout)).view_as(probability))

    def used(self, signed: Tensor) -> Tensor:
        """What is left, not yet grown."""
        return signed.relu() if self._dropout else signed

    def grown(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """What comes of it, (B, N, H, E), by as much larger as dropout took."""
        return torch.mul(x, 1 / (1 - self._dropout), out=out) if self._dropout else x

    def d_score(self, d_used: Tensor, signed: Tensor, used: Tensor, total: Tensor) -> Tensor:
        """The gradient of scores, in place of that of what was used."""
        if not self._dropout:
            return d_used.sub_(total).mul_(signed)
        return d_used.mul_(used).sub_(signed.abs().mul_(total))
