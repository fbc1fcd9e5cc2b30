"""Every ablation is a few overrides: it trains, saves a model folder that loads, and changes the loss."""

import json

from tests.conftest import has_bf16
from tests.integration.conftest import run
from xlpre.conversion.model_folder import load_folder
from xlpre.training.metrics_writer import read_metrics

ABLATIONS = [
    {"model__mem_len": 0},
    {"objective__max_span": 1},
    {"objective__span_ends": "as_released"},
    {"data__bidirectional": "false"},
    {"data__pairs": "false"},
    {"objective__name": "denoising"},
    {"objective__name": "causal", "data__reuse_len": 32},
    {"model__relative_segments": "false"},
    {"model__untie_r": "false"},
    {"model__positions": "shaw", "model__n_positions": 24},
    {"model__positions": "sinusoidal"},
    {"model__positions": "learned", "model__n_positions": 48},
    {"model__norm": "pre"},
    {"model__feed_forward": "swiglu"},
    {"model__attention_span": "same_length"},
    {"model__cutoffs": "[60,150]", "model__div_value": 2},
    {"model__cutoffs": "[60,150]", "model__div_value": 2, "deepspeed.zero_optimization.stage": 3},
    {"model__tie_embedding": "false", "deepspeed.zero_optimization.stage": 3},
    {"model__d_embed": 12, "deepspeed.zero_optimization.stage": 3},
    {"memory__initial": "zeros"},
    *([{"train__precision": "bf16"}] if has_bf16() else []),
    {"train__hours": 0.0001},
    {"objective__next_sentence": "true"},
    {"objective__next_sentence": "true", "deepspeed.zero_optimization.stage": 3},
    {"deepspeed.zero_optimization.stage": 2},
    {"deepspeed.zero_optimization.stage": 3},
]


def test_an_ablation_is_a_single_override(make_args, tmp_path):
    jobs = [make_args(f"run{number}", train__steps=2, **changes) for number, changes in enumerate(ABLATIONS)]
    result = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    losses = {}
    for number, changes in enumerate(ABLATIONS):
        load_folder(tmp_path / f"run{number}" / "model")
        lines = read_metrics(tmp_path / f"run{number}")
        losses[str(changes)] = next(line["loss"] for line in reversed(lines) if "loss" in line)
    # equal on purpose: two pairs with and without ZeRO stage 3; a time budget and ZeRO stages 2 and 3
    assert len(set(losses.values())) >= len(ABLATIONS) - 4, losses
    assert abs(losses[str(ABLATIONS[-1])] - losses[str(ABLATIONS[-2])]) < 1e-5
    for setting in ("cutoffs", "next_sentence"):
        plain, partitioned = (loss for changes, loss in losses.items() if setting in changes)
        assert abs(plain - partitioned) < 1e-5
