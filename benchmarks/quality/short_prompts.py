"""Measure how well a model predicts the text after a prompt, by the length of the prompt, with and without padding.

python benchmarks/quality/short_prompts.py MODEL STORE [--lengths 0 4 8 16 32 64] [--padding 64] [--texts 192] [--tokens 32] [--free-len 32]

The prompts are the first tokens of validation documents of the store. The padding is other validation text, which ends
with `<eod>`. The model reads the document token by token, as in generation (xlpre/inference/token_readers.py). Prints
one JSON line per length of the prompt and of the padding: the mean loss in nats of the tokens 1 to 4, 5 to 16 and 17 to
the last after the prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.conversion.model_folder import load_folder
from xlpre.data.store import SplitData, TokenStore
from xlpre.inference.generation import GenerationConfig, build_reader
from xlpre.model.language_model import LanguageModel
from xlpre.text.special_tokens import EOD

BATCH_SIZE = 64
PARTS = {"1-4": slice(0, 4), "5-16": slice(4, 16), "17-": slice(16, None)}  # tokens after the prompt


def sample_texts(split: SplitData, n_texts: int, n_tokens: int, n_padding: int) -> list[np.ndarray]:
    """Return two arrays: starts of documents (B, n_tokens), and padding (B, n_padding) from other positions."""
    rng, tokens = np.random.default_rng(0), np.asarray(split.tokens).astype(np.int64)
    ends = np.asarray(split.document_ends)
    starts = np.append(0, ends[:-1])
    starts = rng.choice(starts[ends - starts > n_tokens], n_texts)
    elsewhere = rng.integers(0, len(tokens) - n_padding, n_texts)
    return [
        tokens[begin[:, None] + np.arange(length)] for begin, length in ((starts, n_tokens), (elsewhere, n_padding))
    ]


def losses(
    model: LanguageModel, objective: str, padding: np.ndarray, texts: np.ndarray, n_known: int, free_len: int
) -> torch.Tensor:
    """Return the losses (B, n) of the tokens of `texts` after the first `n_known`."""
    eod = np.full((len(texts), 1), EOD)
    prompts = torch.from_numpy(np.concatenate([padding, eod, texts[:, :n_known]], axis=1))
    targets = torch.from_numpy(texts[:, n_known:])
    parts = []
    for prompt, following in zip(prompts.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True):
        reader = build_reader(model, objective, GenerationConfig(free_len=free_len))
        logits = [reader.start(prompt), *(reader.step(token) for token in following[:, :-1].unbind(1))]
        parts.append(F.cross_entropy(torch.stack(logits, dim=2), following, reduction="none"))
    return torch.cat(parts)


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 4, 8, 16, 32, 64])
    for name, default in {"padding": 64, "texts": 192, "tokens": 32, "free-len": 32, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, split = load_folder(args.model), TokenStore(args.store).validation
    model = folder.model()
    texts, padding = sample_texts(split, args.texts, max(args.lengths) + args.tokens, args.padding)
    for n_known in args.lengths:
        for n_padding in (0, args.padding):
            text = texts[:, : n_known + args.tokens]
            result = losses(model, folder.objective, padding[:, :n_padding], text, n_known, args.free_len)
            line = {"known": n_known, "padding": n_padding, "texts": args.texts, "free_len": args.free_len}
            line |= {"loss": {name: round(float(result[:, part].mean()), 3) for name, part in PARTS.items()}}
            print(json.dumps({"objective": folder.objective, **line}), flush=True)


if __name__ == "__main__":
    main()
