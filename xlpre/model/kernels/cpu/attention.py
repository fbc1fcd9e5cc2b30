"""Attention on CPUs in fp32, fp64 and bf16, with a hand-written backward pass (kernels.cpp).

The kernels compute one block of query rows of one head at a time. Let c, p and t be the query plus the bias of the content, position and
segment term, scaled, and let u be the score that is added for keys of other segments:

    s = c.key + p.pos_key + pos_offset + differ * u        u = t.segment_diff        differ: 1 for keys of other segments, else 0
    P = softmax(s)        P' = dropout(P)        o = P' value

The backward pass starts from do, the gradient of o:

    d value = P'^T do        dP' = do value^T        ds = P' * dP' - P * delta

delta: sum of P' * dP' over the keys of a row. Then:

    dc = ds key              d key = ds^T c
    dp = ds' pos_key         d pos_key = ds'^T p                  ds': ds reordered from keys to distances
    dt = du segment_diff     d segment_diff = du t                du: sum of ds over keys of other segments

The distance of row t and key j has index T - t + j (Transformer-XL, appendix B). So the scores of a row for all keys are a contiguous slice
of its scores for all distances, and no gather is needed.

To save work, a block covers only the keys from the first to the last that any of its rows sees, and their distances. For example, the
reused part of a window never sees the rest of the window, and no row sees empty memory.

Probabilities are saved for the backward pass. A layer with more than MAX_SAVED_PROBS probabilities recomputes them instead, so that
memory grows linearly with the window. Dropout uses counter-based random numbers, which the backward pass generates again.

In bf16, inputs, output and gradients are in bf16; everything else, such as probabilities and sums, is in fp32. If processor
and compiler have the instructions (AVX512-BF16, and AMX if available), the factors of matrix products are rounded to bf16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlpre.common.errors import InputError
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.dropout import drop_threshold, new_seed
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.cpu.build import DTYPES, load_library
from xlpre.model.score_terms import ScoreTerms

# Minimum and maximum number of query rows in a block. Between these limits, a block has K / 14 rows. With few rows, matrix products are
# slow. With many rows, a block computes scores for many distances that it does not use. Rows in arbitrary order span more distances, so
# their blocks have half as many rows.
BLOCK_ROWS = 32, 128
MAX_BLOCK_SCORES = 1 << 20  # 4 MB in fp32
MAX_SAVED_PROBS = 1 << 24  # limit for all heads and batch rows of a layer; 64 MB in fp32

# Fields of the C++ struct AttentionArgs, in order.
SIZES = ("B", "N", "K", "H", "E", "R", "n_tokens", "n_self_visible", "max_distance", "n_blocks", "block_rows")
INTEGERS = (*SIZES, "n_threads", "seed", "drop_threshold")
DOUBLES = ("scale", "dropout_scale")
META = ("query_rank", "key_rank", "row_segments", "key_segments", "positions", "direction")
BLOCKS = ("block_start", "first_key", "n_keys", "first_distance", "n_distances")
TERMS = ("query", "r_w_bias", "r_r_bias", "pos_key", "pos_offset", "r_s_bias", "segment_diff", "key", "value")
OUTPUTS = ("out", "probs", "lse")
GRADIENTS = ("d_out", *(f"d_{name}" for name in TERMS))


class AttentionArgs(ctypes.Structure):
    """Arguments of the kernels: the struct of the same name in kernels.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in DOUBLES),
        *((name, ctypes.c_void_p) for name in (*META, *BLOCKS, *TERMS, *OUTPUTS, *GRADIENTS)),
    ]


class BlockSchedule(NamedTuple):
    """Division of the query rows of a forward pass into blocks, with the attention metadata that the kernels read.

    Attributes:
        sizes: integer arguments of the kernels, keyed by the names in SIZES. `block_rows` is the number of rows in the largest block.
            `max_distance` is -1 if there is no limit.
        tensors: int32 arguments of the kernels, keyed by the names in META and BLOCKS. META are the fields of AttentionMeta.
            `block_start`, (n_blocks + 1,): first query row of each block; the last element is N, the number of query rows.
            `first_key` and `n_keys`, (B, n_blocks): range of keys of each block.
            `first_distance` and `n_distances`, (B, n_blocks): range of distances of each block.
    """

    sizes: dict[str, int]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class CpuBackend(AttentionBackend):
    """Attention by the compiled CPU kernels.

    Attributes:
        schedule: blocks of query rows.
    """

    schedule: BlockSchedule

    @classmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> CpuBackend:
        """Divide the query rows into blocks, see AttentionBackend."""
        device = attn_meta.query_rank.device.type
        if dtype not in DTYPES or device != "cpu":
            raise InputError(
                f"model.attention_backend=cpu is invalid for {dtype} on {device}: it needs a CPU and fp32, fp64 or bf16. "
                "Set model.attention_backend=auto."
            )
        return cls(attn_meta, schedule_blocks(attn_meta))

    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute attention, see AttentionBackend."""
        tensors = {**vars(terms), "key": key, "value": value}
        # in forward(), gradients are always disabled, and parameters count as inputs that need a gradient
        settings = self.schedule, terms.scale, dropout, torch.is_grad_enabled()
        return _Attention.apply(*settings, *(tensors[name] for name in TERMS))


def schedule_blocks(attn_meta: AttentionMeta) -> BlockSchedule:
    """Divide the query rows of a forward pass into blocks."""
    (B, N), K, T = attn_meta.query_rank.shape, attn_meta.n_keys, attn_meta.n_tokens
    rows, fewer_rows = (
        max(1, min(max(BLOCK_ROWS[0], n), BLOCK_ROWS[1], MAX_BLOCK_SCORES // K)) for n in (K // 14, K // 28)
    )
    starts = [*range(0, attn_meta.n_content, rows), *range(attn_meta.n_content, N, fewer_rows), N]
    n_blocks = len(starts) - 1
    tensors = {name: getattr(attn_meta, name).int().contiguous() for name in META}
    # the kernels compute addresses from these shapes
    assert [x.shape for x in tensors.values()] == [(B, N), (B, K), (B, N), (B, K), (B, N), (B,)]
    tensors["block_start"] = torch.tensor(starts, dtype=torch.int32)
    tensors |= zip(BLOCKS[1:], torch.empty(4, B, n_blocks, dtype=torch.int32), strict=True)
    sizes = {"B": B, "N": N, "K": K, "R": K + T, "n_tokens": T, "n_self_visible": attn_meta.n_self_visible}
    sizes["max_distance"] = -1 if attn_meta.max_distance is None else min(attn_meta.max_distance, K)
    sizes |= {"n_blocks": n_blocks, "block_rows": min(rows, N)}
    schedule = BlockSchedule(sizes, tensors)
    load_library().call("schedule_blocks", torch.float32, _attention_args(schedule, {}))
    return schedule


class _Attention(torch.autograd.Function):
    """Attention of all score terms, computed by kernels.cpp."""

    @staticmethod
    def forward(
        ctx: Any, schedule: BlockSchedule, scale: float, dropout: float, grad_enabled: bool, *terms: Tensor | None
    ) -> Tensor:
        inputs = {name: x.contiguous() for name, x in zip(TERMS, terms, strict=True) if x is not None}
        if "pos_offset" in inputs:
            inputs["pos_offset"] = inputs["pos_offset"].transpose(1, 2).contiguous()  # (2, H, R)
        query, K = inputs["query"], schedule.sizes["K"]
        B, N, H, E = query.shape
        _check_shapes(schedule, inputs)
        outputs = {"out": torch.empty_like(query)}
        if grad_enabled and any(ctx.needs_input_grad):
            shape = {"probs": (B, H, N, K)} if B * H * N * K <= MAX_SAVED_PROBS else {"lse": (B, H, N)}
            outputs |= {name: query.new_empty(size, dtype=_compute_dtype(query)) for name, size in shape.items()}
        scalars = {"H": H, "E": E, "scale": scale, "dropout_scale": 1 / (1 - dropout)}
        scalars |= {"drop_threshold": drop_threshold(dropout), "seed": new_seed() if dropout else 0}
        args = _attention_args(schedule, {**inputs, **outputs}, **scalars)
        load_library().call("attention_forward", query.dtype, args)
        output = outputs.pop("out")
        ctx.schedule, ctx.scalars, ctx.names = schedule, scalars, [*inputs, *outputs]
        ctx.save_for_backward(*inputs.values(), *outputs.values())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        tensors = {**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), "d_out": d_out.contiguous()}
        (B, _, H, E), R = d_out.shape, ctx.schedule.sizes["R"]
        # the kernels compute these gradients per batch row; they are summed below, in a fixed order
        per_row: dict[str, tuple[int, ...]] = {"pos_key": (B, R, H, E), "pos_offset": (B, H, R)}
        per_row |= dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), (B, H, E))
        dtype = _compute_dtype(d_out)
        gradients = {
            f"d_{name}": d_out.new_zeros(per_row[name], dtype=dtype)
            if name in per_row
            else torch.empty_like(tensors[name])
            for name in TERMS
            if name in tensors
        }
        args = _attention_args(ctx.schedule, {**tensors, **gradients}, **ctx.scalars)
        load_library().call("attention_backward", d_out.dtype, args)
        direction = ctx.schedule.tensors["direction"]
        for name, x in gradients.items():
            if name in ("d_pos_key", "d_pos_offset"):
                gradients[name] = x.new_zeros(2, *x.shape[1:]).index_add_(0, direction, x)
            elif name.removeprefix("d_") in per_row:
                gradients[name] = x.sum(0)
        if "d_pos_offset" in gradients:
            gradients["d_pos_offset"] = gradients["d_pos_offset"].transpose(1, 2)
        rounded = {name: x.to(d_out.dtype) for name, x in gradients.items()}
        return None, None, None, None, *(rounded.get(f"d_{name}") for name in TERMS)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the kernels compute."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _check_shapes(schedule: BlockSchedule, inputs: dict[str, Tensor]) -> None:
    """Assert shapes and dtypes, because the kernels read by address."""
    B, N, K, R = (schedule.sizes[size] for size in "BNKR")
    H, E = inputs["query"].shape[2:]
    shapes: dict[str, tuple[int, ...]] = {"query": (B, N, H, E), "key": (B, K, H, E), "value": (B, K, H, E)}
    shapes |= {"pos_key": (2, R, H, E), "pos_offset": (2, H, R)}
    for name, x in inputs.items():
        assert x.shape == shapes.get(name, (H, E)) and x.dtype == inputs["query"].dtype, name


def _attention_args(schedule: BlockSchedule, tensors: dict[str, Tensor], **scalars: int | float) -> AttentionArgs:
    """Fill the struct with addresses. The caller keeps the tensors alive during the kernel call."""
    pointers = {name: x.data_ptr() for name, x in {**schedule.tensors, **tensors}.items()}
    return AttentionArgs(**schedule.sizes, n_threads=torch.get_num_threads(), **scalars, **pointers)
