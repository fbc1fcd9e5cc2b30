"""Learning rates and the choice of what decays equal the original's (zihangdai/xlnet model_utils.py)."""

import json
import re

import numpy as np
import pytest
import torch

from tests.parity.goldens import GOLDENS, files
from xlpre.conversion.tf import weight_map
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.training.lr_schedule import ScheduleConfig, learning_rate
from xlpre.training.optimizer import LayerwiseOptimConfig, OptimConfig, build_optimizer, is_decayed


@pytest.mark.parametrize("path", files("optim_lr_tables.npz"))
def test_the_learning_rate_follows_the_originals_table(path):
    arrays = np.load(path)
    for name in sorted({name.split("/")[0] for name in arrays.files if name.endswith("/lr")}):
        config = json.loads(str(arrays[f"{name}/config"]))
        schedule = ScheduleConfig(
            warmup_steps=config["warmup_steps"],
            decay={"poly": "linear", "cos": "cosine"}[config["decay_method"]],
            min_lr_ratio=config["min_lr_ratio"],
        )
        ours = [
            learning_rate(schedule, config["learning_rate"], int(step), config["train_steps"])
            for step in arrays[f"{name}/steps"]
        ]
        np.testing.assert_allclose(ours, arrays[f"{name}/lr"], rtol=2e-6, atol=1e-9, err_msg=name)


def test_gradients_are_scaled_of_what_the_original_holds_in_its_layers():
    shape = ModelConfig(vocab_size=50, n_layer=3, d_model=8, n_head=2, d_inner=8)
    model = LanguageModel(shape, two_streams=True)
    optimizer = build_optimizer(model, LayerwiseOptimConfig(layer_decay=0.5, layer_decay_mode="grad_scale"))
    scales = {p: group["grad_scale"] for group in optimizer.param_groups for p in group["params"]}
    for weight in weight_map(shape):
        layer = re.match(r"model/transformer/layer_(\d+)/", weight.external)
        expected = 0.5 ** (2 - int(layer[1])) if layer else 1.0
        assert scales[model.get_parameter(weight.native)] == expected, weight.native


def test_norms_and_layer_biases_do_not_decay_and_score_biases_do():
    model = LanguageModel(ModelConfig(vocab_size=50, n_layer=1, d_model=8, n_head=2, d_inner=8), two_streams=True)
    spared = {name for name, _ in model.named_parameters() if not is_decayed(name)}
    layer = "backbone.layers.0."
    assert spared == {
        "lm_head.bias",
        *(f"{layer}{norm}.{part}" for norm in ("attention_norm", "feed_forward_norm") for part in ("weight", "bias")),
        *(f"{layer}feed_forward.{part}.bias" for part in ("inner", "outer")),
    }
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.01))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters())) and all(torch.is_tensor(p) for p in held)


@pytest.mark.skipif(
    not (GOLDENS / "optim_weight_decay_table.json").exists(), reason=f"no table in {GOLDENS}; set XLPRE_GOLDENS"
)
def test_the_original_spares_the_same_kinds_of_parameters():
    table = json.loads((GOLDENS / "optim_weight_decay_table.json").read_text())
    for name, decayed in table.items():
        ours = name.replace("LayerNorm", "attention_norm").replace("/", ".")
        assert is_decayed(ours) == decayed, name
