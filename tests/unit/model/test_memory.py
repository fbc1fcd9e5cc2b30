import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.data.test_lanes import lanes_over, part_of
from tests.unit.model.conftest import MANY, VOCAB, random_batch, random_memory
from xlpre.batch import Batch
from xlpre.data.store import SplitData
from xlpre.model.memory import HiddenContext, Memory, append_columns, initial_memory


def causal_batch(ids):
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
        visible_mem_len=torch.full((B,), T),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=T,
    )


def test_two_windows_with_memory_are_one_long_window(model_of):
    model = model_of(two_streams=False, n_layer=3)
    ids = torch.randint(9, VOCAB, (2, 14))
    long, _ = model.logits(causal_batch(ids), initial_memory(model.config, 2, mem_len=0))
    first, memory = model.logits(causal_batch(ids[:, :7]), initial_memory(model.config, 2, mem_len=7))
    second, _ = model.logits(causal_batch(ids[:, 7:]), memory)
    torch.testing.assert_close(torch.cat([first, second], 1), long, atol=2e-5, rtol=1e-5)


def test_no_gradient_reaches_the_window_that_memory_came_from(model_of):
    model, embedded = model_of(), []

    def keep(module, inputs, outputs):
        vectors, _ = outputs
        vectors.retain_grad()
        embedded.append(vectors)

    model.backbone.word_embedding.register_forward_hook(keep)
    _, memory = model(random_batch(seed=0), random_memory(model.config, 2, 6))
    loss, _ = model(random_batch(seed=1), memory)
    loss.backward()
    assert memory.hidden.grad_fn is None
    assert embedded[0].grad is None and embedded[1].grad.abs().sum() > 0


def test_only_the_reused_part_enters_memory_oldest_first():
    memory, new = torch.arange(5.0).view(1, 1, 5, 1), torch.tensor([7.0, 8.0]).view(1, 1, 2, 1)
    assert append_columns(memory, new).flatten().tolist() == [2, 3, 4, 7, 8]
    assert append_columns(memory[:, :, :0], new).shape == (1, 1, 0, 1)
    assert append_columns(memory[:, :, :1], new).flatten().tolist() == [8]


def test_memory_holds_the_inputs_of_each_layer(model_of):
    model, inputs = model_of(), []
    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[1].content))
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


def test_a_row_whose_lane_jumped_starts_with_an_empty_memory(model_of):
    model = model_of()
    batch = dataclasses.replace(random_batch(13, 6), visible_mem_len=torch.tensor([MANY, 0]))
    memory = random_memory(model.config, 2, 8)
    with_memory, kept = model.backbone(batch, memory)
    without, _ = model.backbone(batch, initial_memory(model.config, 2, mem_len=0))
    assert not torch.allclose(with_memory[0], without[0])
    torch.testing.assert_close(with_memory[1], without[1], atol=1e-5, rtol=1e-5)
    assert kept.valid.tolist() == [8, 6]


def test_a_row_sees_no_more_of_its_memory_than_it_remembers(model_of):
    model = model_of()
    batch = dataclasses.replace(random_batch(13, 6), visible_mem_len=torch.tensor([3, MANY]))
    memory = random_memory(model.config, 2, 8)
    memory.hidden.requires_grad_()
    _, kept = model.backbone(batch, memory)
    assert kept.valid.tolist() == [8, 8]
    (seen,) = torch.autograd.grad(model.backbone(batch, memory)[0].sum(), memory.hidden)
    assert (seen[:, 0, :5] == 0).all() and seen[:, 0, 5:].abs().sum() > 0
    changed = memory.hidden.detach().clone()
    changed[:, 0, :5] = 99.0
    assert torch.equal(model.backbone(batch, memory)[0], model.backbone(batch, Memory(changed, memory.valid))[0])


def test_what_a_row_forgot_does_not_come_back(model_of):
    memory = initial_memory(model_of().config, 1, mem_len=20)
    attended = [HiddenContext(memory.hidden[0], torch.zeros(1, 9, 16))] * 2
    lengths = []
    for visible_mem_len in (0, 6, 12, 2, 8, 14, 0, 6):  # a document ends two tokens before the fourth window
        lengths.append((memory.key_rank(torch.tensor([visible_mem_len])) < 0).sum().item())
        memory = memory.updated(attended, 6, torch.tensor([visible_mem_len]))
    assert lengths == [0, 6, 12, 2, 8, 14, 0, 6]


@pytest.mark.parametrize("mem_len", [0, 5, 8, 40])
def test_memory_that_is_carried_is_all_that_was_read_since_the_lane_jumped(model_of, mem_len):
    lanes = lanes_over(part_of(3000), windows_per_run=7)
    memory = initial_memory(model_of().config, 4, mem_len=mem_len)
    attended = [HiddenContext(memory.hidden[0], torch.zeros(4, 8, 16))] * 2
    valid = torch.zeros(4, dtype=torch.long)
    for step in range(30):
        valid = valid * (step % lanes.windows_per_run > 0)
        visible_mem_len = torch.tensor([lanes.location(lane, step).visible_mem_len for lane in range(4)])
        seen = memory.key_rank(visible_mem_len) < 0
        assert torch.equal(seen, torch.arange(mem_len, 0, -1) <= valid[:, None])
        memory = memory.updated(attended, 8, visible_mem_len)
        valid = (valid + 8).clamp(max=mem_len)


@pytest.mark.parametrize("lane", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("at_document_end", ["carry", "cut"])
def test_memory_cut_at_a_documents_end_shows_nothing_of_the_document_before(lane, at_document_end):
    ends = np.cumsum(np.arange(1, 60))
    documents = SplitData(np.repeat(np.arange(59.0), np.arange(1, 60)), ends, ends)  # a token is its document's number
    lanes = lanes_over(documents, 2, windows_per_run=50, at_document_end=at_document_end)
    memory = Memory(torch.zeros(1, 1, 24, 1), torch.tensor([0]))
    n_seen = n_others = 0
    for step in range(100):
        place = lanes.location(lane, step)
        window = torch.from_numpy(place.text.tokens(place.begin, place.begin + 8).copy())
        visible_mem_len = torch.tensor([place.visible_mem_len])
        seen = memory.hidden[0, memory.key_rank(visible_mem_len) < 0]
        n_seen, n_others = n_seen + len(seen), n_others + (seen != window[0]).sum().item()
        memory = memory.updated([HiddenContext(memory.hidden[0], window[None, :, None])], 8, visible_mem_len)
    assert n_seen > 300
    assert (n_others == 0) == (at_document_end == "cut")


def test_zeros_as_first_memory_are_seen(model_of):
    model, batch = model_of(mem_len=4), random_batch()
    outputs = [model.backbone(batch, initial_memory(model.config, 2, initial=how))[0] for how in ("empty", "zeros")]
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_memory_that_is_not_finite_is_emptied_and_the_others_stay_bit_for_bit(model_of, dtype, bad):
    memory = random_memory(model_of().config, 3, 5, valid=4)
    memory = Memory(memory.hidden.to(dtype), memory.valid)
    memory.hidden[0, 0, 2, 1] = -0.0
    was = memory.hidden.clone()
    memory.hidden[1, 1, 3, 7] = bad
    restarted = memory.reset_nonfinite_rows()
    assert restarted.hidden.dtype == dtype and restarted.valid.tolist() == [4, 0, 4]
    assert (restarted.hidden[:, 1] == 0).all()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(restarted.hidden[:, ::2].view(bits), was[:, ::2].view(bits))


def test_memory_of_no_columns_is_never_restarted(model_of):
    memory = initial_memory(model_of().config, 2, mem_len=0).reset_nonfinite_rows()
    assert memory.hidden.shape == (2, 2, 0, 16) and memory.valid.tolist() == [0, 0]


@pytest.mark.parametrize("valid", [5, 2], ids=["seen", "not seen"])
def test_a_row_trains_again_after_its_memory_was_restarted(model_of, valid):
    model, batch, memory = model_of(), random_batch(), random_memory(model_of().config, 2, 5, valid=valid)
    memory.hidden[0, 1, 0, 3] = torch.nan
    spoilt, kept = model(batch, memory)
    spoilt.backward()
    assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert kept.hidden[:, 0].isfinite().all()
    if valid == 5:  # what nobody sees need not spread
        assert spoilt.isnan() and not kept.hidden[1, 1].isfinite().all()
    for met in (memory, kept):
        model.zero_grad()
        loss, after = model(batch, met.reset_nonfinite_rows())
        loss.backward()
        assert loss.isfinite() and after.hidden.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("attention_span", ["same_length", "exclude_self_slot"])
def test_without_memory_at_hand_a_query_still_looks_back_as_far_as_the_model_does(model_of, attention_span):
    model = model_of(attention_span=attention_span, mem_len=5, n_layer=1, two_streams=False)
    batch = random_batch(rows=1, backward=False)
    batch = dataclasses.replace(
        batch,
        query_rank=torch.arange(1, 14)[None].int(),
        key_rank=torch.arange(13)[None].int(),
        target_positions=torch.tensor([[12]]),
    )
    embedded = []
    model.backbone.word_embedding.register_forward_hook(
        lambda m, i, output: embedded.append(output.detach().requires_grad_()) or embedded[0]
    )
    hidden, _ = model.backbone(batch, random_memory(model.config, 1, 0))
    hidden.square().sum().backward()
    seen = embedded[0].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert seen == list(range(7 if attention_span == "same_length" else 8, 13))
