from functools import partial

import pytest
import torch

from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights, load_weights
from xlpre.model.language_model import LanguageModel
from xlpre.model.positions import sinusoid_table

SHAPE = {"vocab_size": 500, "n_layer": 2, "d_model": 64, "n_head": 4, "d_inner": 128}


def test_published_weights_have_the_published_standard_deviation():
    model = LanguageModel(ModelConfig(**SHAPE), two_streams=True)
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif name != "backbone.mask_embedding" and parameter.numel() > 2000:
            assert abs(parameter.std() - 0.02) < 0.002, name


def test_local_initialization_makes_each_head_prefer_one_distance():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SHAPE, init_scheme="local"), two_streams=True)
    distance = torch.arange(20, -20, -1)
    table = sinusoid_table(20, 20, 64, None, device=torch.device("cpu"), dtype=torch.float32)[0]
    for layer in model.backbone.layers:
        term = layer.attention.terms["position"]
        keys = (table @ term.key.weight.T).view(40, 4, 16)
        scores = torch.einsum("he,rhe->hr", term.r_bias, keys) / 4
        assert distance[scores.argmax(-1)].tolist() == [1, -1, 2, -2]


@pytest.mark.parametrize(
    "settings", [{"d_model": 63}, {"d_model": 66}, {"n_layer": 0}, {"dropout": 1.0}, {"mem_len": -1}]
)
def test_invalid_shapes_are_refused_by_key(settings):
    ((key, value),) = settings.items()
    with pytest.raises(ValueError, match=rf"model.{key}={value} is invalid: "):
        ModelConfig(**{**SHAPE, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"init_scheme": "local", "untie_r": False}, {"cutoffs": [50], "div_value": 2}]
)
def test_building_with_weights_copies_them_and_draws_no_random_numbers(settings):
    build = partial(LanguageModel, ModelConfig(**SHAPE, **settings), True, next_sentence=True)
    first = build()
    before = torch.get_rng_state()
    second = build_with_weights(dict(first.named_parameters()), build)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, loaded), source in zip(second.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(loaded, source) and loaded.requires_grad and loaded is not source, name
    assert [name for name, _ in second.named_parameters(remove_duplicate=False)] == [
        name for name, _ in first.named_parameters(remove_duplicate=False)
    ]
    assert not any(
        x.is_meta for module in second.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)
    )
    drawn = {name: not torch.equal(p, dict(first.named_parameters())[name]) for name, p in build().named_parameters()}
    assert drawn["backbone.mask_embedding"] and drawn["auxiliary_heads.next_sentence.logits_proj.weight"]


def test_missing_weights_and_wrong_shapes_are_refused():
    build = partial(LanguageModel, ModelConfig(**SHAPE), True)
    weights = dict(build().named_parameters())
    fewer = {name: weight for name, weight in weights.items() if name != "lm_head.bias"}
    with pytest.raises(ValueError, match=r"weights of lm_head.bias are missing: .*\(500,\)"):
        build_with_weights(fewer, build)
    with pytest.raises(ValueError, match=r"weights of lm_head.bias with shape \(1,\) .*\(500,\)"):
        load_weights({**weights, "lm_head.bias": torch.zeros(1)}, build())
