"""Learning rates and weight decay equal the original (zihangdai/xlnet model_utils.py)."""

import json
import re

import numpy as np
import pytest

from tests.parity.goldens import GOLDENS, files
from xlpre.conversion.tf import weight_map
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.training.config import LayerwiseOptimConfig, OptimConfig
from xlpre.training.lr_schedule import ScheduleConfig, learning_rate
from xlpre.training.optimizer import build_optimizer, is_decayed


@pytest.mark.parametrize("path", files("optim_lr_tables.npz"))
def test_learning_rates_equal_the_table_of_the_original(path):
    arrays = np.load(path)
    for name in sorted({name.split("/")[0] for name in arrays.files if name.endswith("/lr")}):
        config = json.loads(str(arrays[f"{name}/config"]))
        schedule = ScheduleConfig(
            warmup_steps=config["warmup_steps"],
            decay={"poly": "linear", "cos": "cosine"}[config["decay_method"]],
            min_lr_ratio=config["min_lr_ratio"],
        )
        rates = [
            learning_rate(schedule, config["learning_rate"], int(step), config["train_steps"])
            for step in arrays[f"{name}/steps"]
        ]
        np.testing.assert_allclose(rates, arrays[f"{name}/lr"], rtol=2e-6, atol=1e-9, err_msg=name)


def test_grad_scale_applies_to_the_layer_variables_of_the_original():
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
    not_decayed = {name for name, _ in model.named_parameters() if not is_decayed(name)}
    layer = "backbone.layers.0."
    assert not_decayed == {
        "lm_head.bias",
        *(f"{layer}{norm}.{part}" for norm in ("attention_norm", "feed_forward_norm") for part in ("weight", "bias")),
        *(f"{layer}feed_forward.{part}.bias" for part in ("inner", "outer")),
    }
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.01))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == len(list(model.parameters()))


@pytest.mark.skipif(
    not (GOLDENS / "optim_weight_decay_table.json").exists(), reason=f"no table in {GOLDENS}; set XLPRE_GOLDENS"
)
def test_weight_decay_applies_to_the_same_parameters_as_in_the_original():
    table = json.loads((GOLDENS / "optim_weight_decay_table.json").read_text())
    for name, decayed in table.items():
        native = name.replace("LayerNorm", "attention_norm").replace("/", ".")
        assert is_decayed(native) == decayed, name
