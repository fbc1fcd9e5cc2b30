"""Operations of one layer on random data, to compare implementations.

The operations are relative attention and the fused operations between matrix products: add-norm and GELU-dropout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import HIDDEN_RANK
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.score_terms import ScoreTerms

NORM_EPS = 1e-12  # value of the published models


@dataclass(frozen=True)
class Case(ABC):
    """One implementation of an operation with its input.

    Attributes:
        tensors: inputs by name.
    """

    tensors: dict[str, Tensor]

    @abstractmethod
    def output(self, dropout: float = 0.0) -> Tensor:
        """Compute the forward pass."""

    def gradients(self, output: Tensor, d_output: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of all tensors from the gradient of the output."""
        return torch.autograd.grad(output, list(self.tensors.values()), d_output.to(output.dtype))

    def run(self, d_output: Tensor, dropout: float = 0.0) -> dict[str, Tensor]:
        """Return the output, `out`, and all gradients by name. Dropout uses the same seed in each call."""
        torch.manual_seed(0)
        output = self.output(dropout)
        return {"out": output.detach(), **dict(zip(self.tensors, self.gradients(output, d_output), strict=True))}


@dataclass(frozen=True)
class AttentionCase(Case):
    """Attention of one layer: score terms, `key` and `value`.

    Attributes:
        backend: backend, prepared for the query rows.
    """

    backend: AttentionBackend

    def output(self, dropout: float = 0.0) -> Tensor:
        """Compute (B, N, H, E)."""
        terms = {name: x for name, x in self.tensors.items() if name not in ("key", "value")}
        key, value = self.tensors["key"], self.tensors["value"]
        return self.backend.attend(ScoreTerms(scale=key.size(3) ** -0.5, **terms), key, value, dropout)


@dataclass(frozen=True)
class FusedCase(Case):
    """One of the FUSED_OPS.

    Attributes:
        function: implementation. It takes the tensors in order, then the dropout probability.
    """

    function: Callable[..., Tensor]

    def output(self, dropout: float = 0.0) -> Tensor:
        """Compute (N, width)."""
        return self.function(*self.tensors.values(), dropout)


def attention_case(
    backend: type[AttentionBackend],
    attn_meta: AttentionMeta,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> AttentionCase:
    """Build a case for a backend, with copies of the tensors in `dtype` (default: their own)."""
    copies = clone_leaves(tensors, dtype)
    return AttentionCase(copies, backend.prepare(attn_meta, copies["key"].dtype))


def random_attention_meta(
    rows: int, window: int, memory: int, targets: int, device: str | torch.device
) -> AttentionMeta:
    """Draw the metadata of both streams of a window.

    Each half of the window has a random factorization order. The first half is the part that enters memory.

    Args:
        rows: B.
        window: T.
        memory: M.
        targets: P.
        device: device of the tensors.
    """
    half, n_keys = window // 2, memory + window
    order = torch.cat([torch.rand(rows, half).argsort(1), half + torch.rand(rows, half).argsort(1)], 1)
    target_positions = torch.rand(rows, window).argsort(1)[:, :targets].sort(1)[0]
    positions = torch.cat([torch.arange(window).expand(rows, -1), target_positions], 1)
    query_rank = order.gather(1, positions)
    key_rank = torch.cat([torch.full((rows, memory), -1), order], 1)
    segments = (torch.arange(window) > window * 2 // 3).long().expand(rows, -1)
    return AttentionMeta(
        query_rank=query_rank.int().to(device),
        key_rank=key_rank.int().to(device),
        row_segments=segments.gather(1, positions).to(device),
        key_segments=F.pad(segments, (memory, 0)).to(device),
        positions=positions.to(device),
        n_content=window,
        n_self_visible=window,
        max_distance=None,
        direction=(torch.arange(rows) % 2).to(device),
        pos_encoding=torch.zeros(2, n_keys + window, 1).to(device),
    )


def random_attention_tensors(
    attn_meta: AttentionMeta, n_head: int, head_width: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Draw score terms, keys and values from a standard normal distribution."""
    (B, N), H, E = attn_meta.query_rank.shape, n_head, head_width
    shapes: dict[str, tuple[int, ...]] = {"query": (B, N, H, E), "pos_key": (2, attn_meta.n_distances, H, E)}
    shapes |= dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), (H, E))
    shapes |= dict.fromkeys(("key", "value"), (B, attn_meta.n_keys, H, E))
    return _random_leaves(shapes, dtype, attn_meta.query_rank.device)


def unusual_attention_inputs(
    tile: int, n_head: int, head_width: int, dtype: torch.dtype, device: str | torch.device
) -> dict[str, tuple[AttentionMeta, dict[str, Tensor]]]:
    """Draw small inputs for features of attention that the published models do not use in pretraining.

    Args:
        tile: TILE_MULTIPLE of the kernels. The window is 1.5 times as long.
        n_head: H.
        head_width: E.
        dtype: dtype of the tensors.
        device: device of the tensors.

    Returns:
        Metadata and tensors by name of the feature.
    """
    window, memory, targets = 3 * tile // 2, tile // 2, 5
    usual = random_attention_meta(2, window, memory, targets, device)
    padded, blind = usual.key_rank.clone(), usual.query_rank.clone()
    padded[1, -window // 3 :] = HIDDEN_RANK
    blind[:, ::7] = torch.iinfo(torch.int32).min
    metas = {
        "no memory": random_attention_meta(2, window, 0, targets, device),
        "padded keys": replace(usual, key_rank=padded),
        "limited distance": replace(usual, max_distance=tile // 3),
        "position offsets": usual,
        "rows that see no key": replace(usual, query_rank=blind, n_self_visible=0),
    }
    inputs = {name: (meta, random_attention_tensors(meta, n_head, head_width, dtype)) for name, meta in metas.items()}
    offsets: dict[str, tuple[int, ...]] = {"pos_offset": (2, usual.n_distances, n_head)}
    inputs["position offsets"][1].update(_random_leaves(offsets, dtype, device))
    return inputs


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Compute norm(x + dropout(branch)) by torch's operators."""
    return F.layer_norm(x + F.dropout(branch, dropout), weight.shape, weight, bias, NORM_EPS)


def gelu_dropout(x: Tensor, dropout: float) -> Tensor:
    """Compute dropout(gelu(x)) by torch's operators."""
    return F.dropout(F.gelu(x, approximate="tanh"), dropout)


FUSED_OPS: dict[str, Callable[..., Tensor]] = {"add_norm": add_norm, "gelu_dropout": gelu_dropout}


def fused_kernel(op: str) -> Callable[..., Tensor]:
    """Return the fused Triton kernel of one of the FUSED_OPS, with the same arguments."""
    from xlpre.model.kernels.triton import fused_ops

    def add_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
        return fused_ops.add_norm(x, branch, weight, bias, NORM_EPS, dropout)

    kernels: dict[str, Callable[..., Tensor]] = {"add_norm": add_norm, "gelu_dropout": fused_ops.gelu_dropout}
    return kernels[op]


def exact_fused_case(op: str, tensors: dict[str, Tensor]) -> FusedCase:
    """Build the case of an operation by torch's operators, in twice the precision of `tensors`."""
    (dtype,) = {x.dtype for x in tensors.values()}
    return FusedCase(clone_leaves(tensors, higher_precision(dtype)), FUSED_OPS[op])


def random_fused_tensors(
    op: str, n_rows: int, width: int, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """Draw the input of one of the FUSED_OPS: `n_rows` rows of `width`, or of 4 x `width` for GELU-dropout."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "add_norm": {"x": (n_rows, width), "branch": (n_rows, width), "weight": (width,), "bias": (width,)},
        "gelu_dropout": {"x": (n_rows, 4 * width)},
    }
    return _random_leaves(shapes[op], dtype, device)


def clone_leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copy tensors as leaves that require a gradient, in `dtype` (default: their own)."""
    return {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}


def higher_precision(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a reference for `dtype` is computed."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def relative_error(result: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return, for each tensor, the norm of the difference divided by the norm of `expected`, rounded to two digits."""
    error = {name: (result[name].to(x.dtype) - x).norm() / x.norm() for name, x in expected.items()}
    return {name: float(f"{x.item():.2g}") for name, x in error.items()}


def _random_leaves(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    return {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, shape in shapes.items()}
