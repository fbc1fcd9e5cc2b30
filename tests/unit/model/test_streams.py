import dataclasses

import pytest
import torch

from tests.reference.attention import two_streams
from tests.unit.model.conftest import random_batch, random_memory


@pytest.mark.parametrize("relative_segments", [True, False])
@pytest.mark.parametrize("mem_len", [0, 5])
@pytest.mark.parametrize("backward", [False, True])
def test_the_model_is_the_papers_double_loop(model_of, relative_segments, mem_len, backward):
    model = model_of(relative_segments=relative_segments)
    batch = random_batch(11, 5, backward=backward)
    memory = random_memory(model.config, 2, mem_len, valid=min(mem_len, 3))
    hidden, _ = model.backbone(batch, memory)
    for row in range(2):
        # float32 and another order of summation: 1e-5
        torch.testing.assert_close(hidden[row], two_streams(model, batch, memory, row), atol=1e-5, rtol=1e-5)


def test_p_target_rows_are_those_rows_of_the_full_query_stream(model_of):
    model = model_of()
    batch, memory = random_batch(), random_memory(model.config, 2, 4)
    everywhere = torch.arange(13).expand(2, -1)
    full, _ = model.backbone(dataclasses.replace(batch, target_positions=everywhere), memory)
    some, _ = model.backbone(batch, memory)
    expected = full.gather(1, batch.target_positions[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some, expected, atol=1e-6, rtol=1e-6)


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
