"""Invalid inputs are refused with an error that names them, before anything is computed."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import VOCAB, make_model, random_batch, random_memory
from xlpre.batch import FIELD_SPECS, Batch
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory


@pytest.mark.parametrize("name", FIELD_SPECS)
@pytest.mark.parametrize(
    "change", [lambda x: x[:1], lambda x: x[..., None], lambda x: x.double(), lambda x: x.tolist()],
    ids=["rows", "dimensions", "type", "no tensor"],
)  # fmt: skip
def test_batch_fields_of_wrong_shape_or_dtype_are_refused(name, change):
    batch = random_batch(rows=3)
    if name == "input_ids" and len(change(batch.input_ids)) == 1:
        name = "segment_ids"  # the other fields are compared with input_ids
    with pytest.raises(ValueError, match=r"Batch\.\w+ of .* is invalid: it must be a tensor \(B"):
        dataclasses.replace(batch, **{name: change(getattr(batch, name))})


@pytest.mark.parametrize("name", ["targets", "target_weights", "target_positions"])
def test_losses_need_equal_numbers_of_targets_and_positions_but_hidden_states_do_not(name):
    model, batch = make_model(), random_batch()
    memory = random_memory(model.config, 2, 4)
    fewer = dataclasses.replace(batch, **{name: getattr(batch, name)[:, :2]})
    with pytest.raises(ValueError, match=r"Batch.targets .* target_weights .* target_positions, \(2, \d\). Replace"):
        model(fewer, memory)
    assert model.backbone(fewer, memory)[0].shape == (2, fewer.target_positions.size(1), 16)


@pytest.mark.parametrize("reuse_len", [-1, 14])
def test_reuse_len_beyond_the_window_is_refused(reuse_len):
    with pytest.raises(ValueError, match=r"Batch.reuse_len=-?\d+ is invalid: .* 13"):
        dataclasses.replace(random_batch(13), reuse_len=reuse_len)


@pytest.mark.parametrize(
    "changes, rows, dtype",
    [
        ({"n_layer": 1}, 2, torch.float32),
        ({"n_layer": 3}, 2, torch.float32),
        ({"d_model": 32}, 2, torch.float32),
        ({}, 1, torch.float32),
        ({}, 2, torch.bfloat16),
        ({}, 2, torch.float64),
    ],
)
def test_memory_of_another_shape_or_dtype_is_refused(changes, rows, dtype):
    model = make_model(mem_len=8)
    memory = initial_memory(dataclasses.replace(model.config, **changes), rows, dtype=dtype)
    with pytest.raises(
        ValueError, match=r"Memory.hidden .* need \(2, 2, 8, 16\) and torch.float32. .*initial_memory\(config, rows=2"
    ):
        model(random_batch(), memory)


@torch.no_grad()
def test_a_kv_cache_of_other_rows_or_another_model_is_refused():
    model = make_model(mem_len=8).eval()
    three_rows = model.backbone.to_kv_cache(initial_memory(model.config, 3))
    with pytest.raises(ValueError, match=r"KVCache with 2 layers .*\(3, 8, 2, 8\) .* need 2 layers of \(2, 8, 2, 8\)"):
        model(random_batch(), three_rows)
    with pytest.raises(ValueError, match="memory of type KVCache .*initial_memory"):
        model.backbone.to_kv_cache(three_rows)
    with pytest.raises(ValueError, match="Memory.hidden .* need"):
        model.backbone.to_kv_cache(initial_memory(dataclasses.replace(model.config, n_layer=3), 2))


def test_inputs_of_other_types_are_refused_with_a_remedy():
    model, batch = make_model(), random_batch()
    memory = random_memory(model.config, 2, 4)
    for inputs in ((batch.input_ids, memory), (batch, None), (batch, memory.hidden)):
        with pytest.raises(
            ValueError, match=r"inputs of type \w+ and \w+ .* Batch and a Memory. .*unmasked_batch.*initial_memory"
        ):
            model(*inputs)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("invalid_id", [-1, VOCAB, 10**6])
def test_token_ids_outside_the_vocabulary_are_refused_with_its_size(invalid_id, grad):
    model, batch = make_model(), random_batch()
    batch.input_ids[1, 3] = invalid_id
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match=rf"token ids from .* the model has {VOCAB} tokens, 0 to 39"),
    ):
        model(batch, random_memory(model.config, 2, 4))


def test_embeddings_of_other_tokens_are_refused():
    model, batch = make_model(), random_batch(13)
    with pytest.raises(ValueError, match=r"embeddings of shape \(2, 12, 16\) .* \(2, 13, 16\)"):
        model.backbone(batch, random_memory(model.config, 2, 4), torch.zeros(2, 12, 16))


@pytest.mark.parametrize("arguments", [{"mem_len": -1}, {"initial": "zero"}])
def test_invalid_arguments_of_initial_memory_are_refused(arguments):
    with pytest.raises(ValueError, match=r"mem_len=-1 .* at least 0|initial='zero' .* 'empty' or 'zeros'"):
        initial_memory(ModelConfig(vocab_size=9), 1, **arguments)


@pytest.mark.parametrize(
    "key", ["positions", "norm", "feed_forward", "attention_backend", "attention_span", "init_scheme"]
)
def test_unknown_choices_are_refused_with_the_known_ones(key):
    with pytest.raises(ValueError, match=rf"model.{key}=other is invalid: it must be one of \w+, "):
        ModelConfig(**{key: "other"})


def test_a_model_without_vocab_size_is_refused():
    with pytest.raises(ValueError, match=r"model.vocab_size=null is invalid: .* len\(tokenizer\)"):
        LanguageModel(ModelConfig(n_layer=1, d_model=8, n_head=2, d_inner=8), two_streams=True)


@pytest.mark.parametrize("invalid", [-1, VOCAB])
def test_ids_outside_of_an_adaptive_vocabulary_are_refused(invalid):
    model, batch = make_model(True, cutoffs=[10, 30], div_value=2), random_batch()
    ids = batch.input_ids.clone()
    ids[0, 3] = invalid
    with pytest.raises(ValueError, match=f"token ids are invalid: they must be at least 0 and below {VOCAB}"):
        model.logits(dataclasses.replace(batch, input_ids=ids), initial_memory(model.config, len(ids), mem_len=4))


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("settings", [{}, {"cutoffs": [10, 30], "div_value": 2}], ids=["plain", "adaptive"])
def test_a_batch_may_have_no_rows_or_no_targets(two_streams, settings):
    model = make_model(two_streams, **settings)
    batch, none = random_batch(), np.s_[:0]
    fields = {name: getattr(batch, name) for name in FIELD_SPECS}
    no_rows = Batch(**{name: x[none] for name, x in fields.items()}, reuse_len=6)
    logits, memory = model.logits(no_rows, initial_memory(model.config, 0, mem_len=4))
    assert logits.shape == (0, batch.targets.size(1), VOCAB) and memory.hidden.shape == (2, 0, 4, 16)
    target_fields = ("target_positions", "targets", "target_weights")
    no_targets = Batch(**{name: x[:, none] if name in target_fields else x for name, x in fields.items()}, reuse_len=6)
    assert model.logits(no_targets, initial_memory(model.config, 2, mem_len=4))[0].shape == (2, 0, VOCAB)
