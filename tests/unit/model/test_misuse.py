"""What does not fit together is refused in a sentence, before anything is computed."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import VOCAB, make_model, random_batch, random_memory
from xlpre.batch import FIELD_SPECS, Batch
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.cpu.attention import Cpu, plan_of
from xlpre.model.kernels.cpu.build import is_there
from xlpre.model.kernels.selfcheck.fixtures import geometry_of, tensors_of
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.model.score_terms import ScoreTerms


@pytest.mark.parametrize("name", FIELD_SPECS)
@pytest.mark.parametrize(
    "change", [lambda x: x[:1], lambda x: x[..., None], lambda x: x.double(), lambda x: x.tolist()],
    ids=["rows", "dimensions", "type", "no tensor"],
)  # fmt: skip
def test_a_batch_is_made_of_tensors_that_fit_together_alone(name, change):
    batch = random_batch(rows=3)
    if name == "input_ids" and len(change(batch.input_ids)) == 1:
        name = "segment_ids"  # the others are measured by input_ids
    with pytest.raises(ValueError, match=r"Batch\.\w+ is .* must be a tensor \(B"):
        dataclasses.replace(batch, **{name: change(getattr(batch, name))})


@pytest.mark.parametrize("name", ["targets", "target_weights", "target_positions"])
def test_losses_are_of_as_many_targets_as_places_and_hidden_states_of_any(name):
    model, batch = make_model(), random_batch()
    memory = random_memory(model.config, 2, 4)
    fewer = dataclasses.replace(batch, **{name: getattr(batch, name)[:, :2]})
    with pytest.raises(
        ValueError, match=r"must have one for each of target_positions \(2, \d\); replace them together"
    ):
        model(fewer, memory)
    assert model.backbone(fewer, memory)[0].shape == (2, fewer.target_positions.size(1), 16)


@pytest.mark.parametrize("reuse_len", [-1, 14])
def test_no_more_tokens_enter_memory_than_a_window_has(reuse_len):
    with pytest.raises(ValueError, match=r"Batch.reuse_len=-?\d+ is invalid: .* 13"):
        dataclasses.replace(random_batch(13), reuse_len=reuse_len)


@pytest.mark.parametrize(
    "of_config, rows, dtype",
    [
        ({"n_layer": 1}, 2, torch.float32),
        ({"n_layer": 3}, 2, torch.float32),
        ({"d_model": 32}, 2, torch.float32),
        ({}, 1, torch.float32),
        ({}, 2, torch.bfloat16),
        ({}, 2, torch.float64),
    ],
)
def test_memory_of_another_model_of_other_rows_or_another_type_is_refused(of_config, rows, dtype):
    model = make_model(mem_len=8)
    memory = initial_memory(dataclasses.replace(model.config, **of_config), rows, dtype=dtype)
    expected = r"this model and batch need \(2, 2, 8, 16\) torch.float32; begin with first_memory\(config, rows=2"
    with pytest.raises(ValueError, match=expected):
        model(random_batch(), memory)


@torch.no_grad()
def test_a_cache_goes_with_its_rows_and_is_made_of_a_memory_of_the_same_model():
    model = make_model(mem_len=8).eval()
    of_three = model.backbone.to_kv_cache(initial_memory(model.config, 3))
    with pytest.raises(ValueError, match=r"keys \(3, 8, 2, 8\) in 2 layers; .* need \(2, 8, 2, 8\) in 2"):
        model(random_batch(), of_three)
    for memory, backbone in ((of_three, model.backbone), (initial_memory(model.config, 3), model)):
        with pytest.raises(ValueError, match="made of a Memory and a Backbone"):
            backbone.to_kv_cache(memory)
    with pytest.raises(ValueError, match="this model and batch need"):
        model.backbone.to_kv_cache(initial_memory(dataclasses.replace(model.config, n_layer=3), 2))


def test_what_is_no_batch_or_no_memory_is_told_how_one_is_made():
    model, batch = make_model(), random_batch()
    memory = random_memory(model.config, 2, 4)
    for given in ((batch.input_ids, memory), (batch, None), (batch, memory.hidden)):
        with pytest.raises(ValueError, match=r"reads a Batch and a Memory, not \w+ and \w+; blanks.whole makes"):
            model(*given)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("odd", [-1, VOCAB, 10**6])
def test_ids_that_the_vocabulary_does_not_have_are_told_with_its_size(odd, grad):
    model, batch = make_model(), random_batch()
    batch.input_ids[1, 3] = odd
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match=rf"from .* the model has {VOCAB} pieces, 0 to 39"),
    ):
        model(batch, random_memory(model.config, 2, 4))


def test_vectors_of_other_tokens_are_refused():
    model, batch = make_model(), random_batch(13)
    with pytest.raises(ValueError, match=r"vectors \(2, 12, 16\) must be those of the batch's input_ids \(2, 13\)"):
        model.backbone(batch, random_memory(model.config, 2, 4), torch.zeros(2, 12, 16))


@pytest.mark.parametrize("given", [{"mem_len": -1}, {"initial": "zero"}])
def test_a_memory_begins_in_one_of_two_ways_and_has_a_length(given):
    with pytest.raises(
        ValueError, match=r"mem_len \(-?\d+\) must be at least 0, and initial \('\w+'\) 'empty' or 'zeros'"
    ):
        initial_memory(ModelConfig(vocab_size=9), 1, **given)


@pytest.mark.parametrize("key", ["positions", "norm", "feed_forward", "attention_backend", "attention_span", "init_scheme"])
def test_a_word_that_is_no_choice_is_refused_with_those_that_are(key):
    with pytest.raises(ValueError, match=rf"model.{key}=other is invalid: it must be one of \w+, "):
        ModelConfig(**{key: "other"})


def test_a_model_without_the_size_of_its_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"model.vocab_size \(0\) must be known .* len\(tokenizer\)"):
        LanguageModel(ModelConfig(n_layer=1, d_model=8, n_head=2, d_inner=8), two_streams=True)


@pytest.mark.skipif(not is_there(), reason="no C++ compiler")
@pytest.mark.parametrize("name", ["query", "key", "value", "pos_key", "r_w_bias", "segment_diff"])
def test_kernels_that_go_by_address_are_given_nothing_too_small_or_of_another_type(name):
    attn_meta = geometry_of(2, 8, 4, 2, "cpu")
    tensors = tensors_of(attn_meta, 2, 4, torch.float32)
    attn_meta = dataclasses.replace(attn_meta, prepared=plan_of(attn_meta, torch.float32))
    for odd in (tensors[name][:, :1], tensors[name].double()):
        given = {**tensors, name: odd}
        key, value = given.pop("key"), given.pop("value")
        with pytest.raises(AssertionError):
            Cpu().attend(ScoreTerms(scale=1.0, **given), key, value, attn_meta, 0.0)


def test_a_row_less_of_directions_is_no_plan():
    attn_meta = geometry_of(2, 8, 4, 2, "cpu")
    if is_there():
        with pytest.raises(AssertionError):
            plan_of(dataclasses.replace(attn_meta, direction=attn_meta.direction[:1]), torch.float32)


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("settings", [{}, {"cutoffs": [10, 30], "div_value": 2}], ids=["plain", "adaptive"])
def test_no_rows_and_no_targets_are_read_as_well(two_streams, settings):
    model = make_model(two_streams, **settings)
    batch, none = random_batch(), np.s_[:0]
    fields = {name: getattr(batch, name) for name in FIELD_SPECS}
    no_rows = Batch(**{name: x[none] for name, x in fields.items()}, reuse_len=6)
    logits, memory = model.logits(no_rows, initial_memory(model.config, 0, mem_len=4))
    assert logits.shape == (0, batch.targets.size(1), VOCAB) and memory.hidden.shape == (2, 0, 4, 16)
    of_targets = ("target_positions", "targets", "target_weights")
    no_targets = Batch(**{name: x[:, none] if name in of_targets else x for name, x in fields.items()}, reuse_len=6)
    assert model.logits(no_targets, initial_memory(model.config, 2, mem_len=4))[0].shape == (2, 0, VOCAB)
