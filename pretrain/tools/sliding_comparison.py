"""Comparison of evaluation with a cache and with a sliding window, by attention length (Transformer-XL, arXiv:1901.02860, Table 9)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pretrain.planning.flops import BatchShape, Counting, inference_flops
from xlpre.common.errors import InputError
from xlpre.common.plots import new_axes, save_figure, set_log_scale
from xlpre.conversion.model_folder import ModelFolder
from xlpre.inference.context_losses import SlidingReader, WindowReader
from xlpre.model.config import ModelConfig
from xlpre.text import special_tokens

T = TypeVar("T")

N_TOKENS = 64  # tokens predicted with a sliding window
WINDOWS_PER_TURN = 2  # windows that the cached evaluation reads for each token of the sliding window


@dataclass(frozen=True)
class Comparison:
    """Cached evaluation against a sliding window, for one attention length.

    Attributes:
        attention_length: number of keys that a token attends to in each layer, its own included.
        cached_loss: mean loss of the compared tokens in nats, with a cache.
        sliding_loss: mean loss of the same tokens, each predicted from a window of `attention_length` tokens.
        loss_difference_error: standard error of the difference.
        n_compared: number of tokens that both predicted.
        cached_ms: median milliseconds per token, with a cache.
        sliding_ms: median milliseconds per token, with a sliding window.
        flop_ratio: FLOPs per token of the sliding window, divided by those of the cached evaluation.
    """

    attention_length: int
    cached_loss: float
    sliding_loss: float
    loss_difference_error: float
    n_compared: int
    cached_ms: float
    sliding_ms: float
    flop_ratio: float

    @property
    def times_as_fast(self) -> float:
        """Speed of the cached evaluation, relative to the sliding window."""
        return self.sliding_ms / self.cached_ms

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the ratio of the times as JSON values."""
        return {**dataclasses.asdict(self), "times_as_fast": self.times_as_fast}


def compare_sliding(
    folder: ModelFolder,
    tokens: np.ndarray,
    lengths: Sequence[int],
    window: int,
    device: torch.device,
    report_progress: Callable[[int, int], None],
) -> list[Comparison]:
    """Compare cached evaluation with a sliding window on a text, one row at a time.

    The text is read once with a cache, after `max(lengths)` tokens that only fill it. At regular distances, the same tokens are predicted
    with a sliding window. Both take turns, so that other work on the machine affects both.

    Args:
        folder: causal model.
        tokens: (N,) token ids.
        lengths: attention lengths.
        window: tokens of a window of the cached evaluation. It is at most the attention length.
        device: device of the model.
        report_progress: called after each turn with the number of turns done and the number of all turns.

    Raises:
        InputError: the model is not causal, or encodes absolute positions; a length is below 2; or the text is too short.
    """
    if folder.objective != "causal" or folder.config.has_absolute_positions:
        raise InputError(
            f"--compare=sliding is invalid for a {folder.objective} model with model.positions={folder.config.positions}: it compares "
            "causal models that encode relative positions. Leave it out."
        )
    if min(lengths) < 2:
        raise InputError(f"--lengths={min(lengths)} is invalid: an attention length must be at least 2.")
    turn_len, start = WINDOWS_PER_TURN * window, max(lengths)
    n_turns = min(N_TOKENS, (len(tokens) - start) // turn_len - 1)
    if n_turns < 2:
        raise InputError(
            f"TEXT is invalid: it has {len(tokens):,} tokens, and the comparison of attention lengths up to {start:,} needs "
            f"{start + 3 * turn_len:,}. Give more text, or shorter --lengths."
        )
    bounds = [start + turn * turn_len for turn in range(n_turns + 1)]
    stream = np.concatenate([[special_tokens.EOD], tokens[: bounds[-1] + window]]).astype(np.int64)
    text = torch.from_numpy(stream)[None].to(device)
    results = []
    for index, length in enumerate(lengths):

        def report(turn: int, done: int = index * n_turns) -> None:
            report_progress(done + turn, len(lengths) * n_turns)

        results.append(_compare(folder, text, length, min(window, length), bounds, report))
    return results


@torch.no_grad()
def _compare(
    folder: ModelFolder,
    text: Tensor,
    length: int,
    window: int,
    bounds: Sequence[int],
    report: Callable[[int], None],
) -> Comparison:
    """Compare both ways for one attention length.

    Args:
        folder: causal model.
        text: (1, N) tokens.
        length: attention length.
        window: tokens of a window of the cached evaluation.
        bounds: positions at which a turn of the cached evaluation ends. The first one ends the text that fills the cache.
        report: called after each turn with the number of turns done.
    """
    config = dataclasses.replace(folder.config, mem_len=length - 1, attention_span="same_length")
    model = dataclasses.replace(folder, config=config).model().to(text.device)
    cached, sliding = WindowReader(model, text, window), SlidingReader(model, text, length)
    cached_losses: list[Tensor] = []

    def read_until(bound: int) -> None:
        while len(cached_losses) * window < bound:
            cached_losses.append(cached.read()[0])

    read_until(bounds[0])
    sliding.read(bounds[0])  # warm-up
    losses, cached_seconds, sliding_seconds = [], [], []
    for turn, bound in enumerate(bounds[1:]):
        n_read = len(cached_losses)
        seconds, _ = _timed(lambda bound=bound: read_until(bound), text.device)  # type: ignore[misc]
        cached_seconds.append(seconds / ((len(cached_losses) - n_read) * window))
        position = bounds[turn] + turn * 7919 % (
            bound - bounds[turn]
        )  # another place in each turn, the same for all lengths
        seconds, loss = _timed(lambda position=position: sliding.read(position), text.device)  # type: ignore[misc]
        sliding_seconds.append(seconds)
        losses.append((cached_losses[position // window][position % window].item(), loss.item()))
        report(turn + 1)
    cached_flops, sliding_flops = flops_per_token(config, 1, length, window, "model")
    return Comparison(
        attention_length=length,
        cached_loss=statistics.fmean(cached_loss for cached_loss, _ in losses),
        sliding_loss=statistics.fmean(sliding_loss for _, sliding_loss in losses),
        loss_difference_error=statistics.stdev(a - b for a, b in losses) / math.sqrt(len(losses)),
        n_compared=len(losses),
        cached_ms=1e3 * statistics.median(cached_seconds),
        sliding_ms=1e3 * statistics.median(sliding_seconds),
        flop_ratio=sliding_flops / cached_flops,
    )


def flops_per_token(model: ModelConfig, rows: int, span: int, window: int, counting: Counting) -> tuple[float, float]:
    """Return the FLOPs per token of cached evaluation in windows, and of a sliding window.

    Args:
        model: model config.
        rows: rows of the batch.
        span: attention length.
        window: tokens of a window of the cached evaluation.
        counting: see `flops_by_part`.
    """
    mem_len, n_layer = span - 1, model.n_layer
    cached = BatchShape(rows, window, mem_len, window, window, False, visible_fraction=span / (mem_len + window))
    n_content_rows = (n_layer - 1) * span  # the last layer computes the query of one token only
    n_visible = (n_layer - 1) * span * (span + 1) / 2 + span
    sliding = BatchShape(rows, span, 0, 1, span, False, visible_fraction=n_visible / (span * (n_content_rows + 1)))
    return (
        inference_flops(model, cached, counting) / (rows * window),
        inference_flops(model, sliding, counting) / rows,
    )


def comparison_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Return a table with one row per attention length."""
    return [
        {
            "attention length": f"{each.attention_length:,}",
            "loss, cached": f"{each.cached_loss:.3f}",
            "loss, sliding": f"{each.sliding_loss:.3f}",
            "± (difference)": f"{each.loss_difference_error:.3f}",
            "ms per token, cached": f"{each.cached_ms:.3g}",
            "ms per token, sliding": f"{each.sliding_ms:.3g}",
            "times as fast": f"{each.times_as_fast:,.0f}",
            "FLOP ratio": f"{each.flop_ratio:,.0f}",
        }
        for each in comparisons
    ]


def draw_comparisons(comparisons: Sequence[Comparison], path: Path, title: str) -> None:
    """Draw speed and loss over the attention length."""
    figure, (speed, loss) = new_axes(8.5, 3.6, 2)
    lengths = [each.attention_length for each in comparisons]
    speed.plot(lengths, [each.times_as_fast for each in comparisons], "o-", label="measured")
    speed.plot(lengths, [each.flop_ratio for each in comparisons], "--", color="#6b7585", label="ratio of FLOPs")
    set_log_scale(speed, "y")
    speed.set(xlabel="attention length", ylabel="times as fast as a sliding window")
    loss.plot(lengths, [each.cached_loss for each in comparisons], "o-", label="cached")
    loss.plot(lengths, [each.sliding_loss for each in comparisons], "s-", label="sliding window")
    loss.set(xlabel="attention length", ylabel="loss in nats")
    for axes in (speed, loss):
        set_log_scale(axes, "x")
        axes.set_xticks(lengths)
        axes.minorticks_off()
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _timed(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
