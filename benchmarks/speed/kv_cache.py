"""Reading text at evaluation: with memory's keys and values kept, against a window that is recomputed for every token.

python benchmarks/speed/kv_cache.py [--lengths 64 128 256 400 800] [--window 128] [--layers 4] [--width 128] [--attention sdpa]

A causal model sees, for every token, as many keys as the attention length says. Three ways to read a text with it:

    cached   window after window, with keys and values of the tokens before (xlpre/model/kv_cache.py)
    hidden   the same with their hidden states, as in training
    sliding  a window for every token, which then moves on by one; keys of distances are kept as in `cached`

Before anything is timed, losses of `cached` and `sliding` must agree where both see the same: at any depth until the text is longer than
the attention length (from then on `cached` looks farther back, layer by layer), and with one layer everywhere.

One JSON line an attention length: milliseconds of processor time a token (medians of turns taken in one process), how many times as
fast as `sliding` (median of pairs), and the ratio of operations: of those needed, and of those that score all keys and distances.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down many times on shared cores

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.planning.flops import BatchShape, inference_flops
from xlpre.batch import Batch
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import BaseMemory, Memory, initial_memory

TOLERANCE = 1e-4  # of losses, in nats
CHECKED = 8  # tokens of each check
A_TURN = 4  # windows (tokens of `sliding`) one after the other, as they are read, before another way has its turn


def causal_batch(tokens: Tensor, n_targets: int) -> Batch:
    """Of tokens (B, T + 1): the last `n_targets` of the T after the first are predicted."""
    B, T = tokens.size(0), tokens.size(1) - 1
    place, of_rows = torch.arange(T).expand(B, -1), torch.zeros(B, dtype=torch.long)
    return Batch(
        input_ids=tokens[:, :-1],
        segment_ids=torch.zeros_like(place),
        query_rank=place.int() + 1,
        key_rank=place.int(),
        target_positions=place[:, T - n_targets :],
        targets=tokens[:, T + 1 - n_targets :],
        target_weights=torch.ones(B, n_targets),
        backward=of_rows.bool(),
        visible_mem_len=of_rows + 10**9,
        pair_label=of_rows,
        reuse_len=T,
    )


class Reader:
    """Reads rows of text, window after window."""

    def __init__(self, model: LanguageModel, text: Tensor, window: int, keep: Callable[[Memory], BaseMemory]) -> None:
        self._model, self._text, self._window, self._at = model, text, window, 0
        self._past = keep(initial_memory(model.config, len(text)))

    def read(self) -> Tensor:
        """Losses (B, T) of the tokens after those of the next window."""
        tokens = self._text[:, self._at : self._at + self._window + 1]
        batch = causal_batch(tokens, tokens.size(1) - 1)
        hidden, self._past = self._model.backbone(batch, self._past)
        self._at += self._window
        return self._model.lm_head(hidden, batch.targets)


class Sliding:
    """Predicts one token of each row from a window of its own."""

    def __init__(self, model: LanguageModel, text: Tensor, length: int) -> None:
        self._model, self._text, self._length = model, text, length
        self._nothing = model.backbone.to_kv_cache(initial_memory(model.config, len(text), mem_len=0))

    def loss(self, place: int) -> Tensor:
        """(B,) losses of the token after `place`, from the last tokens up to it."""
        batch = causal_batch(self._text[:, max(0, place + 1 - self._length) : place + 2], 1)
        hidden, _ = self._model.backbone(batch, self._nothing)
        return self._model.lm_head(hidden, batch.targets)[:, 0]


def model_of(words: argparse.Namespace, length: int, n_layer: int) -> LanguageModel:
    """Every query sees `length` keys, with itself."""
    torch.manual_seed(0)
    shape = ModelConfig(
        vocab_size=words.vocabulary,
        n_layer=n_layer,
        d_model=words.width,
        n_head=words.heads,
        d_inner=4 * words.width,
        mem_len=length - 1,
        attention_span="same_length",
        relative_segments=False,
        attention=words.attention,
        init_std=0.1,  # so that what is seen changes losses
    )
    return LanguageModel(shape, two_streams=False).eval()


def largest_difference(words: argparse.Namespace, length: int, n_layer: int, begin: int, end: int) -> float:
    """Between losses of `cached` and `sliding` at places `begin` to `end` of a text."""
    model, window = model_of(words, length, n_layer), min(words.window, length)
    text = torch.randint(words.vocabulary, (words.rows, end + window + 1))
    reader = Reader(model, text, window, lambda memory: model.backbone.to_kv_cache(memory))
    losses = torch.cat([reader.read() for _ in range(-(-end // window))], 1)
    sliding = Sliding(model, text, length)
    places = torch.linspace(begin, end - 1, CHECKED).long().tolist()
    return max((losses[:, place] - sliding.loss(place)).abs().max().item() for place in places)


def operations(model: ModelConfig, rows: int, length: int, window: int, counting: str) -> tuple[float, float]:
    """A token, of `cached` and of `sliding`."""
    columns, n_layer = length - 1, model.n_layer
    reading = BatchShape(rows, window, columns, window, window, False, visible_fraction=length / (columns + window))
    rows_of_content = (n_layer - 1) * length  # the last layer computes one row
    seen = (n_layer - 1) * length * (length + 1) / 2 + length
    one = BatchShape(rows, length, 0, 1, length, False, visible_fraction=seen / (length * (rows_of_content + 1)))
    return inference_flops(model, reading, counting) / (rows * window), inference_flops(model, one, counting) / rows


def measure(words: argparse.Namespace, length: int) -> dict[str, object]:
    """One attention length."""
    differences = {
        "until cut": largest_difference(words, length, words.layers, 0, length),
        "one layer": largest_difference(words, length, 1, length, length + 2 * min(words.window, length)),
    }
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"losses do not agree, so nothing is timed: {differences}")
    window = min(words.window, length)
    model, filling = model_of(words, length, words.layers), -(-length // window)
    n_windows = filling + (words.rounds + 1) * A_TURN
    text = torch.randint(words.vocabulary, (words.rows, n_windows * window + 1))
    readers = {
        "cached": Reader(model, text, window, lambda memory: model.backbone.to_kv_cache(memory)),
        "hidden": Reader(model, text, window, lambda memory: memory),
    }
    for reader in readers.values():
        for _ in range(filling):  # memory is full then
            reader.read()
    sliding = Sliding(model, text, length)
    turns: dict[str, Callable[[int], object]] = {name: lambda _, r=r: r.read() for name, r in readers.items()}
    turns["sliding"] = lambda number: sliding.loss(length + number)
    took: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(words.rounds + 1):
        for name, turn in turns.items():
            begun = time.process_time()
            for _ in range(A_TURN):
                turn(number)
            tokens = A_TURN * words.rows * (1 if name == "sliding" else window)
            if number:  # the first warms up
                took[name].append(1e3 * (time.process_time() - begun) / tokens)
    ratios = {
        name: statistics.median(s / c for s, c in zip(took["sliding"], took[name], strict=True)) for name in readers
    }
    of_needed, of_all = (operations(model.config, words.rows, length, window, how) for how in ("needed", "executed"))
    return {
        "attention_length": length,
        "window": window,
        **{f"{name}_ms_a_token": float(f"{statistics.median(ms):.4g}") for name, ms in took.items()},
        "times_as_fast": round(ratios["cached"], 1),
        "times_as_fast_with_hidden_states": round(ratios["hidden"], 1),
        "flop_ratio": round(of_needed[1] / of_needed[0], 1),
        "flop_ratio_all_scores": round(of_all[1] / of_all[0], 1),
        "losses_differ_by": {name: float(f"{x:.2g}") for name, x in differences.items()},
    }


@torch.no_grad()
def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 400, 800])
    sizes = {"window": 128, "layers": 4, "width": 128, "heads": 4, "vocabulary": 256, "rows": 1, "rounds": 21}
    for name, default in {**sizes, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="auto", help="model.attention_backend")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    about = {name: getattr(words, name) for name in [*sizes, "attention"]}
    for length in words.lengths:
        print(json.dumps({**measure(words, length), "settings": about, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
