"""Where the gradient of a pretraining goes: its share of each kind of parameter, layer by layer, and how flat position scores are.

python benchmarks/quality/gradients.py --config configs/pretrain/plateau.yaml --steps 0 50 200 1000 --out reports/learning/gradients/published.jsonl
python benchmarks/quality/gradients.py --config configs/pretrain/plateau.yaml model.init_scheme=local --out ...

Trains in one process, and writes one JSON line for each of the `--steps`:

    loss                of the batch
    gradient            by kind and layer, the root mean square of the gradient's elements, before clipping
    update              the same of what the update changes, over the parameter's own: Adam divides a gradient by its size, so a small
                        gradient does not mean a small update
    position_scores     by layer and head, the standard deviation over distances (-63 to 64) of the score that a query without
                        content gives a key, in nats; 0 is a head that looks everywhere alike
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.config import PretrainConfig
from pretrain.trainer.inputs import RunInputs
from xlpre.common.cli_main import run_main
from xlpre.common.tables import to_jsonl
from xlpre.config.loader import load_config
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.model.positions import PositionTerm, sinusoid_table
from xlpre.training.distributed import seed_everything, seed_step
from xlpre.training.lr_schedule import learning_rate
from xlpre.training.optimizer import build_optimizer, set_lr

REACH = 64
KINDS = {
    "attention.query.": "query",
    "attention.key.": "key",
    "attention.value.": "value",
    "attention.output.": "output",
    "terms.position.key.": "position key",
    "terms.position.r_bias": "position bias",
    "terms.content.r_bias": "content bias",
    "feed_forward.inner.weight": "feed-forward, inner",
    "feed_forward.outer.weight": "feed-forward, outer",
}


def watch(config: PretrainConfig, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Train up to the last of `steps`, and look at each of them."""
    foundation = RunInputs(config)
    seed_everything(config.seed)
    shape, two_streams = foundation.weight_init.shape, foundation.objective.two_streams
    model = foundation.weight_init.build_model(
        partial(LanguageModel, shape, two_streams, config.objective.next_sentence)
    )
    optimizer = build_optimizer(model, config.optim, clip_and_skip=True)
    rows = range(config.train.global_batch_size)
    memory: Any = initial_memory(
        foundation.weight_init.shape, len(rows), device=torch.device("cpu"), dtype=torch.float32
    )
    lines = []
    for step in range(max(steps) + 1):
        seed_step(config.seed, step, 0)
        set_lr(optimizer, learning_rate(config.schedule, config.optim.lr, step, config.train.steps))
        loss, memory, *others = model(foundation.loader.batch(step, rows), memory)
        optimizer.zero_grad()
        sum(others, start=loss).backward()
        looking = step in steps
        gradients = {name: _size(p.grad) for name, p in _watched(model)} if looking else {}
        before = {name: p.detach().clone() for name, p in _watched(model)} if looking else {}
        optimizer.step()
        if looking:
            updates = {name: _size(p.detach() - before[name]) / _size(before[name]) for name, p in _watched(model)}
            scores = _position_scores(model)
            lines.append(
                {"step": step, "loss": loss.item(), "gradient": gradients, "update": updates, "position_scores": scores}
            )
            print(f"step {step:,}: loss {loss.item():.3f}", flush=True)
    return lines


def _watched(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    found = []
    for name, parameter in model.named_parameters():
        kind = next((kind for sign, kind in KINDS.items() if sign in name), None)
        if kind:
            found.append((f"{kind}, layer {name.partition('layers.')[2].partition('.')[0]}", parameter))
    return found


def _size(value: Tensor | None) -> float:
    return 0.0 if value is None else value.detach().square().mean().sqrt().item()


@torch.no_grad()
def _position_scores(model: nn.Module) -> list[list[float]]:
    told = []
    for term in (module for module in model.modules() if isinstance(module, PositionTerm)):
        width = term.key.weight.size(1)
        table = sinusoid_table(REACH, REACH, width, -1, device=torch.device("cpu"), dtype=torch.float32)[0]
        keys = (table @ term.key.weight.T).view(len(table), term.n_head, -1)
        scores = torch.einsum("rhe,he->hr", keys, term.r_bias) / keys.size(-1) ** 0.5
        told.append([round(value, 5) for value in scores.std(1).tolist()])
    return told


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 50, 200, 500, 1000])
    parser.add_argument("--out", type=Path, required=True, help="a file for the lines")
    parser.add_argument("words", nargs="*", metavar="key=value")
    said = parser.parse_intermixed_args(argv)
    lines = watch(load_config(PretrainConfig, said.config, said.words), said.steps)
    said.out.parent.mkdir(parents=True, exist_ok=True)
    said.out.write_text(to_jsonl(lines), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
