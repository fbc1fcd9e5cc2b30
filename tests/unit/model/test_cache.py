"""Keys and values in place of hidden states: the same numbers, at less work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.model.conftest import MANY, make_model, random_batch, random_memory
from xlpre.model.layer import LAYERS
from xlpre.model.memory import initial_memory
from xlpre.model.positions import SCHEMES


def read(model, memory, batches):
    """Hidden states at the targets of each window, and what is past after the last."""
    found = []
    for batch in batches:
        hidden, memory = model.backbone(batch, memory)
        found.append(hidden)
    return found, memory


@settings(max_examples=40, deadline=None)
@given(
    two_streams=st.booleans(),
    attention=st.sampled_from(["reference", "sdpa", "cpu", "auto"]),
    positions=st.sampled_from(list(SCHEMES)),
    norm=st.sampled_from(list(LAYERS)),
    attention_span=st.sampled_from(["all", "same_length", "exclude_self_slot"]),
    relative_segments=st.booleans(),
    clamp=st.booleans(),
    mem_len=st.integers(0, 30),
    initial=st.sampled_from(["empty", "zeros", "read"]),
    lengths=st.lists(st.integers(9, 14), min_size=3, max_size=3),
    visible_mem_len=st.lists(st.sampled_from([0, 2, MANY]), min_size=3, max_size=3),
    backward=st.sampled_from([False, True, None]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_keys_and_values_of_memory_read_on_as_its_hidden_states(
    two_streams, attention, attention_span, initial, lengths, visible_mem_len, backward, seed, mem_len, clamp, **shape
):
    scheme = shape["positions"]
    model = make_model(
        two_streams,
        seed,
        **shape,
        attention_backend=attention,
        attention_span=attention_span,
        mem_len=3,
        n_positions=5 if scheme in ("shaw", "learned") else 0,
        clamp_len=3 if clamp and scheme != "learned" else -1,
    ).eval()
    if initial == "read":
        memory = random_memory(model.config, 2, mem_len, valid=mem_len // 2)
    else:
        memory = initial_memory(model.config, 2, mem_len=mem_len, initial=initial)
    batches = [
        random_batch(length, length // 2 - 1, seed=seed + i, backward=backward, visible_mem_len=shown)
        for i, (length, shown) in enumerate(zip(lengths, visible_mem_len, strict=True))
    ]
    expected, last = read(model, memory, batches)
    found, past = read(model, model.backbone.to_kv_cache(memory), batches)
    assert torch.equal(past.valid, last.valid) and past.mem_len == mem_len
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)  # float32, products of other shapes


@torch.no_grad()
def test_a_window_projects_its_own_tokens_and_no_distance_again():
    model = make_model(attention_backend="reference").eval()
    memory, rows = model.backbone.to_kv_cache(random_memory(model.config, 2, 8)), []
    _, memory = model.backbone(random_batch(13, 6), memory)
    for name, module in model.named_modules():
        if name.endswith((".key", ".value", "pos_encoding")):
            module.register_forward_hook(lambda module, given, out, name=name: rows.append((name, out.shape[:2])))
    model.backbone(random_batch(13, 6, seed=1), memory)
    assert {name for name, _ in rows} == {
        f"backbone.layers.{i}.attention.{x}" for i in (0, 1) for x in ("key", "value")
    }
    assert {shape for _, shape in rows} == {(2, 13)}


@torch.no_grad()
def test_keys_and_values_that_were_read_on_from_are_as_they_were():
    model = make_model().eval()
    memory = model.backbone.to_kv_cache(random_memory(model.config, 2, 8))
    first, _ = read(model, memory, [random_batch(13, 6, seed=seed) for seed in (0, 1, 2)])
    again, _ = read(model, memory, [random_batch(13, 6, seed=seed) for seed in (0, 1, 2)])
    assert all(map(torch.equal, first, again))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_hidden_states_stay_where_a_place_is_added_to_them_in_each_window(positions):
    model = make_model(positions=positions, n_positions=30 * (positions == "learned")).eval()
    memory = random_memory(model.config, 2, 8)
    assert model.backbone.to_kv_cache(memory) is memory


def test_keys_and_values_are_kept_at_evaluation_only():
    model = make_model()
    memory = random_memory(model.config, 2, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=r"at evaluation only: call model.eval\(\)"):
        model.backbone.to_kv_cache(memory)
    with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
        model.eval().backbone.to_kv_cache(memory)
