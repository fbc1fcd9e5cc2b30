"""What benchmarks of one layer's attention share: the words for its shape, and what is exact."""

from __future__ import annotations

import argparse
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.backend import backend_named
from xlpre.model.kernels.selfcheck.fixtures import AttentionCase, attention_case, higher_precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = {"rows": 16, "heads": 16, "width": 64, "window": 512, "memory": 384, "targets": 85}  # XLNet-Large


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Its words: Large's shape on a GPU, one row of it on a processor."""
    on_gpu = torch.cuda.is_available()
    for name, default in LARGE.items():
        parser.add_argument(f"--{name}", type=int, default=default if on_gpu or name != "rows" else 1)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")


def kept_by(layer: AttentionCase, dropout: float) -> Tensor:
    """What dropout keeps of a layer, (B, H, N, K) bool, True where nothing is seen: with equal scores, and values that tell keys apart."""
    value = layer.tensors["value"].detach()
    # with gradients, without which torch may take another kernel
    even = {name: torch.zeros_like(x).requires_grad_() for name, x in layer.tensors.items()}
    found, width = [], value.size(3)
    for first in range(0, value.size(1), width):
        one_hot = torch.zeros_like(value)
        for e in range(min(width, value.size(1) - first)):
            one_hot[:, first + e, :, e] = 1
        torch.manual_seed(0)
        parts = replace(layer, tensors={**even, "value": one_hot.requires_grad_()})
        found.append(parts.output(dropout).detach().transpose(1, 2) != 0)
    return torch.cat(found, 3)[..., : value.size(1)] | ~layer.attn_meta.visible()[:, None]


def exact(
    attn_meta: AttentionMeta, tensors: dict[str, Tensor], weights: Tensor, kept: Tensor | None, dropout: float
) -> dict:
    """`reference` in twice the precision, where dropout keeps what is `kept`."""
    layer = attention_case(backend_named("reference"), attn_meta, tensors, higher_precision(tensors["key"].dtype))
    given = F.dropout if kept is None else lambda probability, rate: probability * kept / (1 - rate)
    with patch.object(F, "dropout", given):
        return layer.all(weights, dropout)
