"""Every ablation is a few overrides: it trains, saves a model folder that loads, and changes the loss."""

import dataclasses
import json

from tests.conftest import has_bf16
from tests.integration.conftest import run
from xlpre.conversion.model_folder import load_folder
from xlpre.model.config import MemoryConfig, ModelConfig
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.training.metrics_writer import read_metrics

SHORT = {"train__steps": 2, "model__init_std": 0.1}  # attention has little influence on the loss with smaller weights
ZERO_3 = {"deepspeed.zero_optimization.stage": 3}
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
    {"model__tie_embedding": "false"},
    {"model__d_embed": 12},
    {"memory__initial": "zeros"},
    {"objective__next_sentence": "true"},
    {"objective__left_to_right": 0.5},
    {"objective__independent": 0.5},
    {"objective__name": "causal", "data__reuse_len": 32, "objective__loss_on": "second_half"},
    {"objective__partial_k": 3},
    {"objective__perm_size": 8},
    {"model__clamp_len": 4},
    {"model__qk_norm": "true"},
    {"model__norm": "pre", "model__final_norm": "true"},
    {"model__scale_embedding": "true"},
    {"model__cutoffs": "[60,150]", "model__div_value": 2, "model__tie_projections": "[false,true,true]"},
    {"model__init_scheme": "local"},
    {"memory__at_document_end": "cut"},
    *([{"train__precision": "bf16"}] if has_bf16() else []),
]
OTHER_SETTINGS = {  # sizes, numbers, and settings that do not change the model
    *("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "n_positions"),
    *("dropout", "dropatt", "init_std", "norm_eps", "attention_backend"),
}
# settings, and a change that does not change their losses
OPERATIONAL = [
    ({}, {"deepspeed.zero_optimization.stage": 2}),
    ({}, ZERO_3),
    *(
        (changes, changes | ZERO_3)
        for changes in ABLATIONS
        if changes.keys() & {"model__cutoffs", "model__tie_embedding", "model__d_embed", "objective__next_sentence"}
    ),
]


def test_each_setting_of_model_objective_and_memory_is_one_of_the_ablations():
    schemas = {"model": ModelConfig, "objective": ObjectiveConfig, "memory": MemoryConfig}
    fields = {f"{group}__{field.name}" for group, schema in schemas.items() for field in dataclasses.fields(schema)}
    covered = set().union(*ABLATIONS) | {f"model__{name}" for name in OTHER_SETTINGS}
    assert not fields - covered


def test_each_setting_of_an_ablation_changes_the_loss(make_args, tmp_path):
    runs = [{}, *ABLATIONS, *(changes for _, changes in OPERATIONAL)]
    jobs = [make_args(f"run{number}", **SHORT, **changes) for number, changes in enumerate(runs)]
    result = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    losses = {}
    for number, changes in enumerate(runs):
        load_folder(tmp_path / f"run{number}" / "model")
        lines = read_metrics(tmp_path / f"run{number}")
        losses[str(changes)] = next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)
    unchanged = [changes for changes in ABLATIONS if abs(losses[str(changes)] - losses["{}"]) < 1e-5]
    assert not unchanged, losses
    for changes, operational in OPERATIONAL:
        assert abs(losses[str(operational)] - losses[str(changes)]) < 1e-5, (operational, losses)
