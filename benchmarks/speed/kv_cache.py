"""Compare the time per token at evaluation with a KV cache, with cached hidden states, and with a sliding window.

python benchmarks/speed/kv_cache.py [--lengths 64 128 256 400 800] [--window 128] [--layers 4] [--width 128] [--attention sdpa]

The model is causal. Each token attends to the same number of keys, its own included: the attention span. Three ways to read a text are
compared:

    cached   window by window, with cached keys and values of previous tokens (xlpre/model/memory.py)
    hidden   window by window, with cached hidden states, as in training
    sliding  token by token, each from a window of its own without a cache, as long as the attention span

Before timing, the losses of `cached` and `sliding` must agree where both depend on the same tokens: in texts up to the attention span,
and in any text if the model has one layer. In longer texts with more layers, `cached` depends on earlier tokens, too.

Prints one JSON line per attention span: the median processor time per token of each way in milliseconds; the speed of `cached` and
`hidden` relative to `sliding` (median over pairs of turns); and the FLOPs of `sliding` divided by the FLOPs of `cached`, for model
FLOPs and for FLOPs with all scores (pretrain/planning/flops.py). The three ways take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow each other down severely on shared cores

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.tools.sliding_comparison import flops_per_token
from xlpre.inference.context_losses import SlidingReader, WindowReader
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel

TOLERANCE = 1e-4  # largest difference between two losses, in nats
N_CHECKED_TOKENS = 8
READS_PER_TURN = 4  # windows that `cached` and `hidden` read in a turn, and tokens that `sliding` reads


def make_model(args: argparse.Namespace, span: int, n_layer: int) -> LanguageModel:
    """Return a model in which every query attends to `span` keys, including its own."""
    torch.manual_seed(0)
    shape = ModelConfig(
        vocab_size=args.vocabulary,
        n_layer=n_layer,
        d_model=args.width,
        n_head=args.heads,
        d_inner=4 * args.width,
        mem_len=span - 1,
        attention_span="same_length",
        relative_segments=False,
        attention_backend=args.attention,
        init_std=0.1,  # large enough for the attended tokens to affect the loss
    )
    return LanguageModel(shape, two_streams=False).eval()


def largest_difference(args: argparse.Namespace, span: int, n_layer: int, start: int, end: int) -> float:
    """Return the largest difference between losses of `cached` and `sliding`, at some positions of a text from `start` to `end`."""
    model, window = make_model(args, span, n_layer), min(args.window, span)
    text = torch.randint(args.vocabulary, (args.rows, end + window + 1))
    cached = WindowReader(model, text, window, use_cache=True)
    losses = torch.cat([cached.read() for _ in range(-(-end // window))], 1)
    sliding = SlidingReader(model, text, span)
    positions = torch.linspace(start, end - 1, N_CHECKED_TOKENS).long().tolist()
    return max((losses[:, position] - sliding.read(position)).abs().max().item() for position in positions)


def measure(args: argparse.Namespace, span: int) -> dict[str, object]:
    """Check the losses and time the three ways for an attention span. Return the JSON line."""
    differences = {
        "up to the span": largest_difference(args, span, args.layers, 0, span),
        "one layer": largest_difference(args, span, 1, span, span + 2 * min(args.window, span)),
    }
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(
            f"The losses of `cached` and `sliding` differ by more than {TOLERANCE} nats, so nothing is timed: {differences}"
        )
    window = min(args.window, span)
    model, n_filling = make_model(args, span, args.layers), -(-span // window)
    n_windows = n_filling + (args.rounds + 1) * READS_PER_TURN
    text = torch.randint(args.vocabulary, (args.rows, n_windows * window + 1))
    readers = {
        "cached": WindowReader(model, text, window, use_cache=True),
        "hidden": WindowReader(model, text, window, use_cache=False),
    }
    for reader in readers.values():
        for _ in range(n_filling):  # fill the cache before timing
            reader.read()
    sliding = SlidingReader(model, text, span)
    turns: dict[str, Callable[[int], object]] = {name: lambda _, r=r: r.read() for name, r in readers.items()}
    turns["sliding"] = lambda number: sliding.read(span + number)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(args.rounds + 1):
        for name, turn in turns.items():
            start = time.process_time()
            for _ in range(READS_PER_TURN):
                turn(number)
            n_tokens = READS_PER_TURN * args.rows * (1 if name == "sliding" else window)
            if number:  # the first round is the warm-up
                times[name].append(1e3 * (time.process_time() - start) / n_tokens)
    speedups = {
        name: statistics.median(s / c for s, c in zip(times["sliding"], times[name], strict=True)) for name in readers
    }
    of_model, hardware = (
        flops_per_token(model.config, args.rows, span, window, counting) for counting in ("model", "hardware")
    )
    return {
        "attention_span": span,
        "window": window,
        **{f"{name}_ms_per_token": float(f"{statistics.median(ms):.4g}") for name, ms in times.items()},
        "times_as_fast": round(speedups["cached"], 1),
        "times_as_fast_with_hidden_states": round(speedups["hidden"], 1),
        "flop_ratio": round(of_model[1] / of_model[0], 1),
        "flop_ratio_all_scores": round(hardware[1] / hardware[0], 1),
        "loss_differences": {name: float(f"{x:.2g}") for name, x in differences.items()},
    }


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 400, 800], help="attention spans")
    sizes = {"window": 128, "layers": 4, "width": 128, "heads": 4, "vocabulary": 256, "rows": 1, "rounds": 21}
    for name, default in {**sizes, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="auto", help="model.attention_backend")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {name: getattr(args, name) for name in [*sizes, "attention"]}
    for span in args.lengths:
        print(json.dumps({**measure(args, span), "settings": settings, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
