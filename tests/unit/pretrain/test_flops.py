"""Predicted parameters and FLOPs equal those of real models and steps."""

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
    count_parameters,
    flops_by_part,
    flops_per_step,
    inference_flops,
    parameter_sizes,
)
from tests.conftest import examples
from tests.unit.pretrain.planning_cases import LARGE, count_flops, models, random_batch, shapes
from xlpre.config.loader import load_config
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory


@settings(max_examples=examples(60))
@given(models(), st.booleans(), st.booleans())
def test_parameters_by_part_sum_to_those_of_the_built_model(model, two_streams, next_sentence):
    sizes = [parameter.numel() for parameter in LanguageModel(model, two_streams, next_sentence).parameters()]
    assert sum(count_parameters(model, next_sentence).values()) == sum(sizes)
    assert parameter_sizes(model, next_sentence) == sizes


@settings(max_examples=examples(100))
@given(models())
def test_parts_contain_the_parameters_of_their_name(model):
    counts, D, A, L = count_parameters(model), model.d_model, model.n_head * model.head_width, model.n_layer
    gated = model.feed_forward in ("glu", "swiglu")
    width = 2 * model.d_inner // 3 if gated else model.d_inner
    relative = model.positions == "relative"
    n_biases = {"relative": 2, "shaw": 1}.get(model.positions, 0) + model.relative_segments
    assert counts["attention"] == L * 4 * D * A
    assert counts["feed-forward"] == L * (2 + gated) * D * width
    assert counts["norms"] == L * 4 * (D + model.head_width * model.qk_norm) + 2 * D * model.final_norm
    assert counts["segments"] == L * 2 * A * model.relative_segments
    assert not relative or counts["positions"] == L * D * A
    layer_biases = L * ((1 + gated) * width + D) + (L if model.untie_r else 1) * n_biases * A
    assert counts["biases"] == layer_biases + model.vocab_size + len(model.cutoffs)
    with_head = count_parameters(model, next_sentence=True)
    assert (with_head["next sentence"], with_head["biases"]) == (D * D + 2 * D, counts["biases"] + D + 2)


@settings(max_examples=examples(60))
@given(models().filter(lambda model: not model.cutoffs), shapes(), st.booleans())
def test_hardware_flops_equal_those_that_torch_counts(model, shape, checkpointed):
    total, _ = count_flops(model, shape, checkpointed)
    # torch stops recomputation at the last tensor that backward needs, before or after the last product
    last_product = (
        checkpointed
        * 2
        * shape.rows
        * (shape.seq_len + shape.n_targets)
        * model.d_model
        * model.d_inner
        * model.n_layer
    )
    assert abs(sum(flops_by_part(model, shape, activation_checkpointing=checkpointed).values()) - total) <= last_product


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
@pytest.mark.parametrize("two_streams", [True, False])
@torch.no_grad()
def test_inference_flops_equal_those_that_torch_counts_with_a_kv_cache(settings_, two_streams):
    sizes = {
        "vocab_size": 500,
        "n_layer": 3,
        "d_model": 64,
        "n_head": 4,
        "d_inner": 256,
        "attention_backend": "reference",
    }
    model = ModelConfig(**{**sizes, **settings_})
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32, two_streams)
    language_model, batch = LanguageModel(model, two_streams).eval(), random_batch(shape, 500)
    memory = language_model.backbone.to_kv_cache(initial_memory(model, 2, mem_len=shape.mem_len))
    _, memory = language_model(batch, memory)
    with FlopCounterMode(display=False) as counter:
        language_model(batch, memory)
    assert inference_flops(model, shape, "hardware") == counter.get_total_flops()


def test_recomputation_counts_as_hardware_flops_only():
    shape = BatchShape(2, 64, 48, 10, 32)
    for counting, ratio in (("hardware", 4 / 3), ("model", 1)):
        once, twice = (sum(flops_by_part(LARGE, shape, counting, repeated).values()) for repeated in (False, True))
        assert twice / once == pytest.approx(ratio, rel=0.03)  # embedding and softmax are not recomputed


@settings(max_examples=examples(50))
@given(models().filter(lambda model: model.cutoffs), shapes())
def test_flops_of_an_adaptive_softmax_follow_the_tokens_in_each_cluster(model, shape):
    total, with_fractions = count_flops(model, dataclasses.replace(shape, n_targets=shape.seq_len))
    assert sum(flops_by_part(model, with_fractions).values()) == pytest.approx(total, rel=1e-5)  # fractions are float32


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
def test_hardware_flops_equal_those_of_torch_for_large_matrices(settings_):
    model = ModelConfig(
        **{
            "vocab_size": 500,
            "n_layer": 3,
            "d_model": 64,
            "n_head": 4,
            "d_inner": 256,
            "attention_backend": "reference",
            **settings_,
        }
    )
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32)
    assert sum(flops_by_part(model, shape).values()) == count_flops(model, shape)[0]


@pytest.mark.parametrize(
    ("model", "gflop_a_token"), [(LARGE, 2.574), (ModelConfig(vocab_size=32000), 0.752)], ids=["large", "base"]
)
def test_needed_flops_are_those_of_an_exact_implementation(model, gflop_a_token):
    # computed by hand for T 512, M 384, P 85, reused half of the window, 32 rows
    shape = batch_shape(dataclasses.replace(PretrainConfig(), model=model), 32)
    assert (shape.n_targets, shape.visible_fraction) == (85, pytest.approx(6 / 7))
    assert flops_per_step(model, shape) / (32 * 512 * 1e9) == pytest.approx(gflop_a_token, rel=1e-3)


def test_a_causal_model_needs_a_triangle_of_the_window():
    overrides = ["objective.name=causal", "data.reuse_len=512", "model.mem_len=0"]
    assert batch_shape(load_config(PretrainConfig, None, overrides), 1).visible_fraction == pytest.approx(0.5, abs=1e-3)


def test_parameter_sizes_separate_small_parameters():
    model = ModelConfig(vocab_size=1000, n_layer=1, d_model=64, n_head=4, d_inner=256, attention_backend="reference")
    large = 1000 * 64 + 2 * 64 * 256
    sizes = parameter_sizes(model)
    assert sum(size for size in sizes if size < 10_000) == sum(count_parameters(model).values()) - large
