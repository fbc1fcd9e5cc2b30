"""One layer's attention on random data: what benchmarks of attention compute, and how far two computations are apart."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.geometry import Geometry
from xlpre.model.kernels.backend import Backend, backend_named
from xlpre.model.terms import Scores

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = {"rows": 16, "heads": 16, "width": 64, "window": 512, "memory": 384, "targets": 85}  # XLNet-Large


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Its words: Large's shape on a GPU, one row of it on a processor."""
    on_gpu = torch.cuda.is_available()
    for name, default in LARGE.items():
        parser.add_argument(f"--{name}", type=int, default=default if on_gpu or name != "rows" else 1)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")


@dataclass(frozen=True)
class OneLayer:
    """A layer's attention, ready to be computed.

    Attributes:
        backend: that computes it.
        geometry: of its rows, prepared by it.
        tensors: what scores are made of, `key` and `value`.
    """

    backend: Backend
    geometry: Geometry
    tensors: dict[str, Tensor]

    def output(self, dropout: float = 0.0) -> Tensor:
        """(B, N, H, E)."""
        parts = {name: x for name, x in self.tensors.items() if name not in ("key", "value")}
        scores = Scores(scale=self.tensors["key"].size(3) ** -0.5, **parts)
        return self.backend.attend(scores, self.tensors["key"], self.tensors["value"], self.geometry, dropout)

    def differentiate(self, output: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Gradients of all tensors, from those of the output."""
        return torch.autograd.grad(output, list(self.tensors.values()), weights.to(output.dtype))

    def all(self, weights: Tensor, dropout: float = 0.0) -> dict[str, Tensor]:
        """The output and every gradient, by name; dropout draws the same each time."""
        torch.manual_seed(0)
        output = self.output(dropout)
        return {"out": output.detach(), **dict(zip(self.tensors, self.differentiate(output, weights), strict=True))}

    def kept(self, dropout: float) -> Tensor:
        """What dropout keeps then, (B, H, N, K) bool, True where nothing is seen: with equal scores, and values that tell keys apart."""
        value = self.tensors["value"].detach()
        # with gradients, without which torch may take another kernel
        even = {name: torch.zeros_like(x).requires_grad_() for name, x in self.tensors.items()}
        found, width = [], value.size(3)
        for first in range(0, value.size(1), width):
            one_hot = torch.zeros_like(value)
            for e in range(min(width, value.size(1) - first)):
                one_hot[:, first + e, :, e] = 1
            torch.manual_seed(0)
            parts = replace(self, tensors={**even, "value": one_hot.requires_grad_()})
            found.append(parts.output(dropout).detach().transpose(1, 2) != 0)
        return torch.cat(found, 3)[..., : value.size(1)] | ~self.geometry.visible()[:, None]


def one_layer(name: str, geometry: Geometry, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> OneLayer:
    """With the backend `name`, in another precision if that is given."""
    cast = {key: x.detach().to(dtype or x.dtype).requires_grad_() for key, x in tensors.items()}
    backend = backend_named(name)
    return OneLayer(backend, replace(geometry, prepared=backend.prepare(geometry, cast["key"])), cast)


def exact(geometry: Geometry, tensors: dict[str, Tensor], weights: Tensor, kept: Tensor | None, dropout: float) -> dict:
    """`reference` in twice the precision, where dropout keeps what is `kept`."""
    wide = torch.float64 if tensors["key"].dtype == torch.float32 else torch.float32
    layer = one_layer("reference", geometry, tensors, wide)
    given = F.dropout if kept is None else lambda probability, rate: probability * kept / (1 - rate)
    with patch.object(F, "dropout", given):
        return layer.all(weights, dropout)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference over the norm, of each."""
    ratio = {name: (found[name].to(x.dtype) - x).norm() / x.norm() for name, x in expected.items()}
    return {name: float(f"{x.item():.2g}") for name, x in ratio.items()}


def geometry_of(rows: int, window: int, memory: int, targets: int, device: str) -> Geometry:
    """Content rows and targets of random factorization orders, one for each half of the window, the first of which is reused."""
    half, keys = window // 2, memory + window
    order = torch.cat([torch.rand(rows, half).argsort(1), half + torch.rand(rows, half).argsort(1)], 1)
    places = torch.rand(rows, window).argsort(1)[:, :targets].sort(1)[0]
    both = torch.cat([torch.arange(window).expand(rows, -1), places], 1)
    ranks = order.gather(1, both)
    seen = torch.cat([torch.full((rows, memory), -1), order], 1)
    segments = (torch.arange(window) > window * 2 // 3).long().expand(rows, -1)
    tensors = (ranks.int(), seen.int(), segments.gather(1, both), F.pad(segments, (memory, 0)), both)
    distances = torch.zeros(2, keys + window, 1, device=device)
    direction = torch.arange(rows, device=device) % 2
    return Geometry(*(x.to(device) for x in tensors), window, window, None, direction, distances)


def tensors_of(geometry: Geometry, heads: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What scores are made of, keys and values, by name."""
    (B, N), device = geometry.query_rank.shape, geometry.query_rank.device
    of_heads, of_keys = (heads, width), (B, geometry.n_keys, heads, width)
    shapes: dict[str, tuple[int, ...]] = {"query": (B, N, *of_heads)}
    shapes |= {"place_keys": (2, geometry.distances.size(1), *of_heads)}
    shapes |= dict.fromkeys(("content_bias", "place_bias", "step_bias", "step"), of_heads)
    shapes |= dict.fromkeys(("key", "value"), of_keys)
    return {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, shape in shapes.items()}
