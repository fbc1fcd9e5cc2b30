"""Command-line arguments for the shape of one layer's attention; and its results in higher precision, with a given dropout mask."""

from __future__ import annotations

import argparse
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.kernels.selfcheck.fixtures import AttentionCase, attention_case, higher_precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = {"rows": 16, "heads": 16, "width": 64, "window": 512, "memory": 384, "targets": 85}  # XLNet-Large


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. The defaults are those of XLNet-Large: a batch of 16 rows on a GPU, one row on a CPU."""
    on_gpu = torch.cuda.is_available()
    for name, default in LARGE.items():
        parser.add_argument(f"--{name}", type=int, default=default if on_gpu or name != "rows" else 1)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")


def keep_mask(case: AttentionCase, dropout: float) -> Tensor:
    """Return a mask (B, H, N, K) bool of the attention weights that a backend's dropout keeps. Keys that are not visible count as kept.

    The mask is read from outputs. All scores are zero, so all visible keys have the same weight, and the values of the keys are one-hot,
    so an output element is not zero if its key was kept. One pass covers as many keys as the head is wide.
    """
    value = case.tensors["value"].detach()
    B, K, H, E = value.shape
    # inputs require gradients, because torch may choose another kernel for inputs that do not
    zeros = {name: torch.zeros_like(x).requires_grad_() for name, x in case.tensors.items()}
    parts = []
    for start in range(0, K, E):
        one_hot = torch.zeros_like(value)
        for e in range(min(E, K - start)):
            one_hot[:, start + e, :, e] = 1
        torch.manual_seed(0)
        output = replace(case, tensors={**zeros, "value": one_hot.requires_grad_()}).output(dropout)
        parts.append(output.detach().transpose(1, 2) != 0)
    return torch.cat(parts, 3)[..., :K] | ~case.backend.attn_meta.visible()[:, None]


def exact_results(
    case: AttentionCase, d_output: Tensor, keep: Tensor | None = None, dropout: float = 0.0
) -> dict[str, Tensor]:
    """Compute output and gradients with the reference backend in the next higher precision. Dropout keeps the weights in `keep`."""
    dtype = higher_precision(case.tensors["key"].dtype)
    exact = attention_case(ReferenceBackend, case.backend.attn_meta, case.tensors, dtype)
    apply_mask = F.dropout if keep is None else lambda probability, rate: probability * keep / (1 - rate)
    with patch.object(F, "dropout", apply_mask):
        return exact.run(d_output, dropout)
