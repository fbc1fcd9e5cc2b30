import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.data.test_lanes import lanes_over, split_of
from tests.unit.model.conftest import UNLIMITED, VOCAB, make_model, random_batch, random_memory
from xlpre.batch import causal_batch
from xlpre.data.store import SplitData
from xlpre.model.memory import HiddenContext, Memory, append_columns, initial_memory


def whole_window(ids):
    """A causal batch whose tokens are all targets, see all of memory and enter it."""
    B, T = ids.shape
    return causal_batch(ids, T, targets=ids.roll(-1, 1), visible_mem_len=torch.full((B,), T), reuse_len=T)


def test_two_windows_with_memory_equal_one_long_window():
    model = make_model(two_streams=False, n_layer=3)
    ids = torch.randint(9, VOCAB, (2, 14))
    long, _ = model.logits(whole_window(ids), initial_memory(model.config, 2, mem_len=0))
    first, memory = model.logits(whole_window(ids[:, :7]), initial_memory(model.config, 2, mem_len=7))
    second, _ = model.logits(whole_window(ids[:, 7:]), memory)
    torch.testing.assert_close(torch.cat([first, second], 1), long, atol=2e-5, rtol=1e-5)


def test_no_gradient_flows_into_memory():
    model, embeddings = make_model(), []

    def keep(module, inputs, outputs):
        output, _ = outputs
        output.retain_grad()
        embeddings.append(output)

    model.backbone.word_embedding.register_forward_hook(keep)
    _, memory = model(random_batch(seed=0), random_memory(model.config, 2, 6))
    loss, _ = model(random_batch(seed=1), memory)
    loss.backward()
    assert memory.hidden.grad_fn is None
    assert embeddings[0].grad is None and embeddings[1].grad.abs().sum() > 0


def test_columns_are_appended_and_the_oldest_dropped():
    memory, new = torch.arange(5.0).view(1, 1, 5, 1), torch.tensor([7.0, 8.0]).view(1, 1, 2, 1)
    assert append_columns(memory, new).flatten().tolist() == [2, 3, 4, 7, 8]
    assert append_columns(memory[:, :, :0], new).shape == (1, 1, 0, 1)
    assert append_columns(memory[:, :, :1], new).flatten().tolist() == [8]


def test_memory_stores_the_inputs_of_each_layer():
    model, inputs = make_model(), []
    for layer in model.backbone.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[1].content))
    _, memory = model(random_batch(13, 6), random_memory(model.config, 2, 6))
    for stored, content in zip(memory.hidden, inputs, strict=True):
        assert torch.equal(stored, content[:, :6])


@pytest.mark.parametrize("valid", [0, 2, 5])
def test_invalid_columns_are_hidden(valid):
    model, batch = make_model(), random_batch()
    memory = random_memory(model.config, 2, 5, valid=valid)
    noise = memory.hidden.clone()
    noise[:, :, : 5 - valid] = 99.0
    cut = Memory(memory.hidden[:, :, 5 - valid :], memory.valid)
    outputs = [model.backbone(batch, one)[0] for one in (memory, Memory(noise, memory.valid), cut)]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-5, rtol=1e-5)


def test_a_row_with_visible_mem_len_0_sees_no_memory():
    model = make_model()
    batch = dataclasses.replace(random_batch(13, 6), visible_mem_len=torch.tensor([UNLIMITED, 0]))
    memory = random_memory(model.config, 2, 8)
    with_memory, after = model.backbone(batch, memory)
    without, _ = model.backbone(batch, initial_memory(model.config, 2, mem_len=0))
    assert not torch.allclose(with_memory[0], without[0])
    torch.testing.assert_close(with_memory[1], without[1], atol=1e-5, rtol=1e-5)
    assert after.valid.tolist() == [8, 6]


def test_a_row_sees_at_most_visible_mem_len_columns():
    model = make_model()
    batch = dataclasses.replace(random_batch(13, 6), visible_mem_len=torch.tensor([3, UNLIMITED]))
    memory = random_memory(model.config, 2, 8)
    memory.hidden.requires_grad_()
    _, after = model.backbone(batch, memory)
    assert after.valid.tolist() == [8, 8]
    (seen,) = torch.autograd.grad(model.backbone(batch, memory)[0].sum(), memory.hidden)
    assert (seen[:, 0, :5] == 0).all() and seen[:, 0, 5:].abs().sum() > 0
    changed = memory.hidden.detach().clone()
    changed[:, 0, :5] = 99.0
    assert torch.equal(model.backbone(batch, memory)[0], model.backbone(batch, Memory(changed, memory.valid))[0])


def test_columns_hidden_once_stay_hidden():
    memory = initial_memory(make_model().config, 1, mem_len=20)
    contexts = [HiddenContext(memory.hidden[0], torch.zeros(1, 9, 16))] * 2
    lengths = []
    for visible_mem_len in (0, 6, 12, 2, 8, 14, 0, 6):  # a document ends two tokens before the fourth window
        lengths.append((memory.key_rank(torch.tensor([visible_mem_len])) < 0).sum().item())
        memory = memory.updated(contexts, 6, torch.tensor([visible_mem_len]))
    assert lengths == [0, 6, 12, 2, 8, 14, 0, 6]


@pytest.mark.parametrize("mem_len", [0, 5, 8, 40])
def test_carried_memory_holds_everything_since_the_start_of_the_run(mem_len):
    lanes = lanes_over(split_of(3000), windows_per_run=7)
    memory = initial_memory(make_model().config, 4, mem_len=mem_len)
    contexts = [HiddenContext(memory.hidden[0], torch.zeros(4, 8, 16))] * 2
    valid = torch.zeros(4, dtype=torch.long)
    for step in range(30):
        valid = valid * (step % lanes.windows_per_run > 0)
        visible_mem_len = torch.tensor([lanes.location(lane, step).visible_mem_len for lane in range(4)])
        seen = memory.key_rank(visible_mem_len) < 0
        assert torch.equal(seen, torch.arange(mem_len, 0, -1) <= valid[:, None])
        memory = memory.updated(contexts, 8, visible_mem_len)
        valid = (valid + 8).clamp(max=mem_len)


@pytest.mark.parametrize("lane", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("at_document_end", ["carry", "cut"])
def test_memory_cut_at_a_document_end_hides_the_previous_document(lane, at_document_end):
    ends = np.cumsum(np.arange(1, 60))
    documents = SplitData(
        np.repeat(np.arange(59.0), np.arange(1, 60)), ends, ends
    )  # each token is the number of its document
    lanes = lanes_over(documents, 2, windows_per_run=50, at_document_end=at_document_end)
    memory = Memory(torch.zeros(1, 1, 24, 1), torch.tensor([0]))
    n_seen = n_others = 0
    for step in range(100):
        location = lanes.location(lane, step)
        window = torch.from_numpy(location.text.tokens(location.begin, location.begin + 8).copy())
        visible_mem_len = torch.tensor([location.visible_mem_len])
        seen = memory.hidden[0, memory.key_rank(visible_mem_len) < 0]
        n_seen, n_others = n_seen + len(seen), n_others + (seen != window[0]).sum().item()
        memory = memory.updated([HiddenContext(memory.hidden[0], window[None, :, None])], 8, visible_mem_len)
    assert n_seen > 300
    assert (n_others == 0) == (at_document_end == "cut")


def test_initial_zeros_are_visible():
    model, batch = make_model(mem_len=4), random_batch()
    outputs = [
        model.backbone(batch, initial_memory(model.config, 2, initial=initial))[0] for initial in ("empty", "zeros")
    ]
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_resetting_empties_nonfinite_rows_and_keeps_others_bit_for_bit(dtype, bad):
    memory = random_memory(make_model().config, 3, 5, valid=4)
    memory = Memory(memory.hidden.to(dtype), memory.valid)
    memory.hidden[0, 0, 2, 1] = -0.0
    before = memory.hidden.clone()
    memory.hidden[1, 1, 3, 7] = bad
    reset = memory.reset_nonfinite_rows()
    assert reset.hidden.dtype == dtype and reset.valid.tolist() == [4, 0, 4]
    assert (reset.hidden[:, 1] == 0).all()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(reset.hidden[:, ::2].view(bits), before[:, ::2].view(bits))


def test_resetting_memory_without_columns_changes_nothing():
    memory = initial_memory(make_model().config, 2, mem_len=0).reset_nonfinite_rows()
    assert memory.hidden.shape == (2, 2, 0, 16) and memory.valid.tolist() == [0, 0]


@pytest.mark.parametrize("valid", [5, 2], ids=["seen", "not seen"])
def test_training_continues_after_a_memory_reset(valid):
    model, batch, memory = make_model(), random_batch(), random_memory(make_model().config, 2, 5, valid=valid)
    memory.hidden[0, 1, 0, 3] = torch.nan
    bad_loss, after = model(batch, memory)
    bad_loss.backward()
    assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert after.hidden[:, 0].isfinite().all()
    if valid == 5:  # a hidden column need not spread
        assert bad_loss.isnan() and not after.hidden[1, 1].isfinite().all()
    for bad in (memory, after):
        model.zero_grad()
        loss, new = model(batch, bad.reset_nonfinite_rows())
        loss.backward()
        assert loss.isfinite() and new.hidden.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("attention_span", ["same_length", "exclude_self_slot"])
def test_attention_span_does_not_shrink_without_memory(attention_span):
    model = make_model(attention_span=attention_span, mem_len=5, n_layer=1, two_streams=False)
    batch = random_batch(rows=1, backward=False)
    batch = dataclasses.replace(
        batch,
        query_rank=torch.arange(1, 14)[None].int(),
        key_rank=torch.arange(13)[None].int(),
        target_positions=torch.tensor([[12]]),
    )
    embeddings = []
    model.backbone.word_embedding.register_forward_hook(
        lambda m, i, output: embeddings.append(output.detach().requires_grad_()) or embeddings[0]
    )
    hidden, _ = model.backbone(batch, random_memory(model.config, 1, 0))
    hidden.square().sum().backward()
    seen = embeddings[0].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert seen == list(range(7 if attention_span == "same_length" else 8, 13))
