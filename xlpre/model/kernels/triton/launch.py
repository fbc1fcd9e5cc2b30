"""Launch of the attention kernels on the tensors of one layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xlpre.model.kernels.triton import backward, forward
from xlpre.model.kernels.triton.tiles import tile_for

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        forward.draw_dropout_mask,
        forward.position_scores,
        forward.attention_forward,
        backward.backward_key_value,
        backward.backward_query,
        backward.backward_position_query,
        backward.backward_position_key,
    )
}

IS_INTERPRETED = not isinstance(forward.attention_forward, triton.JITFunction)  # by TRITON_INTERPRET=1, on a CPU

# GPU code that torch.compile generates holds this bound in 32 bits (torch 2.11); a larger one may become 0
MAX_SEED = 2**31 - 1


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, (1,) int64, from torch's generator of a device, without synchronization."""
    return torch.randint(MAX_SEED, (1,), device=device)


DROPOUT_LEVELS = 2**16  # a dropout probability is rounded to a multiple of 1 / DROPOUT_LEVELS


def dropout_level(dropout: float) -> int:
    """Return a dropout probability as a multiple of 1 / DROPOUT_LEVELS, below 1."""
    return min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)


def launch(kernel: Any, grid: tuple[int, ...], device_of: Tensor, **args: Any) -> None:
    """Launch a kernel on the device of a tensor, which need not be the current one.

    Args:
        kernel: function of Triton.
        grid: number of programs in each dimension.
        device_of: one of the tensors of the kernel.
        **args: arguments of the kernel.
    """
    with torch.cuda.device_of(device_of):
        kernel[grid](**args)


class KernelArgs(NamedTuple):
    """Arguments of the attention operator.

    Attributes:
        query: (B, N, H, E), scaled.
        r_w_bias: (H, E), scaled.
        r_r_bias: (H, E), scaled.
        pos_key: (2, R, H, E).
        pos_offset: (2, R, H), scaled.
        segment_score: (B, H, N), added to the scores of keys of another segment.
        key: (B, K, H, E).
        value: (B, K, H, E).
        row_info: (B, 6, n_pitch) int32, see TritonBackend.
        key_info: (B, 4, k_pitch) int32, see TritonBackend.
        direction: (B,) int32.
        seed: (1,) int64, seed of dropout. None without dropout.
        n_distances: R.
        max_distance: largest distance at which a key is visible. None means no limit.
        dropout: probability of zeroing an attention weight.
    """

    query: Tensor
    r_w_bias: Tensor | None
    r_r_bias: Tensor | None
    pos_key: Tensor | None
    pos_offset: Tensor | None
    segment_score: Tensor | None
    key: Tensor
    value: Tensor
    row_info: Tensor
    key_info: Tensor
    direction: Tensor
    seed: Tensor | None
    n_distances: int
    max_distance: int | None
    dropout: float

    @property
    def keep_prob(self) -> float:
        """Probability that dropout keeps a weight."""
        return 1 - dropout_level(self.dropout) / DROPOUT_LEVELS

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """Tensors that have a gradient, by name."""
        tensors = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: x for name, x in tensors.items() if x is not None}

    def contiguous(self) -> KernelArgs:
        """Return the arguments with contiguous tensors, as the kernels read them."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        return self._replace(**{name: x.contiguous() for name, x in tensors.items() if x is not None})


DIFFERENTIABLE = ("query", "r_w_bias", "r_r_bias", "pos_key", "pos_offset", "segment_score", "key", "value")
TENSORS = (*DIFFERENTIABLE, "row_info", "key_info", "direction", "seed")


class KernelLauncher:
    """Launches the kernels on one panel of rows (kernels/triton/panels.py).

    Args:
        args: arguments of the rows of the panel.
        first_row: index of the first row of the panel among all rows.
        sum_dtype: dtype of the gradients of keys and values.
    """

    def __init__(self, args: KernelArgs, first_row: int, sum_dtype: torch.dtype) -> None:
        self._args = args = args.contiguous()
        self._sum_dtype = sum_dtype
        # not saved between the passes, because each is as large as the queries
        self._content_query = args.query if args.r_w_bias is None else args.query + args.r_w_bias
        self._pos_query = args.query if args.r_r_bias is None else args.query + args.r_r_bias
        (B, N, H, E), K = args.query.shape, args.key.size(1)
        self._n_heads, self._row_shape = B * H, (B, H, N)
        self._n_pitch, self._k_pitch = args.row_info.size(2), args.key_info.size(2)
        self._lengths = {"rows": N, "keys": K, "distances": args.n_distances}
        # arguments that have the same name and value in all kernels that take them
        self._shared: dict[str, Any] = {name: getattr(args, name) for name in TENSORS if name != "query"}
        self._shared |= {"N": N, "K": K, "R": args.n_distances, "H": H, "E": E}
        self._shared |= {"n_pitch": self._n_pitch, "k_pitch": self._k_pitch, "first_row": first_row}
        self._shared |= {"max_distance": args.max_distance or 0, "HAS_MAX_DISTANCE": args.max_distance is not None}
        self._shared |= {"drop_level": dropout_level(args.dropout), "keep_prob": args.keep_prob}
        self._shared |= {"HAS_DROPOUT": args.dropout > 0, "HAS_SEGMENTS": args.segment_score is not None}
        self._shared |= {"HAS_POSITIONS": args.pos_key is not None, "HAS_OFFSET": args.pos_offset is not None}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Returns:
            The output (B, N, H, E), and log2 of keep_prob times the sum of exponentials, (B, H, N) float32.
        """
        query = self._content_query
        out, lse = torch.empty_like(query), query.new_empty(self._row_shape, dtype=torch.float32)
        bias, drop_mask = self._position_scores(), self._drop_mask()
        self.launch("attention_forward", "rows", query=query, bias=bias, drop_mask=drop_mask, out=out, lse=lse)
        return out, lse

    def backward(self, d_out: Tensor, delta: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """Compute the gradients of `KernelArgs.differentiable`, by name.

        Args:
            d_out: (B, N, H, E), gradient of the output.
            delta: (B, H, N) float32, keep_prob * sum(d_out * out).
            lse: (B, H, N) float32, of the forward pass.
        """
        bias = self._position_scores()
        inputs = {"query": self._content_query, "bias": bias, "drop_mask": self._drop_mask()}
        inputs |= {"lse": lse.contiguous(), "d_out": d_out.contiguous(), "delta": delta.contiguous()}
        d_key, d_value = self._backward_key_value(inputs)
        d_query, d_segment_score = self._backward_query(inputs)  # replaces the bias by its gradient
        d_pos_query, d_pos_key, d_pos_offset = self._backward_positions(bias)
        d_r_w_bias = None if self._args.r_w_bias is None else d_query.sum((0, 1), dtype=torch.float32)
        d_r_r_bias = None
        if d_pos_query is not None:
            if self._args.r_r_bias is not None:
                d_r_r_bias = d_pos_query.sum((0, 1), dtype=torch.float32)
            d_query += d_pos_query
        gradients = {"query": d_query, "r_w_bias": d_r_w_bias, "r_r_bias": d_r_r_bias}
        gradients |= {"pos_key": d_pos_key, "pos_offset": d_pos_offset, "segment_score": d_segment_score}
        gradients |= {"key": d_key, "value": d_value}
        return {name: x for name, x in gradients.items() if x is not None}

    def launch(self, kernel: str, tiled: str, **args: Any) -> None:
        """Launch one kernel. On the meta device, do nothing.

        Args:
            kernel: one of KERNELS.
            tiled: `rows`, `keys` or `distances`. There is one program for each tile of them and each head of each batch row.
            **args: arguments of the kernel. Shared arguments are added.
        """
        query = self._args.query
        if query.is_meta:
            return
        tile = tile_for(kernel, query.size(3), query.dtype)
        grid = (-(-self._lengths[tiled] // (tile.rows if tiled == "rows" else tile.keys)), self._n_heads)
        function = KERNELS[kernel]
        shared = {name: x for name, x in self._shared.items() if name in function.arg_names}
        config = {"ROWS": tile.rows, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
        launch(function, grid, query, **shared, **args, **config)

    def _position_scores(self) -> Tensor | None:
        """Compute position scores (B, H, N, k_pitch). Columns outside of the range that a row sees are undefined."""
        if self._args.pos_key is None:
            return None
        bias = self._pos_query.new_empty(*self._row_shape, self._k_pitch)
        self.launch("position_scores", "rows", query=self._pos_query, bias=bias)
        return bias

    def _drop_mask(self) -> Tensor | None:
        """Draw the dropout mask (B, H, k_pitch / 32, n_pitch) int32, one bit per key. It has the same undefined columns."""
        if self._args.seed is None:
            return None
        B, H, _ = self._row_shape
        drop_mask = self._args.row_info.new_empty(B, H, self._k_pitch // 32, self._n_pitch)
        self.launch("draw_dropout_mask", "rows", drop_mask=drop_mask)
        return drop_mask

    def _backward_key_value(self, inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        d_key, d_value = (torch.empty_like(x, dtype=self._sum_dtype) for x in (self._args.key, self._args.value))
        self.launch("backward_key_value", "keys", **inputs, d_key=d_key, d_value=d_value)
        return d_key, d_value

    def _backward_query(self, inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        segment_score = self._args.segment_score
        d_query = torch.empty_like(self._args.query)
        d_segment_score = None if segment_score is None else torch.empty_like(segment_score)
        self.launch("backward_query", "rows", **inputs, d_query=d_query, d_segment_score=d_segment_score)
        return d_query, d_segment_score

    def _backward_positions(self, d_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of position queries, and the float32 gradients of position keys and offsets."""
        pos_key, pos_offset, direction = self._args.pos_key, self._args.pos_offset, self._args.direction
        if pos_key is None:
            return None, None, None
        d_query = torch.empty_like(self._pos_query)
        self.launch("backward_position_query", "rows", d_bias=d_bias, d_query=d_query)
        # gradients per batch row
        d_keys = self._pos_query.new_empty(len(direction), *pos_key.shape[1:], dtype=torch.float32)
        d_offsets = None if pos_offset is None else d_keys.new_empty(d_keys.shape[:3])
        gradients = {"d_pos_key": d_keys, "d_pos_offset": d_offsets}
        self.launch("backward_position_key", "distances", query=self._pos_query, d_bias=d_bias, **gradients)
        # sums over the batch rows of each direction, as a product, because the order of additions of index_add is undefined
        is_direction = (direction == torch.arange(2, device=direction.device)[:, None]).float()
        d_pos_key = (is_direction @ d_keys.flatten(1)).view(pos_key.shape)
        if pos_offset is None or d_offsets is None:
            return d_query, d_pos_key, None
        return d_query, d_pos_key, (is_direction @ d_offsets.flatten(1)).view(pos_offset.shape)
