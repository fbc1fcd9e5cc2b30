"""Measure gradients, relative updates and position scores during a pretraining run, by kind of parameter and layer.

python benchmarks/quality/gradients.py --config configs/pretrain/unigram_plateau.yaml --steps 0 50 200 1000 --out published.jsonl
python benchmarks/quality/gradients.py --config configs/pretrain/unigram_plateau.yaml model.init_scheme=local --out ...

Trains in one process, and writes one JSON line for each of the `--steps`:

    loss                loss of the batch
    gradient            root mean square of the gradient before clipping, by kind of parameter and layer
    update              root mean square of the change of a parameter, divided by the root mean square of the parameter. Adam divides
                        gradients by their size, so a parameter with a small gradient may have a large update.
    position_scores     by layer and head: how much the position score of a query without content varies with the distance (standard
                        deviation over distances from -63 to 64, in nats). 0: the head attends to all distances equally.
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
from xlpre.model.positions import PositionTerm, sinusoid_table
from xlpre.training.distributed import seed_step
from xlpre.training.lr_schedule import learning_rate
from xlpre.training.optimizer import build_optimizer, set_lr

MAX_DISTANCE = 64
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


def train_and_measure(config: PretrainConfig, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Train up to the largest of `steps`. Return the JSON line of each step in `steps`."""
    inputs = RunInputs(config)
    torch.manual_seed(config.seed)
    shape, two_streams = inputs.weight_init.model_config, inputs.objective.two_streams
    model = inputs.weight_init.build_model(partial(LanguageModel, shape, two_streams, config.objective.next_sentence))
    optimizer = build_optimizer(model, config.optim, clip_and_skip=True)
    rows = range(config.train.global_batch_size)
    memory: Any = model.backbone.initial_memory(len(rows))
    lines = []
    for step in range(max(steps) + 1):
        seed_step(config.seed, step, 0)
        set_lr(optimizer, learning_rate(config.schedule, config.optim.lr, step, config.train.steps))
        loss, memory, *others = model(inputs.loader.batch(step, rows), memory)
        optimizer.zero_grad()
        sum(others, start=loss).backward()
        is_measured = step in steps
        gradients = {name: _rms(p.grad) for name, p in _watched_parameters(model)} if is_measured else {}
        previous = {name: p.detach().clone() for name, p in _watched_parameters(model)} if is_measured else {}
        optimizer.step()
        if is_measured:
            updates = {
                name: _rms(p.detach() - previous[name]) / _rms(previous[name]) for name, p in _watched_parameters(model)
            }
            scores = _position_scores(model)
            lines.append(
                {"step": step, "loss": loss.item(), "gradient": gradients, "update": updates, "position_scores": scores}
            )
            print(f"step {step:,}: loss {loss.item():.3f}", flush=True)
    return lines


def _watched_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters whose kind is in KINDS, each with a name such as `query, layer 0`."""
    watched = []
    for name, parameter in model.named_parameters():
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if kind:
            watched.append((f"{kind}, layer {name.partition('layers.')[2].partition('.')[0]}", parameter))
    return watched


def _rms(value: Tensor | None) -> float:
    return 0.0 if value is None else value.detach().square().mean().sqrt().item()


@torch.no_grad()
def _position_scores(model: nn.Module) -> list[list[float]]:
    """Return, by layer and head, the standard deviation over distances of the position score of a query without content."""
    deviations = []
    for term in (module for module in model.modules() if isinstance(module, PositionTerm)):
        width = term.key.weight.size(1)
        table = sinusoid_table(
            MAX_DISTANCE, MAX_DISTANCE, width, None, device=torch.device("cpu"), dtype=torch.float32
        )[0]
        keys = (table @ term.key.weight.T).view(len(table), term.n_head, -1)
        scores = torch.einsum("rhe,he->hr", keys, term.r_bias) / keys.size(-1) ** 0.5
        deviations.append([round(value, 5) for value in scores.std(1).tolist()])
    return deviations


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML file, see configs/")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 50, 200, 500, 1000], help="steps to measure")
    parser.add_argument("--out", type=Path, required=True, help="file for the lines")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    lines = train_and_measure(load_config(PretrainConfig, args.config, args.settings), args.steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(to_jsonl(lines), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
