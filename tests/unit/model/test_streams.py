import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.attention import two_streams
from tests.unit.model.conftest import MANY, make_model, random_batch, random_memory
from xlpre.model.config import ModelConfig
from xlpre.model.layer import LAYERS
from xlpre.model.positions import SCHEMES, RelativeKeyProjection, sinusoid_table


@settings(max_examples=40, deadline=None)
@given(
    positions=st.sampled_from(list(SCHEMES)),
    norm=st.sampled_from(list(LAYERS)),
    attention_span=st.sampled_from(["all", "same_length", "exclude_self_slot"]),
    relative_segments=st.booleans(),
    clamp=st.booleans(),
    mem_len=st.integers(0, 6),
    valid=st.integers(0, 6),
    length=st.integers(9, 14),
    perm_size=st.sampled_from([None, 3]),
    visible_mem_len=st.sampled_from([0, 2, MANY]),
    seed=st.integers(0, 99),
)
def test_the_model_is_the_papers_double_loop(
    positions, norm, attention_span, relative_segments, clamp, mem_len, valid, length, perm_size, visible_mem_len, seed
):
    model = make_model(
        seed=seed,
        positions=positions,
        norm=norm,
        attention_span=attention_span,
        relative_segments=relative_segments,
        mem_len=3,
        n_positions=5 if positions in ("shaw", "learned") else 0,
        clamp_len=3 if clamp and positions != "learned" else -1,
    )
    batch = random_batch(length, length // 2 - 1, seed=seed, perm_size=perm_size, visible_mem_len=visible_mem_len)
    memory = random_memory(model.config, 2, mem_len, valid=min(mem_len, valid))
    hidden, _ = model.backbone(batch, memory)
    for row in range(2):
        # float32 and another order of summation
        torch.testing.assert_close(hidden[row], two_streams(model, batch, memory, row), atol=2e-5, rtol=1e-4)


def test_p_target_rows_are_those_rows_of_the_full_query_stream(model_of):
    model, batch = model_of().double(), random_batch()
    memory = random_memory(model.config, 2, 4)
    memory = dataclasses.replace(memory, hidden=memory.hidden.double())
    everywhere = torch.arange(13).expand(2, -1)
    full, _ = model.backbone(dataclasses.replace(batch, target_positions=everywhere), memory)
    some, _ = model.backbone(batch, memory)
    expected = full.gather(1, batch.target_positions[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some, expected, atol=1e-13, rtol=1e-13)


def test_a_backward_row_is_the_flipped_forward_row(model_of):
    model = model_of()
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


def test_renaming_a_and_b_changes_nothing(model_of):
    model = model_of()
    batch, memory = random_batch(), random_memory(model.config, 2, 0)
    renamed = dataclasses.replace(batch, segment_ids=torch.tensor([7, 3, 5])[batch.segment_ids])
    other = dataclasses.replace(batch, segment_ids=torch.zeros_like(batch.segment_ids))
    outputs = [model.backbone(one, memory)[0] for one in (batch, renamed, other)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_a_query_that_sees_nothing_outputs_zero_with_clean_gradients(model_of):
    model = model_of(n_layer=1)
    batch = random_batch()
    alone = batch.query_rank.clone()
    alone.scatter_(1, batch.target_positions[:, :1], -5)
    batch = dataclasses.replace(batch, query_rank=alone)
    attended = []
    model.backbone.layers[0].attention.register_forward_hook(lambda m, i, output: attended.append(output))
    loss, _ = model(batch, random_memory(model.config, 2, 0))
    loss.backward()
    assert (attended[0][:, 0] == 0).all() and (attended[0][:, 1] != 0).any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_predictions_of_one_stream_are_read_at_the_targets(model_of):
    model = model_of(two_streams=False)
    batch, memory = random_batch(), random_memory(model.config, 2, 3)
    full, _ = model.backbone(dataclasses.replace(batch, target_positions=torch.arange(13).expand(2, -1)), memory)
    some, _ = model.backbone(batch, memory)
    expected = full.gather(1, batch.target_positions[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some, expected, atol=1e-6, rtol=1e-6)


def test_shared_biases_are_one_parameter_for_all_layers(model_of):
    model = model_of(untie_r=False)
    first, second = (layer.attention.terms["content"].r_bias for layer in model.backbone.layers)
    assert first is second
    assert sum("r_bias" in name or "shared" in name for name, _ in model.named_parameters()) == 3


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    columns=st.integers(0, 9),
    clamp=st.sampled_from([-1, 2]),
    dropped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_keys_of_distances_are_their_codes_times_the_matrix(tokens, columns, clamp, dropped, seed):
    """Whether sines and cosines are as they come, or each distance has lost others of them."""
    torch.manual_seed(seed)
    n_keys, config = columns + tokens, ModelConfig(d_model=6, n_head=2, dropout=0.5 * dropped)
    codes = sinusoid_table(n_keys, tokens, 6, clamp, device=torch.device("cpu"), dtype=torch.float64)
    codes = torch.nn.functional.dropout(codes, config.dropout)
    keys = RelativeKeyProjection(config).double()
    found, expected = keys(codes, n_keys), codes @ keys.weight.T
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((x * weights).sum(), keys.weight)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
