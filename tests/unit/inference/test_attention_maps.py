"""Attention probabilities of the rows that predict targets."""

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.inference.attention_maps import attention_maps
from xlpre.model.attention_mask import visible


@torch.no_grad()
@pytest.mark.parametrize("attention_backend", ["reference", "sdpa"])
@pytest.mark.parametrize("two_streams", [True, False])
def test_probabilities_sum_to_1_over_the_visible_keys(two_streams, attention_backend):
    model = make_model(two_streams, next_sentence=True, attention_backend=attention_backend).eval()
    batch, memory = random_batch(), random_memory(model.config, 2, 4)
    maps = attention_maps(model, batch, memory)
    B, P = batch.targets.shape
    T = batch.input_ids.size(1)
    assert maps.shape == (model.config.n_layer, B, model.config.n_head, P, 4 + T)
    sees = visible(batch.query_rank.gather(1, batch.target_positions), batch.key_rank)
    if not two_streams:
        sees |= batch.target_positions[:, :, None] == torch.arange(T)
    sees = torch.cat([torch.ones(B, P, 4, dtype=bool), sees], dim=2)
    assert torch.equal(maps > 0, sees[None, :, None].expand_as(maps))
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


@torch.no_grad()
@pytest.mark.parametrize("two_streams", [True, False])
def test_the_probabilities_weight_the_values_that_the_layer_averages(two_streams):
    """Each attention module's output equals that of the recorded probabilities and its values."""
    model = make_model(two_streams, attention_backend="sdpa").eval()
    batch, memory, calls = random_batch(), random_memory(model.config, 2, 4), []
    for layer in model.backbone.layers:
        layer.attention.register_forward_hook(lambda module, args, output: calls.append((module, args[2], output)))
    maps = attention_maps(model, batch, memory)
    for probabilities, (module, value, output) in zip(maps, calls, strict=True):
        P = batch.targets.size(1)
        expected = module.output(torch.einsum("bhpk,bkhe->bphe", probabilities, value).flatten(2))
        is_content = not two_streams and output.size(1) == batch.input_ids.size(1)
        index = batch.target_positions[:, :, None].expand(-1, -1, output.size(2))
        actual = output.gather(1, index) if is_content else output[:, -P:]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert not any(layer.attention._forward_pre_hooks for layer in model.backbone.layers)
