"""How fast finished batches come out of a store, on one core.

python benchmarks/data/batches.py

Makes a store of random text in a temporary folder, reads it through a memory map, and prints one JSON line: window tokens a CPU second for
each objective (the median of several turns), with the masks (T, T) and one-hot targets that other loaders hand over for comparison, and
the microseconds that each stage of a permutation row takes. The defaults are XLNet's: rows of 512, half of them read again, one token
in six a target, spans of up to five words, pairs, both directions.
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

VOCAB, WORD_STARTS, SENTENCE, DOCUMENT = 32_000, 0.65, 28, 700  # pieces, share of them, mean lengths in tokens


def random_part(folder: Path, n_tokens: int) -> tuple[SplitData, np.ndarray]:
    """Text of Zipf's frequencies as memory-mapped arrays, and which pieces start a word."""
    rng = np.random.default_rng(0)
    pieces = np.arange(len(special_tokens.SPECIAL_TOKENS), VOCAB)
    tokens = rng.choice(pieces, n_tokens, p=(1 / pieces) / (1 / pieces).sum()).astype(np.uint16)
    sentences = np.unique(np.append(rng.integers(1, n_tokens, n_tokens // SENTENCE), n_tokens))
    documents = np.unique(np.append(rng.choice(sentences, n_tokens // DOCUMENT), n_tokens))
    arrays = {"tokens": tokens, "sentence_ends": sentences, "document_ends": documents}
    for name, array in arrays.items():
        array.tofile(folder / name)
    mapped = {name: np.memmap(folder / name, array.dtype, "r") for name, array in arrays.items()}
    return SplitData(**mapped), rng.random(VOCAB) < WORD_STARTS


def loader_of(part: SplitData, starts_word: np.ndarray, name: str, window: int, rows: int) -> Loader:
    """The loader of one objective."""
    data = DataConfig(seq_len=window, reuse_len=window if name == "causal" else window // 2)
    lanes = Lanes(
        part,
        rows,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=data.windows_per_run,
        bidirectional=data.bidirectional,
        seed=1,
    )
    return Loader(lanes, data, build_objective(ObjectiveConfig(name=name), data, starts_word), seed=1)


def dense(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask (B, T, T) and the one-hot targets (B, P, T) of a batch, which ours never holds."""
    mask = (batch.query_rank[:, :, None] <= batch.key_rank[:, None, :]).float()
    return mask, torch.nn.functional.one_hot(batch.target_positions, batch.input_ids.size(1)).float()


def stages(part: SplitData, starts_word: np.ndarray, window: int, rows: int, step: int) -> dict[str, float]:
    """CPU seconds of each stage of one batch of permutation rows."""
    loader, config, lanes = loader_of(part, starts_word, "permutation", window, rows), ObjectiveConfig(), range(rows)
    data, sampler = DataConfig(seq_len=window, reuse_len=window // 2), SpanSampler(config, starts_word)
    objective = build_objective(config, data, starts_word)
    for lane in lanes:
        loader.lanes.location(lane, step)  # as in training, where a lane moves to another run at one step in 128
    took = {}

    def timed(stage: str, call: Callable):  # noqa: ANN202
        since = time.process_time()
        result = call()
        took[stage] = time.process_time() - since
        return result

    def new_draws() -> RowRng:
        rng = RowRng(1, lanes, step)
        rng.uniform(1)  # the first number makes all of them
        return rng

    places = timed("lanes", lambda: [loader.lanes.location(lane, step) for lane in lanes])
    rng = timed("random numbers", new_draws)
    windows = timed("layout", lambda: build_windows(places, data, rng))
    timed("targets", lambda: sampler.sample_targets(windows, rng))
    rng = new_draws()
    examples = timed("order and ranks", lambda: objective.build_inputs(windows, rng))
    took["order and ranks"] -= took["targets"]
    timed("tensors", lambda: batch_from_inputs(windows, examples))
    return took


def speeds(loaders: dict[str, Callable], tokens: int, batches: int, turns: int) -> dict[str, float]:
    """Window tokens a CPU second of each contender, which take turns."""
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(turns):
        for name, make in loaders.items():
            make(0)
            since = time.process_time()
            for step in range(turn * batches, (turn + 1) * batches):
                make(step)
            rates[name].append(tokens * batches / (time.process_time() - since))
    return {name: round(statistics.median(found)) for name, found in rates.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens of the store")
    parser.add_argument("--batches", type=int, default=10, help="batches of a turn")
    parser.add_argument("--turns", type=int, default=7)
    words = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        part, starts_word = random_part(Path(folder), words.tokens)
        shape = {"window": words.window, "rows": words.rows}
        contenders: dict[str, Callable] = {}
        for name in ("permutation", "denoising", "causal"):
            loader = loader_of(part, starts_word, name, **shape)
            contenders[name] = lambda step, loader=loader: loader.batch(step, range(words.rows))
        contenders["permutation with dense masks"] = lambda step: dense(contenders["permutation"](step))
        rates = speeds(contenders, words.window * words.rows, words.batches, words.turns)
        took = [stages(part, starts_word, step=step, **shape) for step in range(words.turns * words.batches)]
    row = {stage: round(statistics.median(t[stage] for t in took) / words.rows * 1e6, 2) for stage in took[0]}
    print(
        json.dumps(
            {
                "what": "finished batches on one core",
                **shape,
                "tokens_per_cpu_second": rates,
                "microseconds_of_a_permutation_row": row,
            }
        )
    )


if __name__ == "__main__":
    main()
