"""One layer's attention on random data: to compare backends by, and how far two of them are apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import ScoreTerms

if TYPE_CHECKING:
    from xlpre.model.kernels.backend import Backend


@dataclass(frozen=True)
class Case:
    """Something of a layer, ready to be computed.

    Attributes:
        tensors: what it is made of, by name.
    """

    tensors: dict[str, Tensor]

    def output(self, dropout: float = 0.0) -> Tensor:
        """What it computes."""
        raise NotImplementedError

    def differentiate(self, output: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Gradients of all tensors, from those of the output."""
        return torch.autograd.grad(output, list(self.tensors.values()), weights.to(output.dtype))

    def all(self, weights: Tensor, dropout: float = 0.0) -> dict[str, Tensor]:
        """The output and every gradient, by name; dropout draws the same each time."""
        torch.manual_seed(0)
        output = self.output(dropout)
        return {"out": output.detach(), **dict(zip(self.tensors, self.differentiate(output, weights), strict=True))}


@dataclass(frozen=True)
class AttentionCase(Case):
    """A layer's attention, of what scores are made of, `key` and `value`.

    Attributes:
        backend: that computes it.
        geometry: of its rows, prepared by it.
    """

    backend: Backend
    attn_meta: AttentionMeta

    def output(self, dropout: float = 0.0) -> Tensor:
        """(B, N, H, E)."""
        parts = {name: x for name, x in self.tensors.items() if name not in ("key", "value")}
        scores = ScoreTerms(scale=self.tensors["key"].size(3) ** -0.5, **parts)
        return self.backend.attend(scores, self.tensors["key"], self.tensors["value"], self.attn_meta, dropout)


def attention_case(
    backend: Backend, attn_meta: AttentionMeta, tensors: dict[str, Tensor], dtype: torch.dtype | None = None
) -> AttentionCase:
    """With a backend, in another precision if that is given."""
    cast = clone_leaves(tensors, dtype)
    return AttentionCase(cast, backend, replace(attn_meta, prepared=backend.prepare(attn_meta, cast["key"])))


def clone_leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies that gradients end at, in another precision if that is given."""
    return {key: x.detach().to(dtype or x.dtype).requires_grad_() for key, x in tensors.items()}


def higher_precision(dtype: torch.dtype) -> torch.dtype:
    """In which `reference` is exact beside `dtype`."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over the norm, of each."""
    ratio = {name: (found[name].to(x.dtype) - x).norm() / x.norm() for name, x in expected.items()}
    return {name: float(f"{x.item():.2g}") for name, x in ratio.items()}


def geometry_of(rows: int, window: int, memory: int, targets: int, device: str | torch.device) -> AttentionMeta:
    """Content rows and targets of random factorization orders, one for each half of the window, the first of which is reused."""
    half, keys = window // 2, memory + window
    order = torch.cat([torch.rand(rows, half).argsort(1), half + torch.rand(rows, half).argsort(1)], 1)
    places = torch.rand(rows, window).argsort(1)[:, :targets].sort(1)[0]
    both = torch.cat([torch.arange(window).expand(rows, -1), places], 1)
    ranks = order.gather(1, both)
    seen = torch.cat([torch.full((rows, memory), -1), order], 1)
    segments = (torch.arange(window) > window * 2 // 3).long().expand(rows, -1)
    distances = torch.zeros(2, keys + window, 1)
    direction = torch.arange(rows) % 2
    facts = (
        ranks.int(),
        seen.int(),
        segments.gather(1, both),
        F.pad(segments, (memory, 0)),
        both,
        direction,
        distances,
    )
    of_rows, of_keys, row_segments, key_segments, both, direction, distances = (x.to(device) for x in facts)
    return AttentionMeta(of_rows, of_keys, row_segments, key_segments, both, window, window, None, direction, distances)


def tensors_of(attn_meta: AttentionMeta, heads: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What scores are made of, keys and values, by name."""
    (B, N), device = attn_meta.query_rank.shape, attn_meta.query_rank.device
    of_heads, of_keys = (heads, width), (B, attn_meta.n_keys, heads, width)
    shapes: dict[str, tuple[int, ...]] = {"query": (B, N, *of_heads)}
    shapes |= {"pos_key": (2, attn_meta.n_distances, *of_heads)}
    shapes |= dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), of_heads)
    shapes |= dict.fromkeys(("key", "value"), of_keys)
    return {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, shape in shapes.items()}
