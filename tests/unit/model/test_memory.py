import dataclasses

import pytest
import torch

from tests.unit.model.conftest import VOCAB, random_batch, random_memory
from xlpre.batch import Batch
from xlpre.model.memory import Memory, extend_memory, first_memory


def causal_batch(ids, continues=True):
    B, T = ids.shape
    places = torch.arange(T).expand(B, -1)
    return Batch(
        input_ids=ids,
        segment_ids=torch.zeros_like(ids),
        query_rank=places.int() + 1,
        key_rank=places.int(),
        target_positions=places,
        targets=ids.roll(-1, 1),
        target_weights=torch.ones(B, T),
        backward=torch.zeros(B, dtype=torch.bool),
        continues=torch.full((B,), continues),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=T,
    )


def test_two_windows_with_memory_are_one_long_window(model_of):
    model = model_of(two_streams=False, n_layer=3)
    ids = torch.randint(9, VOCAB, (2, 14))
    long, _ = model.logits(causal_batch(ids), first_memory(model.config, 2, mem_len=0))
    first, memory = model.logits(causal_batch(ids[:, :7]), first_memory(model.config, 2, mem_len=7))
    second, _ = model.logits(causal_batch(ids[:, 7:]), memory)
    torch.testing.assert_close(torch.cat([first, second], 1), long, atol=2e-5, rtol=1e-5)


def test_no_gradient_reaches_the_window_that_memory_came_from(model_of):
    model, embedded = model_of(), []

    def keep(module, inputs, output):
        output.retain_grad()
        embedded.append(output)

    model.backbone.embedding.register_forward_hook(keep)
    _, memory = model(random_batch(seed=0), random_memory(model.config, 2, 6))
    loss, _ = model(random_batch(seed=1), memory)
    loss.backward()
    assert memory.hidden.grad_fn is None
    assert embedded[0].grad is None and embedded[1].grad.abs().sum() > 0


def test_only_the_reused_part_enters_memory_oldest_first():
    memory, new = torch.arange(5.0).view(1, 1, 5, 1), torch.tensor([7.0, 8.0]).view(1, 1, 2, 1)
    assert extend_memory(memory, new).flatten().tolist() == [2, 3, 4, 7, 8]
    assert extend_memory(memory[:, :, :0], new).shape == (1, 1, 0, 1)
    assert extend_memory(memory[:, :, :1], new).flatten().tolist() == [8]


def test_memory_holds_the_inputs_of_each_layer(model_of):
    model, inputs = model_of(), []
    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[1]))
    _, memory = model(random_batch(13, 6), random_memory(model.config, 2, 6))
    for kept, content in zip(memory.hidden, inputs, strict=True):
        assert torch.equal(kept, content[:, :6])


@pytest.mark.parametrize("valid", [0, 2, 5])
def test_columns_that_are_not_valid_are_not_seen(model_of, valid):
    model, batch = model_of(), random_batch()
    memory = random_memory(model.config, 2, 5, valid=valid)
    noise = memory.hidden.clone()
    noise[:, :, : 5 - valid] = 99.0
    cut = Memory(memory.hidden[:, :, 5 - valid :], memory.valid)
    outputs = [model.backbone(batch, one)[0] for one in (memory, Memory(noise, memory.valid), cut)]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-5, rtol=1e-5)


def test_a_row_that_does_not_continue_starts_with_an_empty_memory(model_of):
    model = model_of()
    batch = dataclasses.replace(random_batch(13, 6), continues=torch.tensor([True, False]))
    memory = random_memory(model.config, 2, 8)
    with_memory, kept = model.backbone(batch, memory)
    without, _ = model.backbone(batch, first_memory(model.config, 2, mem_len=0))
    assert not torch.allclose(with_memory[0], without[0])
    torch.testing.assert_close(with_memory[1], without[1], atol=1e-5, rtol=1e-5)
    assert kept.valid.tolist() == [8, 6]


def test_zeros_as_first_memory_are_seen(model_of):
    model, batch = model_of(mem_len=4), random_batch()
    outputs = [model.backbone(batch, first_memory(model.config, 2, initial=how))[0] for how in ("empty", "zeros")]
    assert not torch.allclose(*outputs)
