import pytest
import torch

from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.positions import distance_table

SHAPE = {"vocab_size": 500, "n_layer": 2, "d_model": 64, "n_head": 4, "d_inner": 128}


def test_published_values_have_the_published_spread():
    model = LanguageModel(ModelConfig(**SHAPE), two_streams=True)
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif name != "backbone.mask_embedding" and parameter.numel() > 2000:
            assert abs(parameter.std() - 0.02) < 0.002, name


def test_a_local_start_makes_each_head_prefer_one_distance():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SHAPE, init="local"), two_streams=True)
    distance = torch.arange(20, -20, -1)
    table = distance_table(20, 20, 64, -1, device=torch.device("cpu"), dtype=torch.float32)[0]
    for layer in model.backbone.layers:
        term = layer.attention.terms["position"]
        keys = (table @ term.key.weight.T).view(40, 4, 16)
        scores = torch.einsum("he,rhe->hr", term.r_bias, keys) / 4
        assert distance[scores.argmax(-1)].tolist() == [1, -1, 2, -2]


@pytest.mark.parametrize(
    "settings", [{"d_model": 63}, {"d_model": 66}, {"n_layer": 0}, {"dropout": 1.0}, {"mem_len": -1}]
)
def test_shapes_that_cannot_be_are_refused_by_their_key(settings):
    with pytest.raises(ValueError, match="model"):
        ModelConfig(**{**SHAPE, **settings})
