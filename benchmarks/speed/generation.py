"""Compare the speed of generation with a cache and without one, by the length of the text.

python benchmarks/speed/generation.py [--model FOLDER] [--objectives causal permutation] [--lengths 64 128 256 512 1024] [--rounds 11]

The model is FOLDER, or one of 4 layers with random weights for each objective. Prompts are random tokens. Ways to compute the next token:

    cached    xlpre's readers (xlpre/inference/token_readers.py): of a causal model, a token at a time; of a permutation model, a block of
              --free-len tokens, which includes reading the context once
    uncached  the whole text for each token, which is also what a permutation model does with free_len=1

A causal model sees the whole text in both ways. Before timing, the logits of both ways must agree. The line `mem_len` times `cached` with a
memory of --mem-len tokens after each length: a text longer than the memory costs no more.

Prints one JSON line per objective and length: the median tokens per second of processor time of each way, and how
many times as fast `cached` is (median over rounds). The ways take turns in one process.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.batch import causal_batch, make_batch
from xlpre.conversion.model_folder import load_folder
from xlpre.inference.token_readers import CausalReader, PermutationReader, TokenReader
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel

TOLERANCE = 1e-3  # largest difference between two logits
TOKENS_PER_TURN = 16  # of `cached` with a causal model


def random_model(objective: str) -> LanguageModel:
    """Return a model of 4 layers with random weights."""
    torch.manual_seed(0)
    shape = ModelConfig(vocab_size=8000, n_layer=4, d_model=192, n_head=4, d_inner=768, mem_len=64)
    return LanguageModel(shape, two_streams=objective == "permutation").eval()


def make_reader(model: LanguageModel, objective: str, n_tokens: int, free_len: int, mem_len: int | None) -> TokenReader:
    """Return a reader that sees all of up to `n_tokens` tokens, or `mem_len` tokens before the window."""
    if objective == "causal":
        return CausalReader(model, mem_len or n_tokens, window=128)
    return PermutationReader(model, 0, mem_len or n_tokens, free_len)


def uncached_logits(model: LanguageModel, objective: str, text: Tensor, n_context: int) -> Tensor:
    """Return the logits (B, V) of the token after a text, from one pass over the whole text.

    In a permutation model, the first `n_context` tokens see each other, and the others the tokens before them.
    """
    if objective == "causal":
        batch = causal_batch(text, 1)
    else:
        text = torch.cat([text, text[:, :1]], dim=1)  # the position of the next token, whose content no query sees
        rank = (torch.arange(text.size(1), dtype=torch.int32) - n_context + 1).clamp(min=0).expand_as(text)
        batch = make_batch(text, rank.clamp(min=1), rank, torch.full_like(text[:, :1], text.size(1) - 1))
    return model.logits(batch, model.backbone.initial_memory(len(text), mem_len=0))[0][:, 0]


def check_logits(model: LanguageModel, objective: str, text: Tensor, free_len: int) -> float:
    """Return the largest difference between logits of both ways after a text and after a few more tokens."""
    more = torch.randint(9, model.config.vocab_size, (len(text), min(free_len - 1, 4)))
    reader = make_reader(model, objective, text.size(1) + more.size(1), free_len, None)
    cached = [reader.start(text), *(reader.step(token) for token in more.unbind(1))]
    whole, n_context = torch.cat([text, more], dim=1), text.size(1)
    expected = [uncached_logits(model, objective, whole[:, : n_context + n], n_context) for n in range(len(cached))]
    return max(float((a - b).abs().max()) for a, b in zip(cached, expected, strict=True))


def measure(args: argparse.Namespace, model: LanguageModel, objective: str, length: int) -> dict[str, object]:
    """Check the logits and time the ways after a text of `length` tokens. Return the JSON line."""
    text = torch.randint(9, model.config.vocab_size, (args.rows, length))
    free_len = args.free_len if objective == "permutation" else TOKENS_PER_TURN
    difference = check_logits(model, objective, text, free_len)
    if difference > TOLERANCE:
        raise SystemExit(f"The logits differ by {difference:.2g}, so nothing is timed.")
    token = text[:, 0]
    whole = make_reader(model, objective, length + free_len, free_len, None)
    limited = make_reader(model, objective, length, free_len, args.mem_len)

    def steps(reader: TokenReader, prompt: Tensor) -> float:
        """Return the seconds per token of reading `free_len` tokens, and in a permutation model also the context before them."""
        if objective == "causal":
            reader.start(prompt)
        start = time.process_time()
        if objective == "permutation":
            reader.start(prompt)  # gives the first token
        for _ in range(free_len - (objective == "permutation")):
            reader.step(token)
        return (time.process_time() - start) / (free_len * args.rows)

    def uncached() -> float:
        """Return the seconds per token of reading the whole text for each token."""
        start = time.process_time()
        uncached_logits(model, objective, text, text.size(1))
        return (time.process_time() - start) / args.rows

    turns: dict[str, Callable[[], float]] = {
        "cached": lambda: steps(whole, text),
        "mem_len": lambda: steps(limited, text[:, -args.mem_len :]),
        "uncached": uncached,
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(args.rounds + 1):
        for name, turn in turns.items():
            duration = turn()
            if number:  # the first round is the warm-up
                seconds[name].append(duration)
    ratios = [u / c for u, c in zip(seconds["uncached"], seconds["cached"], strict=True)]
    return {
        "objective": objective,
        "length": length,
        "tokens_per_second": {name: float(f"{1 / statistics.median(times):.3g}") for name, times in seconds.items()},
        "times_as_fast": round(statistics.median(ratios), 1),
        "difference": float(f"{difference:.2g}"),
    }


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="folder of a causal or permutation model")
    parser.add_argument("--objectives", nargs="+", choices=("causal", "permutation"), default=["causal", "permutation"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="tokens of the text")
    for name, default in {"mem-len": 128, "free-len": 16, "rows": 1, "rounds": 11, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model:
        folder = load_folder(args.model)
        models = {folder.objective: folder.model()}
    else:
        models = {objective: random_model(objective) for objective in args.objectives}
    settings = {name: getattr(args, name) for name in ("mem_len", "free_len", "rows", "rounds", "threads")}
    for objective, model in models.items():
        shape = {name: getattr(model.config, name) for name in ("n_layer", "d_model", "vocab_size")}
        for length in args.lengths:
            line = {
                **measure(args, model, objective, length),
                "settings": {**shape, **settings},
                "torch": torch.__version__,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
