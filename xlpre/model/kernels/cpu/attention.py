"""Attention on CPUs in fp32 and fp64: one block of rows of one head at a time, with a hand-written backward pass (kernels.cpp).

    s = c.key + p.pos_key + pos_offset + differ * t.segment_diff        c, p, t: scaled queries with the bias of the term
    P = softmax(s)        P' = dropout(P)        o = P' value

Backward, from do:

    d value = P'^T do        dP' = do value^T        ds = P' * dP' - P * do.o

This holds because the sum of P' * dP' over the keys of a row is do.o. Then:

    dc = ds key              d key = ds^T c
    dp = ds' pos_key         d pos_key = ds'^T p                  ds': ds reordered from keys to distances
    dt = d differ * segment_diff        d segment_diff = d differ * t        d differ: sum of ds over keys of other segments

Row t and key j have distance column T - t + j (Transformer-XL, appendix B). So the scores of a row by key are a slice of its scores
by distance, and no gather is needed.

A block covers only the keys between the first and the last that any of its rows sees, and their distances. The reused part of a
window never sees the rest of it. No row sees empty memory.

Probabilities are saved for the backward pass. A layer with more than MAX_SAVED_PROBS of them recomputes them instead, so that memory
grows linearly with the window. Dropout uses counter-based random numbers, which the backward pass generates again.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.dropout import drop_threshold, new_seed
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.cpu.build import DTYPES, load_library
from xlpre.model.score_terms import ScoreTerms

# Minimum and maximum number of rows in a block; in between, a block has 1/14 as many rows as keys. Few rows make products slow; many
# rows read more distances than keys. Rows in arbitrary order read more distances, so their blocks have half as many rows.
BLOCK_ROWS = 32, 128
MAX_BLOCK_SCORES = 1 << 20  # 4 MB in fp32
MAX_SAVED_PROBS = 1 << 24  # of all heads of a layer; 64 MB in fp32

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
    """The struct of the same name in kernels.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in DOUBLES),
        *((name, ctypes.c_void_p) for name in (*META, *BLOCKS, *TERMS, *OUTPUTS, *GRADIENTS)),
    ]


class BlockSchedule(NamedTuple):
    """Blocks of rows, and the attention metadata in int32.

    Attributes:
        sizes: by name, see SIZES. `block_rows` is the largest number of rows in a block. `max_distance` is -1 without a limit.
        tensors: int32 tensors by name, see META and BLOCKS. `block_start` holds the first row of each block, then N. `first_key` and
            `n_keys` are the range of keys that the rows of a block see, `first_distance` and `n_distances` the range of
            distances, (B, n_blocks) each.
    """

    sizes: dict[str, int]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class CpuBackend(AttentionBackend):
    """Attention by the compiled CPU kernels.

    Attributes:
        schedule: blocks of rows.
    """

    schedule: BlockSchedule

    @classmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> CpuBackend:
        """Divide the rows into blocks, see AttentionBackend."""
        device = attn_meta.query_rank.device.type
        if dtype not in DTYPES or device != "cpu":
            raise ValueError(
                f"model.attention_backend=cpu is invalid for {dtype} on {device}: it computes in fp32 on a CPU. "
                "Set model.attention_backend=auto."
            )
        return cls(attn_meta, schedule_blocks(attn_meta, dtype))

    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute attention, see AttentionBackend."""
        tensors = {**vars(terms), "key": key, "value": value}
        return _Attention.apply(self.schedule, terms.scale, dropout, *(tensors[name] for name in TERMS))


def schedule_blocks(attn_meta: AttentionMeta, dtype: torch.dtype) -> BlockSchedule:
    """Divide the rows of a forward pass into blocks."""
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
    sizes["max_distance"] = -1 if attn_meta.max_distance is None else attn_meta.max_distance
    sizes |= {"n_blocks": n_blocks, "block_rows": min(rows, N)}
    schedule = BlockSchedule(sizes, tensors)
    load_library().call("schedule_blocks", dtype, _attention_args(schedule, {}))
    return schedule


class _Attention(torch.autograd.Function):
    """Attention of all score terms."""

    @staticmethod
    def forward(ctx: Any, schedule: BlockSchedule, scale: float, dropout: float, *terms: Tensor | None) -> Tensor:
        inputs = {name: x.contiguous() for name, x in zip(TERMS, terms, strict=True) if x is not None}
        if "pos_offset" in inputs:
            inputs["pos_offset"] = inputs["pos_offset"].transpose(1, 2).contiguous()  # (2, H, R)
        query, K = inputs["query"], schedule.sizes["K"]
        B, N, H, E = query.shape
        _check_shapes(schedule, inputs)
        outputs = {"out": torch.empty_like(query)}
        if any(ctx.needs_input_grad):
            if B * H * N * K <= MAX_SAVED_PROBS:
                outputs["probs"] = query.new_empty(B, H, N, K)
            else:
                outputs["lse"] = query.new_empty(B, H, N)
        scalars = {"H": H, "E": E, "scale": scale, "dropout_scale": 1 / (1 - dropout)}
        scalars |= {"drop_threshold": drop_threshold(dropout), "seed": new_seed() if dropout else 0}
        load_library().call(
            "attention_forward", query.dtype, _attention_args(schedule, {**inputs, **outputs}, **scalars)
        )
        ctx.schedule, ctx.scalars, ctx.names = schedule, scalars, [*inputs, *outputs]
        ctx.save_for_backward(*inputs.values(), *outputs.values())
        return outputs["out"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        tensors = {**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), "d_out": d_out.contiguous()}
        (B, _, H, E), R = d_out.shape, ctx.schedule.sizes["R"]
        # gradients that the kernels compute per batch row, to be summed here in a fixed order
        per_row: dict[str, tuple[int, ...]] = {"pos_key": (B, R, H, E), "pos_offset": (B, H, R)}
        per_row |= dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), (B, H, E))
        inputs = [name for name in TERMS if name in tensors]
        gradients = {f"d_{name}": d_out.new_zeros(per_row.get(name, tensors[name].shape)) for name in inputs}
        args = _attention_args(ctx.schedule, {**tensors, **gradients}, **ctx.scalars)
        load_library().call("attention_backward", d_out.dtype, args)
        direction = ctx.schedule.tensors["direction"]
        for name, x in gradients.items():
            if name in ("d_pos_key", "d_pos_offset"):
                gradients[name] = torch.zeros_like(x[:1]).repeat(2, *[1] * (x.dim() - 1)).index_add_(0, direction, x)
            elif name.removeprefix("d_") in per_row:
                gradients[name] = x.sum(0)
        if "d_pos_offset" in gradients:
            gradients["d_pos_offset"] = gradients["d_pos_offset"].transpose(1, 2)
        return None, None, None, *(gradients.get(f"d_{name}") for name in TERMS)


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
