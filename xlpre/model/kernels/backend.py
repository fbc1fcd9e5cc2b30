"""What computes attention, by name: `model.attention_backend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.cpu.attention import Cpu
from xlpre.model.kernels.cpu.build import serves
from xlpre.model.kernels.reference import Reference
from xlpre.model.kernels.sdpa import Sdpa
from xlpre.model.kernels.selfcheck.selfcheck import passes_selfcheck
from xlpre.model.kernels.triton.tiles import computes
from xlpre.model.score_terms import ScoreTerms

if TYPE_CHECKING:
    from xlpre.model.config import ModelConfig


class Backend(Protocol):
    """One way to compute attention."""

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> Any:
        """What it makes of a geometry, once a step; handed back as `attn_meta.prepared`. Keys are like `like`, (..., E)."""

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """The mean of the values that each row sees, weighed by the softmax of its scores.

        Args:
            scores: what scores are made of.
            key: (B, K, H, E), in any order in memory.
            value: (B, K, H, E).
            geometry: of the rows.
            dropout: share of probabilities that are set to 0; the others grow by as much.

        Returns:
            (B, N, H, E); zero for a row that sees nothing.
        """


class Auto:
    """The fastest for where the tensors are, and of which type."""

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> tuple[Backend, AttentionMeta]:
        """The backend, and the geometry with what that makes of it."""
        backend = fastest(like.device, like.dtype, like.size(-1))
        return backend, replace(attn_meta, prepared=backend.prepare(attn_meta, like))

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        backend, attn_meta = attn_meta.prepared
        return backend.attend(scores, key, value, attn_meta, dropout)


def fastest(device: torch.device, dtype: torch.dtype, width: int) -> Backend:
    """What `auto` takes for heads of `width`. On a GPU triton, if that was tried there and found right and fast."""
    if device.type == "cpu":
        return Cpu() if serves(device, dtype) else Sdpa()
    return with_triton() if passes_selfcheck(device, dtype, width) else Sdpa()


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """What `auto` comes to on a GPU, so that one process can tell the others and none finds otherwise; any other `name` as it is."""
    if name != "auto" or device.type == "cpu":
        return name
    return "triton" if passes_selfcheck(device, dtype, width) else "sdpa"


def use_triton(config: ModelConfig, x: Tensor) -> bool:
    """Whether `model.attention_backend` has GPU kernels compute on `x`, attention and what stands between products."""
    name = resolve_backend(config.attention_backend, x.device, x.dtype, config.head_width)
    return name == "triton" and computes(config.head_width, x.dtype)


def with_triton() -> Backend:
    """Attention by kernels/triton.py, imported here because triton comes with torch's builds for GPUs only."""
    if find_spec("triton") is None:
        raise ValueError(
            "model.attention_backend=triton needs the package triton, which torch's builds for GPUs bring along; set model.attention_backend=auto"
        )
    from xlpre.model.kernels.triton.attention import Triton

    return Triton()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "auto": Auto,
    "reference": Reference,
    "sdpa": Sdpa,
    "cpu": Cpu,
    "triton": with_triton,
}


def backend_named(name: str) -> Backend:
    """By `model.attention_backend`."""
    return BACKENDS[name]()
