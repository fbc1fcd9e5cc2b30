"""Attention on GPUs: a kernel that computes position scores by key, then a flash-attention kernel; forward and backward.

The score of row n and key j is

    s = c.key[j] + bias[n, j] + segment_score[n] * differ[n, j]        bias[n, j] = p.pos_key[d], d: the distance of n and j

c and p are the query of the row plus the bias of the content or the position term. They are not saved between the passes. The kernel
`position_scores` computes the bias for each distance and stores it at the key of that distance. This works for rows in any order, and the
kernels after it can read whole tiles of the bias. `attention_forward` iterates over tiles of keys. It keeps, for each row, the maximum m
of the scores and the sum of 2^(s - m) so far (Dao et al. 2022, FlashAttention), so that no probability is stored in memory.

The forward pass saves L = log2(sum of 2^s), with s in units of log 2. The backward pass computes P = 2^(s - L) again, tile by tile. Dropout
multiplies the weights that it keeps by 1 / keep_prob. To include this factor in P, log2(keep_prob) is added to L:

    o = P' value             P' = P where kept, else 0
    d value = P'^T do        ds = P' * (do value^T) - P * delta         delta = keep_prob * sum(do * o)
    d key = ds^T c           dc = ds key           d segment_score = sum of ds over keys of other segments
    dp = ds' pos_key         d pos_key = ds'^T p   ds': ds reordered from keys to distances. The gradient of the query is dc + dp.

Sums over rows and sums over keys are computed by separate kernels, `backward_key_value` and `backward_query`. This computes the scores
twice, but no program adds into the output of another, so that gradients are reproducible. The bias (B, H, N, K) exists only during the
forward pass of a layer and again during its backward pass, where ds overwrites it. A large bias is computed in panels of rows
(kernels/triton/panels.py).

Dropout takes its seed from torch's generator. The kernel `draw_dropout_mask` draws one bit for each probability, as a function of seed,
head, row and key. Three kernels read the mask, because drawing takes longer than the rest of their work. Like the bias, the mask exists
only during a pass, and the backward pass draws it again.

Forward and backward pass are one torch operator each: torch.compile treats them as nodes of its graph and fuses the code around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import HIDDEN_RANK
from xlpre.common.errors import InputError
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.triton.launch import IS_INTERPRETED, TENSORS, KernelArgs, KernelLauncher, new_seed_tensor
from xlpre.model.kernels.triton.panels import concat, merge_gradients, split_panels, split_rows
from xlpre.model.kernels.triton.tiles import MAX_HEAD_WIDTH, TILE_MULTIPLE, is_supported
from xlpre.model.score_terms import ScoreTerms

MAX_GRID_Y = 2**16 - 1  # limit of CUDA; this dimension of the grid counts the heads of all batch rows
VISIBLE_BYTES = 16  # upper bound of the bytes per query row and key that AttentionMeta.visible needs


@dataclass(frozen=True, eq=False)
class TritonBackend(AttentionBackend):
    """Attention by Triton kernels.

    Attributes:
        row_info: (B, 6, n_pitch) int32, where n_pitch is N padded to a multiple of TILE_MULTIPLE. Six numbers for each query row: its
            rank; the index of the key at its position if the row sees this key, else -1; the index of this key in any case; its segment;
            start and end of the range of keys that its group of TILE_MULTIPLE rows sees.
        key_info: (B, 4, k_pitch) int32, where k_pitch is K padded to a multiple of TILE_MULTIPLE. Four numbers for each key: its rank;
            its segment; start and end of the range of query rows that see its group of TILE_MULTIPLE keys.
        direction: (B,) int32, see AttentionMeta.
    """

    row_info: Tensor
    key_info: Tensor
    direction: Tensor
    has_fused_ops: ClassVar[bool] = True

    @classmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> TritonBackend:
        """Pack ranks, positions and segments as integers, see AttentionBackend. The mask is computed in panels (ranges of query rows)."""
        check_device(attn_meta.query_rank.device)
        N, K = attn_meta.query_rank.size(1), attn_meta.n_keys
        position_key = attn_meta.self_key
        sees_self = torch.arange(N, device=position_key.device) < attn_meta.n_self_visible
        self_key = torch.where(sees_self, position_key, -1)
        key_range, row_range = visible_ranges(attn_meta)
        rows = (attn_meta.query_rank, self_key, position_key, attn_meta.row_segments, *key_range)
        keys = (attn_meta.key_rank, attn_meta.key_segments, *row_range)
        row_info, key_info = torch.stack([x.int() for x in rows], 1), torch.stack([x.int() for x in keys], 1)
        row_info = torch.cat([row_info, row_info[:, :, -1:].expand(-1, -1, -N % TILE_MULTIPLE)], 2)
        key_info = F.pad(key_info, (0, -K % TILE_MULTIPLE), value=HIDDEN_RANK)
        return cls(attn_meta, row_info.contiguous(), key_info.contiguous(), attn_meta.direction.int())

    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute attention, see AttentionBackend.

        Raises:
            InputError: the kernels do not support the head width, the dtype or the size of the batch.
        """
        (B, N, H, E), R, dtype = terms.query.shape, self.attn_meta.n_distances, key.dtype
        if not is_supported(E, dtype):
            raise InputError(
                f"model.attention_backend=triton is invalid for heads of width {E} in {dtype}: it supports widths up to {MAX_HEAD_WIDTH} "
                "in bf16, fp16 and fp32. Set model.attention_backend=sdpa."
            )
        if B * H > MAX_GRID_Y:
            raise InputError(
                f"model.attention_backend=triton is invalid for {B:,} batch rows x {H} heads = {B * H:,}: "
                f"this product can be at most {MAX_GRID_Y:,}. Reduce train.micro_batch_size, or set model.attention_backend=sdpa."
            )
        width = max(16, 1 << (E - 1).bit_length())  # width of a tile
        largest_index = (max(N, R) + TILE_MULTIPLE) * max(H * width, TILE_MULTIPLE, B * H, B * 6)
        if largest_index >= 2**31:
            raise InputError(
                f"model.attention_backend=triton is invalid for {B:,} batch rows of {N:,} query rows and {R:,} distances, with {H} "
                f"heads of padded width {width}: its indices have 32 bits and must be below {2**31:,}, but would reach {largest_index:,}. "
                "Set model.attention_backend=sdpa, or reduce data.seq_len or model.mem_len."
            )
        query, r_r_bias, pos_key, pos_offset, segment_score = terms.with_bias(None), None, None, None, None
        if terms.pos_key is not None:
            r_r_bias = _scale_bias(terms.r_r_bias, terms.scale, width)
            pos_key = _pad_heads(terms.pos_key, width)
        if terms.pos_offset is not None:
            pos_offset = terms.pos_offset * terms.scale
        if terms.segment_diff is not None:
            segment_score = torch.einsum("bnhe,he->bhn", query, terms.segment_diff)
            if terms.r_s_bias is not None:
                segment_score = segment_score + (terms.r_s_bias * terms.segment_diff).sum(1)[:, None] * terms.scale
        args = KernelArgs(
            query=_pad_heads(query, width),
            r_w_bias=_scale_bias(terms.r_w_bias, terms.scale, width),
            r_r_bias=r_r_bias,
            pos_key=pos_key,
            pos_offset=pos_offset,
            segment_score=segment_score,
            key=_pad_heads(key, width),
            value=_pad_heads(value, width),
            row_info=self.row_info,
            key_info=self.key_info,
            direction=self.direction,
            seed=new_seed_tensor(key.device) if dropout else None,
            n_distances=R,
            max_distance=self.attn_meta.max_distance,
            dropout=dropout,
        )
        out, _ = relative_attention(*args)
        return out[..., :E]


def check_device(device: torch.device) -> None:
    """Check that the kernels run on a device.

    Raises:
        InputError: the device is a CPU, and Triton's interpreter is not used.
    """
    if device.type == "cpu" and not IS_INTERPRETED:
        raise InputError(
            "model.attention_backend=triton is invalid on a CPU: its kernels run on GPUs. Set model.attention_backend=auto."
        )


# The schema is derived from the fields of KernelArgs, because the annotations that custom_op supports depend on the version of torch.
_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | None: "int?", float: "float"}
_ARGS_SCHEMA = ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(KernelArgs).items())


def attention_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute attention in panels (ranges of query rows).

    Args:
        *args: fields of KernelArgs.

    Returns:
        The output (B, N, H, E), and log2(keep_prob * sum of exp(score)) of each query row, (B, H, N) float32.
    """
    outputs = (KernelLauncher(*panel).forward() for panel in split_panels(KernelArgs(*args)))
    outs, lses = zip(*outputs, strict=True)
    return concat(outs, 1), concat(lses, 2)


def attention_backward(d_out: Tensor, delta: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    """Compute the gradients of `KernelArgs.differentiable`, in order.

    Args:
        d_out: (B, N, H, E), gradient of the output.
        delta: (B, H, N) float32, keep_prob * sum(d_out * out).
        lse: (B, H, N) float32, of the forward pass.
        *args: fields of KernelArgs.
    """
    kernel_args = KernelArgs(*args)
    gradients = (
        KernelLauncher(*panel).backward(d_out[:, panel.rows], delta[:, :, panel.rows], lse[:, :, panel.rows])
        for panel in split_panels(kernel_args)
    )
    return merge_gradients(gradients, kernel_args)


FORWARD, BACKWARD = "xlpre::relative_attention", "xlpre::relative_attention_backward"
IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = {FORWARD: attention_forward, BACKWARD: attention_backward}
relative_attention = torch.library.custom_op(
    FORWARD, attention_forward, mutates_args=(), schema=f"({_ARGS_SCHEMA}) -> (Tensor, Tensor)"
)
relative_attention_backward = torch.library.custom_op(
    BACKWARD,
    attention_backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor delta, Tensor lse, {_ARGS_SCHEMA}) -> Tensor[]",
)


@relative_attention.register_fake
def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    query = KernelArgs(*args).query
    B, N, H, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((B, H, N), dtype=torch.float32)


@relative_attention_backward.register_fake
def _fake_backward(d_out: Tensor, delta: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in KernelArgs(*args).differentiable.values()]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args = KernelArgs(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(getattr(args, name) for name in TENSORS), *output)
    no_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.args_without_tensors = args._replace(**no_tensors)


def _backward(ctx: Any, d_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    args = ctx.args_without_tensors._replace(**dict(zip(TENSORS, tensors, strict=True)))
    if d_out is None:  # the output was used by an operation without a gradient
        return (None,) * len(args)
    delta = (d_out.float() * out.float()).sum(-1).transpose(1, 2) * args.keep_prob
    gradients = relative_attention_backward(d_out, delta, lse, *args)
    by_name = dict(zip(args.differentiable, gradients, strict=True))
    return tuple(by_name.get(name) for name in args._fields)


relative_attention.register_autograd(_backward, setup_context=_setup_context)


def visible_ranges(attn_meta: AttentionMeta) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ranges of keys and of query rows that the kernels must visit for each group of TILE_MULTIPLE rows or keys.

    Returns:
        For each query row, start and end of the range of keys that its group sees, (B, N) each. For each key, start and end of the range of
        rows that see its group, (B, K) each. An empty range is 0 to 0.
    """
    (B, N), K = attn_meta.query_rank.shape, attn_meta.n_keys
    starts, ends, row_range = [], [], None  # type: list[Tensor], list[Tensor], tuple[Tensor, Tensor] | None
    for first_row, last_row in split_rows(N, B * K * VISIBLE_BYTES):
        visible = attn_meta.slice_rows(first_row, last_row).visible()
        start, end = _group_ranges(visible, 0, K)
        starts.append(start)
        ends.append(end)
        start, end = _group_ranges(visible.transpose(1, 2), first_row, N)
        row_range = (start, end) if row_range is None else (row_range[0].minimum(start), row_range[1].maximum(end))
    assert row_range is not None
    return _expand_groups(concat(starts, 1), concat(ends, 1), N), _expand_groups(*row_range, K)


def _group_ranges(visible: Tensor, offset: int, empty_start: int) -> tuple[Tensor, Tensor]:
    """Return the range of the last dimension that each group of TILE_MULTIPLE elements of dimension 1 sees.

    Args:
        visible: (B, L, X) bool.
        offset: added to the indices of the last dimension.
        empty_start: start of an empty range; its end is 0.

    Returns:
        Start and end, (B, number of groups) each.
    """
    B, L, X = visible.shape
    grouped = F.pad(visible, (0, 0, 0, -L % TILE_MULTIPLE)).view(B, -1, TILE_MULTIPLE, X).any(2)
    index = torch.arange(offset, offset + X, device=visible.device)
    return torch.where(grouped, index, empty_start).amin(-1), torch.where(grouped, index + 1, 0).amax(-1)


def _expand_groups(start: Tensor, end: Tensor, length: int) -> list[Tensor]:
    """Repeat the range of each group for its members, (B, length) each. An empty range becomes 0 to 0."""
    return [x.repeat_interleave(TILE_MULTIPLE, 1)[:, :length] for x in (start.minimum(end), end)]


def _scale_bias(bias: Tensor | None, scale: float, width: int) -> Tensor | None:
    return None if bias is None else _pad_heads(bias * scale, width)


def _pad_heads(x: Tensor, width: int) -> Tensor:
    """Pad heads to `width` with zeros."""
    return F.pad(x, (0, width - x.size(-1))) if width > x.size(-1) else x
