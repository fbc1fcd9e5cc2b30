"""Attention on GPUs: a product that stores position scores under their keys, then a flash kernel; forward and backward.

Scores of a row n against a key j are s = c.key[j] + bias[n, j] + step[n] * different[n, j], where bias[n, j] = p.pos_key[d] for d,
their distance; c and p are the row's query with a bias each, and live only during a pass. `score_places` computes bias by distance and
stores each number in the column of its key, for rows in their order and for rows at any place alike, so that the kernels that follow
read whole tiles of it. `attend` then goes over tiles of keys, keeps the largest score m of each row and the sum of 2^(s - m) so far
(Dao et al. 2022, FlashAttention), and no probability is ever in memory.

The backward pass has the row's log2 of that sum, L, so that P = 2^(s - L) can be computed again, tile by tile (s in units of log 2). Where
dropout keeps a share of P, it divides what it keeps by that share: log2(share) is added to L, so that P is divided from the start, and

    o = P' value             P' = P where kept, else 0
    d value = P'^T do        ds = P' * (do value^T) - P * delta         delta = share * sum(do * o)
    d key = ds^T c           dc = ds key           d step = sum of ds where different
    dp = ds' pos_key      d pos_key = ds'^T p          ds': ds moved back from keys to distances; dp is added to dc

Sums over rows and sums over keys are taken by programs of their own, `differentiate_keys` and `differentiate_rows`: twice the scores, but
nobody adds into another's result, so gradients are the same bits each time. The bias (B, H, N, K) lives only during a layer's forward
pass and again, computed anew, during its backward pass, where ds is stored in its place; where it would be large, a panel of rows at a
time (kernels/triton_panels.py).

Dropout takes its seed from torch's generator. By seed, head, row and key alone a kernel of its own, `draw`, draws a bit for each
probability, which the three kernels that need it read: to draw is more work than the rest of what they do. Like the bias
the bits live only during a pass, and the backward pass draws them again.

Forward and backward pass are an operator of torch each: torch.compile takes them as a node of its graph and fuses what is around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.triton.launch import Given, Launch, new_seed
from xlpre.model.kernels.triton.panels import cuts, joined, panels, together
from xlpre.model.kernels.triton.tiles import GRANULE, WIDEST, computes
from xlpre.model.score_terms import ScoreTerms
from xlpre.batch import HIDDEN_RANK

MOST_GROUPS = 2**16 - 1  # heads of batch rows that a grid has room for beside tiles
SEEN_BYTES = 16  # that Geometry.visible and what is made of it take for a row and key, at the most


@dataclass(frozen=True)
class Prepared:
    """Of a step.

    Attributes:
        row_facts: (B, 6, N padded) int32: rank, column of the key of its own place or -1, column of its place, segment, and the
            first and one after the last key that any row of its granule sees.
        key_facts: (B, 4, K padded) int32: rank, segment, first and one after the last row that sees any key of its granule.
        direction: (B,) int32.
        n_distances: R.
        reach: see Geometry.
    """

    row_facts: Tensor
    key_facts: Tensor
    direction: Tensor
    n_distances: int
    reach: int | None


class Triton:
    """See the module."""

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> Prepared:
        """Ranks, places and segments as integers; nothing of size N x K is kept, or made of more than some rows at a time."""
        N, K = attn_meta.query_rank.size(1), attn_meta.n_keys
        column = attn_meta.positions + (K - attn_meta.n_tokens)
        own = torch.where(torch.arange(N, device=column.device) < attn_meta.n_self_visible, column, -1)
        keys_seen, seen_by = _hulls(attn_meta)
        of_rows = (attn_meta.query_rank, own, column, attn_meta.row_segments, *keys_seen)
        of_keys = (attn_meta.key_rank, attn_meta.key_segments, *seen_by)
        row_facts, key_facts = torch.stack([x.int() for x in of_rows], 1), torch.stack([x.int() for x in of_keys], 1)
        row_facts = torch.cat([row_facts, row_facts[:, :, -1:].expand(-1, -1, -N % GRANULE)], 2)
        key_facts = F.pad(key_facts, (0, -K % GRANULE), value=HIDDEN_RANK)
        return Prepared(
            row_facts.contiguous(),
            key_facts.contiguous(),
            attn_meta.direction.int(),
            attn_meta.n_distances,
            attn_meta.max_distance,
        )

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        E, dtype = key.size(3), key.dtype
        if not computes(E, dtype):
            raise ValueError(
                f"model.attention_backend=triton computes heads up to {WIDEST} wide in bf16, fp16 and fp32, not {E} in {dtype}; "
                f"set model.attention_backend=sdpa"
            )
        width = max(16, 1 << (E - 1).bit_length())
        (B, N, H, _), ready = scores.query.shape, attn_meta.prepared
        if B * H > MOST_GROUPS:
            raise ValueError(
                f"model.attention_backend=triton computes up to {MOST_GROUPS:,} heads of rows at once, not {B:,} rows of {H} heads; read fewer "
                "rows at once (train.global_batch_size, train.micro_batch_size), or set model.attention_backend=sdpa"
            )
        if (max(N, ready.n_distances) + GRANULE) * max(H * width, GRANULE, B * H, B * 6) >= 2**31:
            raise ValueError(
                f"model.attention_backend=triton counts in 32 bits, and {B:,} x {N:,} rows at {ready.n_distances:,} distances from their keys "
                f"have more numbers in {H} heads of {width}; set model.attention_backend=sdpa, or a smaller data.seq_len or model.mem_len"
            )
        r_r_bias = pos_key = step = offsets = None
        query, r_w_bias = scores.with_bias(None), _scaled(scores.r_w_bias, scores.scale, width)
        if scores.pos_key is not None:
            r_r_bias = _scaled(scores.r_r_bias, scores.scale, width)
            pos_key = _padded(scores.pos_key, width)
        if scores.pos_offset is not None:
            offsets = scores.pos_offset * scores.scale
        if scores.segment_diff is not None:
            step = torch.einsum("bnhe,he->bhn", query, scores.segment_diff)
            if scores.r_s_bias is not None:
                step = step + (scores.r_s_bias * scores.segment_diff).sum(1)[:, None] * scores.scale
        query, keys, values = (_padded(x, width) for x in (query, key, value))
        seed = new_seed(key.device) if dropout else None
        given = (query, r_w_bias, r_r_bias, pos_key, offsets, step, keys, values)
        facts = (ready.row_facts, ready.key_facts, ready.direction, seed, ready.n_distances, ready.reach)
        out, _ = relative_attention(*given, *facts, dropout)
        return out[..., :E]


# Schemas are written out, as the versions of torch and Python differ in what annotations they read.
GIVEN = (
    "Tensor query, Tensor? r_w_bias, Tensor? r_r_bias, Tensor? pos_key, Tensor? offsets, Tensor? step, Tensor key, "
    "Tensor value, Tensor row_facts, Tensor key_facts, Tensor direction, Tensor? seed, int n_distances, int? reach, float dropout"
)


def attended(*given: Any) -> tuple[Tensor, Tensor]:
    """The output (B, N, H, E) for what is Given, and log2 of the sum of each row's exponentials (B, H, N) float32."""
    outs, log_totals = zip(*(Launch(*panel).attend() for panel in panels(Given(*given))), strict=True)
    return joined(outs, 1), joined(log_totals, 2)


def differentiated(d_out: Tensor, delta: Tensor, log_total: Tensor, *given: Any) -> list[Tensor]:
    """Gradients of what is Given, of those tensors of its first eight that there are."""
    whole = Given(*given)
    of_panels = (
        Launch(*panel).differentiate(d_out[:, panel.rows], delta[:, :, panel.rows], log_total[:, :, panel.rows])
        for panel in panels(whole)
    )
    return together(of_panels, whole)


FORWARD, BACKWARD = "xlpre::relative_attention", "xlpre::relative_attention_backward"
INSIDE: Mapping[str, Callable[..., Any]] = {FORWARD: attended, BACKWARD: differentiated}
relative_attention = torch.library.custom_op(
    FORWARD, attended, mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor)"
)
relative_attention_backward = torch.library.custom_op(
    BACKWARD,
    differentiated,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor delta, Tensor log_total, {GIVEN}) -> Tensor[]",
)


@relative_attention.register_fake
def _outputs(*given: Any) -> tuple[Tensor, Tensor]:
    query = given[0]
    B, N, H, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((B, H, N), dtype=torch.float32)


@relative_attention_backward.register_fake
def _gradients(d_out: Tensor, delta: Tensor, log_total: Tensor, *given: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in Given(*given).differentiable if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = Given(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given.tensors, *output)
    ctx.settings = given.settings


def _backward(ctx: Any, d_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, log_total = ctx.saved_tensors
    given = Given(*tensors, *ctx.settings)
    if d_out is None:  # what took the output has no gradient
        return (None,) * len(given)
    delta = (d_out.float() * out.float()).sum(-1).transpose(1, 2) * given.share
    found = iter(relative_attention_backward(d_out, delta, log_total, *given))
    gradients = [None if x is None else next(found) for x in given.differentiable]
    return (*gradients, *[None] * (len(given) - len(gradients)))


relative_attention.register_autograd(_backward, setup_context=_keep)


def _hulls(attn_meta: AttentionMeta) -> tuple[list[Tensor], list[Tensor]]:
    """For each row the first and one after the last key that its granule sees, (B, N); for each key those of rows that see its, (B, K)."""
    (B, N), K = attn_meta.query_rank.shape, attn_meta.n_keys
    firsts, lasts, seen_by = [], [], None  # type: list[Tensor], list[Tensor], tuple[Tensor, Tensor] | None
    for begin, end in cuts(N, B * K * SEEN_BYTES):
        seen = attn_meta.slice_rows(begin, end).visible()
        first, last = _ends(seen, 0, K)
        firsts.append(first)
        lasts.append(last)
        first, last = _ends(seen.transpose(1, 2), begin, N)
        seen_by = (first, last) if seen_by is None else (seen_by[0].minimum(first), seen_by[1].maximum(last))
    assert seen_by is not None
    return _of_each(joined(firsts, 1), joined(lasts, 1), N), _of_each(*seen_by, K)


def _ends(seen: Tensor, before: int, none: int) -> tuple[Tensor, Tensor]:
    """The first and one after the last of X that granules of L see, counted from `before`; `none` and 0 if nothing; (B, L, X) given."""
    B, L, X = seen.shape
    any_of_it = F.pad(seen, (0, 0, 0, -L % GRANULE)).view(B, -1, GRANULE, X).any(2)
    number = torch.arange(before, before + X, device=seen.device)
    return torch.where(any_of_it, number, none).amin(-1), torch.where(any_of_it, number + 1, 0).amax(-1)


def _of_each(first: Tensor, last: Tensor, length: int) -> list[Tensor]:
    """From granules to each of `length`; nothing is from 0 to 0."""
    return [x.repeat_interleave(GRANULE, 1)[:, :length] for x in (first.minimum(last), last)]


def _scaled(bias: Tensor | None, scale: float, width: int) -> Tensor | None:
    """To heads of `width`, if there is one."""
    return None if bias is None else _padded(bias * scale, width)


def _padded(x: Tensor, width: int) -> Tensor:
    """To heads of `width`, with zeros."""
    return F.pad(x, (0, width - x.size(-1))) if width > x.size(-1) else x
