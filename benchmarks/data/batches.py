"""Throughput of batches from a token store on one core.

python benchmarks/data/batches.py

Writes a store of random text in a temporary folder, reads it by memory map, and prints one JSON line with

- window tokens per CPU second for each objective (median of several turns),
- the same for permutation if masks (T, T) and one-hot targets are also built, as in other loaders,
- microseconds per permutation row of each stage of the loader.

A turn measures every kind of batch once. Text is read in lanes: a lane is a row of the batch that reads consecutive windows.

The defaults are those of XLNet: rows of 512 tokens, half of them reused; one target in six tokens; spans of up to five words; sentence
pairs; bidirectional data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.batch import Batch
from xlpre.data.lanes import Lanes
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.data_loader import Loader, batch_from_inputs
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective
from xlpre.objectives.target_sampling import SpanSampler
from xlpre.text import special_tokens

VOCABULARY, WORD_START_FRACTION, SENTENCE_LEN, DOCUMENT_LEN = 32_000, 0.65, 28, 700  # lengths: means, in tokens


def random_split(folder: Path, n_tokens: int) -> tuple[SplitData, np.ndarray]:
    """Return memory-mapped random tokens with Zipf frequencies, and a mask over the vocabulary of the tokens that start a word."""
    rng = np.random.default_rng(0)
    vocabulary = np.arange(len(special_tokens.SPECIAL_TOKENS), VOCABULARY)
    tokens = rng.choice(vocabulary, n_tokens, p=(1 / vocabulary) / (1 / vocabulary).sum()).astype(np.uint16)
    sentences = np.unique(np.append(rng.integers(1, n_tokens, n_tokens // SENTENCE_LEN), n_tokens))
    documents = np.unique(np.append(rng.choice(sentences, n_tokens // DOCUMENT_LEN), n_tokens))
    arrays = {"tokens": tokens, "sentence_ends": sentences, "document_ends": documents}
    for name, array in arrays.items():
        array.tofile(folder / name)
    mapped = {name: np.memmap(folder / name, array.dtype, "r") for name, array in arrays.items()}
    return SplitData(**mapped), rng.random(VOCABULARY) < WORD_START_FRACTION


def make_loader(split: SplitData, starts_word: np.ndarray, objective: str, window: int, rows: int) -> Loader:
    """Return a loader of batches for an objective, with XLNet's defaults for the given window."""
    data = DataConfig(seq_len=window, reuse_len=window if objective == "causal" else window // 2)
    lanes = Lanes(
        split,
        rows,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=data.windows_per_run,
        bidirectional=data.bidirectional,
        seed=1,
    )
    return Loader(lanes, data, build_objective(ObjectiveConfig(name=objective), data, starts_word), seed=1)


def dense_masks(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask (B, T, T) and the one-hot targets (B, P, T) of a batch."""
    mask = (batch.query_rank[:, :, None] <= batch.key_rank[:, None, :]).float()
    return mask, torch.nn.functional.one_hot(batch.target_positions, batch.input_ids.size(1)).float()


def time_stages(split: SplitData, starts_word: np.ndarray, window: int, rows: int, step: int) -> dict[str, float]:
    """Build one batch of permutation rows, and return the CPU seconds of each stage."""
    loader, config, lanes = make_loader(split, starts_word, "permutation", window, rows), ObjectiveConfig(), range(rows)
    data, sampler = DataConfig(seq_len=window, reuse_len=window // 2), SpanSampler(config, starts_word)
    objective = build_objective(config, data, starts_word)
    for lane in lanes:
        loader.lanes.location(
            lane, step
        )  # not timed: finds the next passage of a lane, which training does at one step in 128 only
    seconds = {}

    def timed(stage: str, function: Callable):  # noqa: ANN202
        start = time.process_time()
        result = function()
        seconds[stage] = time.process_time() - start
        return result

    def make_rng() -> RowRng:
        rng = RowRng(1, lanes, step)
        rng.uniform(1)  # the first call draws a whole block of numbers
        return rng

    locations = timed("lanes", lambda: [loader.lanes.location(lane, step) for lane in lanes])
    rng = timed("random numbers", make_rng)
    windows = timed("layout", lambda: build_windows(locations, data, rng))
    timed("targets", lambda: sampler.sample_targets(windows, rng))
    rng = make_rng()
    inputs = timed("order and ranks", lambda: objective.build_inputs(windows, rng))
    seconds["order and ranks"] -= seconds["targets"]
    timed("tensors", lambda: batch_from_inputs(windows, inputs))
    return seconds


def measure_throughput(make_batch: dict[str, Callable], n_tokens: int, n_batches: int, turns: int) -> dict[str, float]:
    """Return window tokens per CPU second of each kind of batch: the median over turns.

    Args:
        make_batch: functions that build the batch of a step, by the name of the kind of batch.
        n_tokens: window tokens of a batch.
        n_batches: batches of each kind per turn.
        turns: number of turns.
    """
    rates: dict[str, list[float]] = {name: [] for name in make_batch}
    for turn in range(turns):
        for name, make in make_batch.items():
            make(0)
            start = time.process_time()
            for step in range(turn * n_batches, (turn + 1) * n_batches):
                make(step)
            rates[name].append(n_tokens * n_batches / (time.process_time() - start))
    return {name: round(statistics.median(of_name)) for name, of_name in rates.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=512, help="tokens per row")
    parser.add_argument("--rows", type=int, default=32, help="rows per batch")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens of the store")
    parser.add_argument("--batches", type=int, default=10, help="batches of each kind per turn")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        split, starts_word = random_split(Path(folder), args.tokens)
        shape = {"window": args.window, "rows": args.rows}
        make_batch: dict[str, Callable] = {}
        for name in ("permutation", "denoising", "causal"):
            loader = make_loader(split, starts_word, name, **shape)
            make_batch[name] = lambda step, loader=loader: loader.batch(step, range(args.rows))
        make_batch["permutation with dense masks"] = lambda step: dense_masks(make_batch["permutation"](step))
        rates = measure_throughput(make_batch, args.window * args.rows, args.batches, args.turns)
        stages = [time_stages(split, starts_word, step=step, **shape) for step in range(args.turns * args.batches)]
    microseconds = {
        stage: round(statistics.median(seconds[stage] for seconds in stages) / args.rows * 1e6, 2)
        for stage in stages[0]
    }
    line = {
        "benchmark": "batches on one core",
        **shape,
        "tokens_per_cpu_second": rates,
        "microseconds_per_permutation_row": microseconds,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
