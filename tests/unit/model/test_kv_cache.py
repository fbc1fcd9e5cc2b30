"""KVCache: the numbers of Memory at less cost."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.model.conftest import UNLIMITED, make_model, random_batch, random_memory
from xlpre.model.layer import LAYERS
from xlpre.model.memory import initial_memory
from xlpre.model.positions import SCHEMES


def read(model, memory, batches):
    """Hidden states at the targets of each window, and memory after the last."""
    outputs = []
    for batch in batches:
        hidden, memory = model.backbone(batch, memory)
        outputs.append(hidden)
    return outputs, memory


@torch.no_grad()
def test_a_cache_that_does_not_fit_the_model_is_refused():
    model, batch = make_model(two_streams=False).eval(), random_batch()
    cache = model.backbone.to_kv_cache(initial_memory(model.config, 2, mem_len=3))
    wrong = {
        r"float32.*need .*bfloat16": (torch.bfloat16, cache),
        r"valid of 1 rows": (torch.float32, dataclasses.replace(cache, valid=cache.valid[:1])),
    }
    for message, (dtype, memory) in wrong.items():
        with pytest.raises(ValueError, match=message):
            model.to(dtype).backbone(batch, memory)


@settings(max_examples=examples(40))
@given(
    two_streams=st.booleans(),
    attention_backend=st.sampled_from(["reference", "sdpa", "cpu", "auto"]),
    positions=st.sampled_from(list(SCHEMES)),
    norm=st.sampled_from(list(LAYERS)),
    attention_span=st.sampled_from(["all", "same_length", "exclude_self_slot"]),
    relative_segments=st.booleans(),
    qk_norm=st.booleans(),
    clamp=st.booleans(),
    mem_len=st.integers(0, 30),
    initial=st.sampled_from(["empty", "zeros", "read"]),
    lengths=st.lists(st.integers(9, 14), min_size=3, max_size=3),
    visible_mem_len=st.lists(st.sampled_from([0, 2, UNLIMITED]), min_size=3, max_size=3),
    backward=st.sampled_from([False, True, None]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_a_kv_cache_gives_the_hidden_states_of_memory(
    two_streams,
    attention_backend,
    attention_span,
    initial,
    lengths,
    visible_mem_len,
    backward,
    seed,
    mem_len,
    clamp,
    **shape,
):
    scheme = shape["positions"]
    model = make_model(
        two_streams,
        seed,
        **shape,
        attention_backend=attention_backend,
        attention_span=attention_span,
        mem_len=3,
        n_positions=5 if scheme in ("shaw", "learned") else None,
        clamp_len=3 if clamp and scheme != "learned" else None,
    ).eval()
    if initial == "read":
        memory = random_memory(model.config, 2, mem_len, valid=mem_len // 2)
    else:
        memory = initial_memory(model.config, 2, mem_len=mem_len, initial=initial)
    batches = [
        random_batch(length, length // 2 - 1, seed=seed + i, backward=backward, visible_mem_len=visible)
        for i, (length, visible) in enumerate(zip(lengths, visible_mem_len, strict=True))
    ]
    expected, last = read(model, memory, batches)
    actual, cache = read(model, model.backbone.to_kv_cache(memory), batches)
    assert torch.equal(cache.valid, last.valid) and cache.mem_len == mem_len
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)  # float32, products of other shapes


@torch.no_grad()
def test_with_a_kv_cache_a_window_projects_only_its_own_tokens():
    model = make_model(attention_backend="reference").eval()
    memory, rows = model.backbone.to_kv_cache(random_memory(model.config, 2, 8)), []
    _, memory = model.backbone(random_batch(13, 6), memory)
    for name, module in model.named_modules():
        if name.endswith((".key", ".value", "pos_encoding")):
            module.register_forward_hook(lambda module, args, out, name=name: rows.append((name, out.shape[:2])))
    model.backbone(random_batch(13, 6, seed=1), memory)
    assert {name for name, _ in rows} == {
        f"backbone.layers.{i}.attention.{x}" for i in (0, 1) for x in ("key", "value")
    }
    assert {shape for _, shape in rows} == {(2, 13)}


@torch.no_grad()
def test_reading_does_not_change_a_kv_cache():
    model = make_model().eval()
    memory = model.backbone.to_kv_cache(random_memory(model.config, 2, 8))
    first, _ = read(model, memory, [random_batch(13, 6, seed=seed) for seed in (0, 1, 2)])
    again, _ = read(model, memory, [random_batch(13, 6, seed=seed) for seed in (0, 1, 2)])
    assert all(map(torch.equal, first, again))


@torch.no_grad()
def test_a_kv_cache_does_not_grow_with_the_number_of_window_lengths():
    model = make_model().eval()
    memory = model.backbone.to_kv_cache(random_memory(model.config, 2, 8))
    for length in [*range(9, 30), 14]:
        _, memory = model.backbone(random_batch(length, 4), memory)
    sizes = [(8 + length, length) for length in (27, 28, 29, 14)]
    assert list(memory.window_terms) == sizes


@torch.no_grad()
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_memory_is_not_converted_if_positions_are_added_to_hidden_states(positions):
    model = make_model(positions=positions, n_positions=30 if positions == "learned" else None).eval()
    memory = random_memory(model.config, 2, 8)
    assert model.backbone.to_kv_cache(memory) is memory


def test_a_kv_cache_is_refused_in_training():
    model = make_model()
    memory = random_memory(model.config, 2, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=r"KVCache .*model.eval\(\)"):
        model.backbone.to_kv_cache(memory)
    with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
        model.eval().backbone.to_kv_cache(memory)
