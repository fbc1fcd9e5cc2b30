"""Attention on processors, in fp32 (and fp64): a block of rows of one head at a time, with a backward pass by hand, in kernels/cpu.cpp.

    s = c.key + p.pos_key + pos_offset + different * t.step        c, p, t: queries with the term's bias, scaled
    P = softmax(s)        P' = P after dropout        o = P' value

and backward, from do:

    d value = P'^T do        dP' = do value^T        ds = P' * dP' - P * do.o

because the sum of P' * dP' over a row's keys is do.o; and

    dc = ds key              d key = ds^T c
    dp = ds' pos_key      d pos_key = ds'^T p       ds': ds moved back from keys to distances
    dt = d different step    d step = d different^T t     d different: the sum of ds where segments differ

Row t and key j stand in column T - t + j of all distances (Transformer-XL appendix B), so that a row's scores by key are a piece of its
scores by distance: nothing is gathered. A block has only keys from the first to the last that any of its rows sees (the reused part of
a window never sees the rest, no row sees memory that is empty or out of reach), and the distances that those take. Probabilities are
kept for the backward pass; where a layer has more than KEPT of them they are computed again, so that memory grows with the window, not
its square. Dropout is drawn by counting, and drawn again.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.dropout import drop_threshold, new_seed
from xlpre.model.kernels.cpu.build import TYPES, MissingError, library
from xlpre.model.score_terms import ScoreTerms

# rows of a block, at least and at most, between them a fourteenth of the keys: few make products slow, many take more distances than
# keys; and half as many where rows stand at any place, which take more
ROWS = 32, 128
SCORES = 1 << 20  # of a block, at most: 4 MB
KEPT = 1 << 24  # numbers by row and key: 64 MB

INTEGERS = [
    "B",
    "N",
    "K",
    "H",
    "E",
    "R",
    "n_tokens",
    "n_self_visible",
    "reach",
    "n_blocks",
    "block_rows",
    "threads",
    "seed",
    "taken",
]
PLACES = [
    "query_rank",
    "key_rank",
    "row_segments",
    "key_segments",
    "positions",
    "direction",
    "begins",
    "first_key",
    "n_keys",
    "low",
    "width",
]
TERMS = ["query", "r_w_bias", "r_r_bias", "pos_key", "pos_offset", "r_s_bias", "segment_diff", "key", "value"]
RESULTS = ["out", "kept", "normalizer"]
GRADIENTS = ["grad", *(f"d_{name}" for name in TERMS)]


class Given(ctypes.Structure):
    """`Attention` of kernels/cpu.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in ("scale", "grown")),
        *((name, ctypes.c_void_p) for name in [*PLACES, *TERMS, *RESULTS, *GRADIENTS]),
    ]


class Plan(NamedTuple):
    """Blocks of rows, and what the kernels must know of places, in int32.

    Attributes:
        integers: by name, of INTEGERS: sizes, of blocks the most rows, and `reach`, -1 if there is no such limit.
        places: by name, of PLACES: `begins` has the blocks' first rows, then N; `first_key` and `n_keys`, so many keys from that one
            on are all that any row of a block sees, `low` and `width`, its distances from `low` on, are (B, blocks).
    """

    integers: dict[str, int]
    places: dict[str, Tensor]


class Cpu:
    """See the module.

    Raises:
        ValueError: there is no compiler, or none that can.
    """

    def __init__(self) -> None:
        try:
            library()
        except MissingError as reason:
            raise ValueError(
                f"model.attention_backend=cpu needs its compiled code: {reason}; or set model.attention_backend=auto"
            ) from None

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> Plan:
        """In which blocks."""
        if like.dtype not in TYPES or like.device.type != "cpu":
            raise ValueError(
                f"model.attention_backend=cpu computes fp32 on a processor, not {like.dtype} on {like.device.type}; set model.attention_backend=auto"
            )
        return plan_of(attn_meta, like.dtype)

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        place = (scores.r_r_bias, scores.pos_key, scores.pos_offset)
        terms = (scores.query, scores.r_w_bias, *place, scores.r_s_bias, scores.segment_diff, key, value)
        return _Attention.apply(attn_meta.prepared, scores.scale, dropout, *terms)


def plan_of(attn_meta: AttentionMeta, dtype: torch.dtype) -> Plan:
    """Blocks of a step."""
    (B, N), K, T = attn_meta.query_rank.shape, attn_meta.n_keys, attn_meta.n_tokens
    rows, fewer = (max(1, min(max(ROWS[0], share), ROWS[1], SCORES // K)) for share in (K // 14, K // 28))
    begins = [*range(0, attn_meta.n_content, rows), *range(attn_meta.n_content, N, fewer), N]
    named = {name: getattr(attn_meta, name).int().contiguous() for name in PLACES[:6]}
    # the kernels read and write by address
    assert [x.shape for x in named.values()] == [(B, N), (B, K), (B, N), (B, K), (B, N), (B,)]
    found = dict(zip(PLACES[7:], torch.empty(4, B, len(begins) - 1, dtype=torch.int32), strict=True))
    places = {**named, "begins": torch.tensor(begins, dtype=torch.int32), **found}
    reach = -1 if attn_meta.max_distance is None else attn_meta.max_distance
    integers = {"B": B, "N": N, "K": K, "R": K + T, "n_tokens": T, "n_self_visible": attn_meta.n_self_visible, "reach": reach}
    plan = Plan({**integers, "n_blocks": len(begins) - 1, "block_rows": min(rows, N)}, places)
    library().call("plan", dtype, _given(plan, {}))
    return plan


class _Attention(torch.autograd.Function):
    """All terms at once."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: float, dropout: float, *terms: Tensor | None) -> Tensor:
        given = {name: x.contiguous() for name, x in zip(TERMS, terms, strict=True) if x is not None}
        if "pos_offset" in given:
            given["pos_offset"] = given["pos_offset"].transpose(1, 2).contiguous()  # (2, H, R)
        query = given["query"]
        B, N, H, E = query.shape
        _check(plan, given)
        keeps = B * N * plan.integers["K"] <= KEPT
        results = {"out": torch.empty_like(query)}
        if any(ctx.needs_input_grad):
            results |= (
                {"kept": query.new_empty(B, H, N, plan.integers["K"])}
                if keeps
                else {"normalizer": query.new_empty(B, H, N)}
            )
        numbers = {"H": H, "E": E, "scale": scale, "grown": 1 / (1 - dropout), "taken": drop_threshold(dropout)}
        numbers["seed"] = new_seed() if dropout else 0
        library().call("attend", query.dtype, _given(plan, {**given, **results}, **numbers))
        ctx.plan, ctx.numbers, ctx.names = plan, numbers, [*given, *results]
        ctx.save_for_backward(*given.values(), *results.values())
        return results["out"]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = {**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), "grad": grad.contiguous()}
        (B, _, H, E), R = grad.shape, ctx.plan.integers["R"]
        by_window = {"pos_key": (B, R, H, E), "pos_offset": (B, H, R)}
        shapes = {name: by_window.get(name, given[name].shape) for name in TERMS if name in given}
        shapes |= {name: (B, H, E) for name in shapes if name.endswith("bias") or name == "segment_diff"}
        found = {f"d_{name}": grad.new_zeros(shape) for name, shape in shapes.items()}
        library().call("attend_backward", grad.dtype, _given(ctx.plan, {**given, **found}, **ctx.numbers))
        direction = ctx.plan.places["direction"]
        for name, x in found.items():
            if name.removeprefix("d_") in by_window:
                found[name] = torch.zeros_like(x[:1]).repeat(2, *[1] * (x.dim() - 1)).index_add_(0, direction, x)
            elif name.endswith(("bias", "segment_diff")):
                found[name] = x.sum(0)
        if "d_pos_offset" in found:
            found["d_pos_offset"] = found["d_pos_offset"].transpose(1, 2)
        return None, None, None, *(found.get(f"d_{name}") for name in TERMS)


def _check(plan: Plan, given: dict[str, Tensor]) -> None:
    """That terms are as large as the kernels, which read by address, take them to be."""
    B, N, K, R = (plan.integers[size] for size in "BNKR")
    H, E = given["query"].shape[2:]
    of_others = {"query": (B, N, H, E), "pos_key": (2, R, H, E), "pos_offset": (2, H, R)}
    of_others |= {"key": (B, K, H, E), "value": (B, K, H, E)}
    for name, x in given.items():
        assert x.shape == of_others.get(name, (H, E)) and x.dtype == given["query"].dtype, name


def _given(plan: Plan, tensors: dict[str, Tensor], **numbers: int | float) -> Given:
    """What the kernels read, by address: the caller keeps the tensors until they have."""
    pointers = {name: x.data_ptr() for name, x in {**plan.places, **tensors}.items()}
    return Given(**plan.integers, threads=torch.get_num_threads(), **numbers, **pointers)
