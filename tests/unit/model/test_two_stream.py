import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.reference.attention import two_streams
from tests.unit.model.conftest import UNLIMITED, make_model, random_batch, random_memory
from xlpre.model.config import ModelConfig
from xlpre.model.layer import LAYERS
from xlpre.model.positions import SCHEMES, RelativeKeyProjection, sinusoid_table


@settings(max_examples=examples(40))
@given(
    positions=st.sampled_from(list(SCHEMES)),
    norm=st.sampled_from(list(LAYERS)),
    attention_span=st.sampled_from(["all", "same_length", "exclude_self_slot"]),
    relative_segments=st.booleans(),
    qk_norm=st.booleans(),
    clamp=st.booleans(),
    mem_len=st.integers(0, 6),
    valid=st.integers(0, 6),
    length=st.integers(9, 14),
    perm_size=st.sampled_from([None, 3]),
    visible_mem_len=st.sampled_from([0, 2, UNLIMITED]),
    seed=st.integers(0, 99),
)
def test_the_model_equals_the_double_loop_of_the_paper(
    positions,
    norm,
    attention_span,
    relative_segments,
    qk_norm,
    clamp,
    mem_len,
    valid,
    length,
    perm_size,
    visible_mem_len,
    seed,
):
    model = make_model(
        seed=seed,
        positions=positions,
        norm=norm,
        attention_span=attention_span,
        relative_segments=relative_segments,
        qk_norm=qk_norm,
        mem_len=3,
        n_positions=5 if positions in ("shaw", "learned") else None,
        clamp_len=3 if clamp and positions != "learned" else None,
    )
    batch = random_batch(length, length // 2 - 1, seed=seed, perm_size=perm_size, visible_mem_len=visible_mem_len)
    memory = random_memory(model.config, 2, mem_len, valid=min(mem_len, valid))
    hidden, _ = model.backbone(batch, memory)
    for row in range(2):
        # float32 and another order of summation
        torch.testing.assert_close(hidden[row], two_streams(model, batch, memory, row), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", ["pre", "pre_keys"])
def test_a_final_norm_normalizes_the_outputs_and_leaves_memory_as_it_is(norm):
    plain, normalized = make_model(norm=norm), make_model(norm=norm, final_norm=True)
    normalized.load_state_dict(plain.state_dict(), strict=False)
    batch, memory = random_batch(), random_memory(plain.config, 2, 4)
    (expected, memory_after), (hidden, normalized_memory) = (
        plain.backbone(batch, memory),
        normalized.backbone(batch, memory),
    )
    weight, bias = normalized.backbone.final_norm.weight, normalized.backbone.final_norm.bias
    torch.testing.assert_close(hidden, torch.nn.functional.layer_norm(expected, (16,), weight, bias, 1e-12))
    assert torch.equal(memory_after.hidden, normalized_memory.hidden)


def test_query_rows_at_targets_equal_those_of_the_full_query_stream():
    model, batch = make_model().double(), random_batch()
    memory = random_memory(model.config, 2, 4)
    memory = dataclasses.replace(memory, hidden=memory.hidden.double())
    all_positions = torch.arange(13).expand(2, -1)
    full, _ = model.backbone(dataclasses.replace(batch, target_positions=all_positions), memory)
    some, _ = model.backbone(batch, memory)
    expected = full.gather(1, batch.target_positions[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some, expected, atol=1e-13, rtol=1e-13)


def test_a_backward_row_equals_the_flipped_forward_row():
    model = make_model()
    batch, memory = random_batch(backward=False), random_memory(model.config, 2, 0)
    flipped = dataclasses.replace(
        batch,
        input_ids=batch.input_ids.flip(1),
        segment_ids=batch.segment_ids.flip(1),
        query_rank=batch.query_rank.flip(1),
        key_rank=batch.key_rank.flip(1),
        target_positions=12 - batch.target_positions,
        backward=~batch.backward,
    )
    forward, backward = (model.backbone(one, memory)[0] for one in (batch, flipped))
    torch.testing.assert_close(forward, backward, atol=1e-5, rtol=1e-5)


def test_only_equality_of_segment_ids_matters():
    model = make_model()
    batch, memory = random_batch(), random_memory(model.config, 2, 0)
    renamed = dataclasses.replace(batch, segment_ids=torch.tensor([7, 3, 5])[batch.segment_ids])
    other = dataclasses.replace(batch, segment_ids=torch.zeros_like(batch.segment_ids))
    outputs = [model.backbone(one, memory)[0] for one in (batch, renamed, other)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_a_query_without_visible_keys_outputs_zero_with_finite_gradients():
    model = make_model(n_layer=1)
    batch = random_batch()
    query_rank = batch.query_rank.clone()
    query_rank.scatter_(1, batch.target_positions[:, :1], -5)
    batch = dataclasses.replace(batch, query_rank=query_rank)
    outputs = []
    model.backbone.layers[0].attention.register_forward_hook(lambda m, i, output: outputs.append(output))
    loss, _ = model(batch, random_memory(model.config, 2, 0))
    loss.backward()
    assert (outputs[0][:, 0] == 0).all() and (outputs[0][:, 1] != 0).any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_one_stream_is_read_at_the_target_positions():
    model = make_model(two_streams=False)
    batch, memory = random_batch(), random_memory(model.config, 2, 3)
    full, _ = model.backbone(dataclasses.replace(batch, target_positions=torch.arange(13).expand(2, -1)), memory)
    some, _ = model.backbone(batch, memory)
    expected = full.gather(1, batch.target_positions[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some, expected, atol=1e-6, rtol=1e-6)


def test_shared_biases_are_one_parameter_of_all_layers():
    model = make_model(untie_r=False)
    first, second = (layer.attention.terms["content"].r_bias for layer in model.backbone.layers)
    assert first is second
    assert sum("r_bias" in name or "shared" in name for name, _ in model.named_parameters()) == 3


@settings(max_examples=examples(30))
@given(
    tokens=st.integers(1, 9),
    columns=st.integers(0, 9),
    clamp=st.sampled_from([None, 2]),
    has_dropout=st.booleans(),
    seed=st.integers(0, 99),
)
def test_keys_of_distances_equal_encodings_times_weights(tokens, columns, clamp, has_dropout, seed):
    torch.manual_seed(seed)
    n_keys, config = columns + tokens, ModelConfig(d_model=6, n_head=2, dropout=0.5 * has_dropout)
    encoding = sinusoid_table(n_keys, tokens, 6, clamp, device=torch.device("cpu"), dtype=torch.float64)
    encoding = torch.nn.functional.dropout(encoding, config.dropout)
    keys = RelativeKeyProjection(config).double()
    actual, expected = keys(encoding, n_keys), encoding @ keys.weight.T
    torch.testing.assert_close(actual, expected, atol=1e-13, rtol=0)
    weights = torch.randn_like(actual)
    gradients = [torch.autograd.grad((x * weights).sum(), keys.weight)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
