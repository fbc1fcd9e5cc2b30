"""Parameters and operations, foretold, are those of real models and steps."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config import PretrainConfig
from pretrain.planning.flops import (
    BatchShape,
    batch_shape,
    inference_flops,
    flops_per_step,
    operations,
    parameters,
    tensor_sizes,
)
from tests.unit.pretrain.planning_cases import LARGE, batch_of, counted, models, shapes
from xlpre.config.loader import load_config
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory


@settings(max_examples=60, deadline=None)
@given(models(), st.booleans(), st.booleans())
def test_parameters_by_part_are_those_of_the_built_model(model, two_streams, next_sentence):
    sizes = [parameter.numel() for parameter in LanguageModel(model, two_streams, next_sentence).parameters()]
    assert sum(parameters(model, two_streams, next_sentence).values()) == sum(sizes)
    assert tensor_sizes(model, next_sentence) == sizes


@settings(max_examples=100, deadline=None)
@given(models())
def test_the_parts_are_what_they_are_called(model):
    found, D, A, L = parameters(model), model.d_model, model.n_head * model.head_width, model.n_layer
    gated = model.feed_forward in ("glu", "swiglu")
    width = 2 * model.d_inner // 3 if gated else model.d_inner
    relative = model.positions == "relative"
    n_biases = {"relative": 2, "shaw": 1}.get(model.positions, 0) + model.relative_segments
    assert found["attention"] == L * 4 * D * A
    assert found["feed-forward"] == L * (2 + gated) * D * width
    assert found["norms"] == L * 4 * D
    assert found["segments"] == L * 2 * A * model.relative_segments
    assert not relative or found["positions"] == L * D * A
    of_layers = L * ((1 + gated) * width + D) + (L if model.untie_r else 1) * n_biases * A
    assert found["biases"] == of_layers + model.vocab_size + len(model.cutoffs)
    more = parameters(model, next_sentence=True)
    assert (more["next sentence"], more["biases"]) == (D * D + 2 * D, found["biases"] + D + 2)


@settings(max_examples=60, deadline=None)
@given(models().filter(lambda model: not model.cutoffs), shapes(), st.booleans())
def test_operations_are_those_that_torch_counts_in_a_step(model, shape, recomputed):
    total, _ = counted(model, shape, recomputed)
    # torch stops computing again at the last tensor that is needed, which is before or after the last product
    last = recomputed * 2 * shape.rows * (shape.seq_len + shape.n_targets) * model.d_model * model.d_inner * model.n_layer
    assert abs(sum(operations(model, shape, recomputed=recomputed).values()) - total) <= last


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
@pytest.mark.parametrize("two_streams", [True, False])
@torch.no_grad()
def test_operations_of_reading_are_those_that_torch_counts_once_keys_and_values_are_known(settings_, two_streams):
    sizes = {"vocab_size": 500, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, "attention": "reference"}
    model = ModelConfig(**{**sizes, **settings_})
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32, two_streams)
    language_model, batch = LanguageModel(model, two_streams).eval(), batch_of(shape, 500)
    memory = language_model.backbone.to_kv_cache(initial_memory(model, 2, mem_len=shape.mem_len))
    _, memory = language_model(batch, memory)
    with FlopCounterMode(display=False) as counter:
        language_model(batch, memory)
    assert inference_flops(model, shape, "executed") == counter.get_total_flops()


def test_what_is_computed_again_is_executed_but_not_needed():
    shape = BatchShape(2, 64, 48, 10, 32)
    for counting, more in (("executed", 4 / 3), ("needed", 1)):
        once, twice = (sum(operations(LARGE, shape, counting, again).values()) for again in (False, True))
        assert twice / once == pytest.approx(more, rel=0.03)  # embedding and softmax are not computed again


@settings(max_examples=50, deadline=None)
@given(models().filter(lambda model: model.cutoffs), shapes())
def test_operations_of_an_adaptive_softmax_are_those_of_the_tokens_in_each_cluster(model, shape):
    total, seen = counted(model, dataclasses.replace(shape, targets=shape.seq_len))
    assert sum(operations(model, seen).values()) == pytest.approx(total, rel=1e-5)  # shares are float32


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
def test_operations_agree_at_a_size_where_matrices_are_large(settings_):
    model = ModelConfig(
        **{
            "vocab_size": 500,
            "n_layer": 3,
            "d_model": 64,
            "n_head": 4,
            "d_inner": 256,
            "attention": "reference",
            **settings_,
        }
    )
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32)
    assert sum(operations(model, shape).values()) == counted(model, shape)[0]


@pytest.mark.parametrize(
    ("model", "gflop_a_token"), [(LARGE, 2.574), (ModelConfig(vocab_size=32000), 0.752)], ids=["large", "base"]
)
def test_operations_needed_are_those_of_an_exact_implementation(model, gflop_a_token):
    # worked out by hand for T 512, M 384, P 85, reused half of the window, 32 rows
    shape = batch_shape(dataclasses.replace(PretrainConfig(), model=model), 32)
    assert (shape.n_targets, shape.visible_fraction) == (85, pytest.approx(6 / 7))
    assert flops_per_step(model, shape) / (32 * 512 * 1e9) == pytest.approx(gflop_a_token, rel=1e-3)


def test_a_causal_model_needs_a_triangle_of_the_window():
    words = ["objective.name=causal", "data.reuse_len=512", "model.mem_len=0"]
    assert batch_shape(load_config(PretrainConfig, None, words), 1).visible == pytest.approx(0.5, abs=1e-3)


def test_small_parameters_are_those_that_are_not_split():
    model = ModelConfig(vocab_size=1000, n_layer=1, d_model=64, n_head=4, d_inner=256, attention_backend="reference")
    split = 1000 * 64 + 2 * 64 * 256
    sizes = tensor_sizes(model)
    assert sum(size for size in sizes if size < 10_000) == sum(parameters(model).values()) - split
