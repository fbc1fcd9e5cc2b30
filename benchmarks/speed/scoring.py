"""Compare the speed of scoring texts with that of a loop over the texts with Hugging Face's XLNetLMHeadModel.

python benchmarks/speed/scoring.py [--model FOLDER] [--modes any-order pll causal] [--texts 512] [--min-len 8] [--max-len 22] [--rounds 5]

Both use the same weights: those of FOLDER, or random weights of a model of 4 layers. The texts are random tokens. The lengths are uniform
between --min-len and --max-len; the sentences of BLiMP have about 14 tokens. Ways to score:

    batched   xlpre.inference.score on all texts
    single    xlpre.inference.score on one text at a time
    hf        one text at a time with XLNetLMHeadModel, in one forward pass with a perm_mask: from left to right (any-order, one order;
              causal), or with a row per token that hides this token (pll)
    hf_loop   one token at a time, as in Hugging Face's documentation of XLNet: a forward pass per token (any-order, pll)

Before timing, the scores must agree. Prints one JSON line per mode: the median texts per second of processor time of each way, and how
many times as fast `batched` is (median over rounds). The ways take turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow each other down severely on shared cores

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.contenders import require_transformers
from xlpre.common.cli_main import run_main
from xlpre.conversion.hf import write_model
from xlpre.conversion.model_folder import ModelFolder, load_folder
from xlpre.inference import score
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.text.special_tokens import CLS, EOD, SEP

TOLERANCE = 1e-3  # largest difference between two log-likelihoods per token, in nats
OBJECTIVES = {"any-order": "permutation", "pll": "permutation", "causal": "causal"}


class Vocabulary:
    """Vocabulary of texts that are given as token ids."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def decode(self, ids: np.ndarray) -> str:
        """Return an empty text."""
        return ""


def random_folder() -> ModelFolder:
    """Return a model of 4 layers with random weights."""
    torch.manual_seed(0)
    shape = ModelConfig(vocab_size=8000, n_layer=4, d_model=192, n_head=4, d_inner=768, mem_len=64)
    weights = {name: p.detach() for name, p in LanguageModel(shape, two_streams=True).named_parameters()}
    return ModelFolder(shape, weights, None, "permutation", {}, "xlpre")


def huggingface_model(folder: ModelFolder) -> torch.nn.Module:
    """Return the weights of a folder as XLNetLMHeadModel."""
    from transformers import XLNetLMHeadModel

    with tempfile.TemporaryDirectory() as path:
        write_model(Path(path), folder.config, folder.weights, folder.objective)
        return XLNetLMHeadModel.from_pretrained(path).eval()


def huggingface_score(model: torch.nn.Module, mode: str, text: np.ndarray, by_token: bool = False) -> float:
    """Return the log-likelihood of a text. With `by_token`, each token has a forward pass of its own."""
    n, tokens = len(text), torch.from_numpy(text)
    if mode == "causal":
        ids = torch.cat([torch.tensor([EOD]), tokens[:-1]])[None]
        inputs = {"perm_mask": torch.ones(n, n).triu(1)[None], "token_type_ids": torch.zeros_like(ids)}
    else:
        ids = torch.cat([tokens, torch.tensor([SEP, CLS])])[None]
        inputs = {"token_type_ids": torch.tensor([[0] * (n + 1) + [2]])}
    if mode == "any-order":
        mask = torch.ones(n + 2, n + 2).triu()  # a token sees the tokens before it, and <sep> and <cls>
        mask[:, n:] = 0
        mask[n:, :n] = 1
        inputs |= {"perm_mask": mask[None], "target_mapping": torch.eye(n, n + 2)[None]}
    if mode == "pll":
        hidden = torch.eye(n, n + 2)[:, None]  # in row i, no token sees token i
        ids, inputs = ids.expand(n, -1), {"token_type_ids": inputs["token_type_ids"].expand(n, -1)}
        inputs |= {"perm_mask": hidden.expand(-1, n + 2, -1), "target_mapping": hidden}
    if by_token:
        rows = range(n) if mode == "pll" else [0] * n
        passes = [{name: x[row : row + 1] for name, x in {"input_ids": ids, **inputs}.items()} for row in rows]
        if mode == "any-order":
            passes = [{**one, "target_mapping": one["target_mapping"][:, i : i + 1]} for i, one in enumerate(passes)]
        logits = torch.cat([model(**one, use_mems=False).logits[0] for one in passes])
    else:
        logits = model(ids, **inputs, use_mems=False).logits.view(n, -1)
    return float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum())


def measure(folder: ModelFolder, mode: str, texts: list[np.ndarray], rounds: int) -> dict[str, object]:
    """Check the scores and time the ways for a mode. Return the JSON line."""
    folder = dataclasses.replace(folder, objective=OBJECTIVES[mode])
    model, external = folder.model(), huggingface_model(folder)
    ours = partial(
        score, model, Vocabulary(folder.config.vocab_size), mode=mode, objective=folder.objective, n_orders=1
    )  # type: ignore[arg-type]
    ways: dict[str, Callable[[], list[float]]] = {
        "batched": lambda: [text.log_likelihood for text in ours(texts)],
        "single": lambda: [ours([text])[0].log_likelihood for text in texts],
        "hf": lambda: [huggingface_score(external, mode, text) for text in texts],
    }
    if mode != "causal":
        ways["hf_loop"] = lambda: [huggingface_score(external, mode, text, by_token=True) for text in texts]
    results = {name: np.array(way()) for name, way in ways.items()}  # also the warm-up
    lengths = np.array([len(text) for text in texts])
    difference = max(float(np.abs((results["batched"] - other) / lengths).max()) for other in results.values())
    if difference > TOLERANCE:
        raise SystemExit(f"The scores differ by {difference:.2g} nats per token, so nothing is timed.")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {
        "mode": mode,
        "texts_per_second": {name: round(len(texts) / statistics.median(times)) for name, times in seconds.items()},
        "times_as_fast": {
            name: round(statistics.median(t / b for t, b in zip(seconds[name], seconds["batched"], strict=True)), 1)
            for name in ways
            if name != "batched"
        },
        "difference_per_token": float(f"{difference:.2g}"),
    }


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="folder of a permutation model")
    parser.add_argument("--modes", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    for name, default in {"texts": 512, "min-len": 8, "max-len": 22, "rounds": 5, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    require_transformers()
    torch.set_num_threads(args.threads)
    folder = load_folder(args.model) if args.model else random_folder()
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.min_len, args.max_len + 1, args.texts)
    texts = [rng.integers(9, folder.config.vocab_size, length) for length in lengths]
    shape = {name: getattr(folder.config, name) for name in ("n_layer", "d_model", "vocab_size")}
    settings = {name: getattr(args, name) for name in ("texts", "min_len", "max_len", "rounds", "threads")}
    for mode in args.modes:
        line = {
            **measure(folder, mode, texts, args.rounds),
            "settings": {**shape, **settings},
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_main(main)
