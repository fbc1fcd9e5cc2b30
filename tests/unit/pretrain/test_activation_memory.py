"""The memory of activations, foretold, is what autograd keeps in a real step."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pretrain.planning.activation_memory import Activations, Tensors, activations, storages_of
from pretrain.planning.flops import BatchShape
from tests.unit.pretrain.planning_cases import alike, batch_of, built, shares_of
from xlpre.model.config import ModelConfig
from xlpre.model.memory import initial_memory

TRACED = {
    "published": {},
    "no dropout": {"dropout": 0.0, "dropatt": 0.0},
    "gated, pre-norm": {"feed_forward": "swiglu", "norm": "pre"},
    "shaw": {"positions": "shaw", "n_positions": 30},
    "learned": {"positions": "learned", "n_positions": 30},
    "no memory": {"mem_len": 0},
    "adaptive": {"cutoffs": [100, 300], "div_value": 2},
    "one width": {"cutoffs": [100, 300], "d_embed": 32},
    "next sentence": {},
}


class Kept(saved_tensors_hooks):
    """Collects what autograd keeps for backward, besides what was `given`."""

    def __init__(self, given: list[Any]) -> None:
        self._given = storages_of(given)
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._note, lambda tensor: tensor)

    @property
    def n_bytes(self) -> int:
        """Their bytes in all."""
        return sum(storage.nbytes() for storage in self.storages.values())

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._given:
            self.storages[storage._cdata] = storage
        return tensor


def traced_step(kind: str, two_streams: bool, recomputed: bool):
    """A real step: bytes that autograd says it keeps, those there after the forward, the most; and what is foretold."""
    shape = {"vocab_size": 1000, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, "mem_len": 24}
    model = ModelConfig(**{**shape, **TRACED[kind]}, attention_backend="reference")
    asked = BatchShape(4, 48, model.mem_len, 48, 24, two_streams, next_sentence=kind == "next sentence")
    batch, language_model = alike(batch_of(asked, 1000)), built(model, asked, recomputed)
    memory = initial_memory(model, 4, initial="zeros")
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    given_ = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with Tensors(given_) as tensors:
        with (kept := Kept(given_)):
            targets, new_memory, *others = language_model(batch, memory)
            loss = sum(others, start=targets)
        n_kept = kept.n_bytes
        kept.storages.clear()
        after_forward = tensors.live - new_memory.hidden.nbytes
        loss.backward()
    asked = dataclasses.replace(asked, shares=shares_of(model, batch.input_ids))
    found = activations(model, asked, torch.float32, gpu=False, recomputed=recomputed)
    return n_kept, after_forward, tensors.peak, found


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("kind", TRACED)
def test_activations_are_what_a_real_step_keeps_and_needs(kind, two_streams):
    n_kept, after_forward, peak, found = traced_step(kind, two_streams, recomputed=False)
    assert found.kept + found.logits == pytest.approx(n_kept, rel=0.05)
    assert found.kept + found.logits == pytest.approx(after_forward, rel=0.05)
    assert found.all == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("kind", TRACED)
def test_activations_of_layers_that_are_computed_again_are_what_a_real_step_keeps_and_needs(kind, two_streams):
    _, after_forward, peak, found = traced_step(kind, two_streams, recomputed=True)
    assert found.kept + found.logits == pytest.approx(after_forward, rel=0.05)
    assert found.all == pytest.approx(peak, rel=0.05)
    plain = traced_step(kind, two_streams, recomputed=False)[-1]
    assert found.kept < plain.kept / 2
    assert found.all < plain.all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_are_a_little_over_half(dtype):
    shape = BatchShape(2, 64, 48, 10, 32)
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256, attention_backend="reference")
    full, half = (activations(model, shape, dtype, gpu=True) for dtype in (torch.float32, dtype))
    assert 0.5 < half.kept / full.kept < 0.75  # probabilities are computed in fp32, dropout keeps a byte in both


def test_a_model_whose_attention_is_written_by_hand_can_be_planned():
    shape = BatchShape(2, 64, 48, 10, 32)
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256, attention_backend="cpu")
    assert activations(model, shape, torch.float32, gpu=False).kept > 0


def test_layers_that_are_computed_again_keep_their_input_and_what_they_share():
    shape, width = BatchShape(2, 64, 48, 10, 32), 64
    model = ModelConfig(vocab_size=500, n_layer=40, d_model=width, n_head=4, d_inner=256, attention_backend="reference")
    less = dataclasses.replace(model, n_layer=20)
    of_20_layers, of_40_layers = (
        activations(shape_of, shape, torch.bfloat16, gpu=True, recomputed=True).kept for shape_of in (less, model)
    )
    assert of_40_layers - of_20_layers == 20 * 2 * (64 + 10) * width * 2  # layers x rows x (T + P) x D x bytes


def of_triton(shape: BatchShape, dropatt: float = 0.0) -> Activations:
    model = ModelConfig(
        vocab_size=500, n_layer=1, d_model=256, n_head=16, d_inner=32, attention_backend="triton", dropout=0.0
    )
    return activations(dataclasses.replace(model, dropatt=dropatt), shape, torch.bfloat16, gpu=True)


def test_triton_works_with_the_scores_of_a_layer_and_the_bits_of_dropout_and_keeps_neither():
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    shape = BatchShape(3, 1024, 512, 1024, 512, two_streams=False)
    plain, dropping = of_triton(shape), of_triton(shape, dropatt=0.1)
    pairs = 3 * 16 * 1024 * (1024 + 512)  # rows, heads, rows of scores, keys
    assert plain.kept + plain.logits < 2 * pairs < plain.working < 3 * pairs
    assert dropping.working - plain.working == pytest.approx(pairs / 8, abs=64)
    assert dropping.kept == pytest.approx(plain.kept, abs=64)


def test_triton_works_with_no_more_than_a_panel_of_scores():
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    from xlpre.model.kernels.triton.panels import PANEL_BYTES

    window, twice = (of_triton(BatchShape(1, T, 0, T, T // 2, two_streams=False)) for T in (2**15, 2**16))
    assert 20 * PANEL_BYTES < 2 * 16 * 2**30  # of all scores
    assert PANEL_BYTES < window.working < 1.5 * PANEL_BYTES
    assert twice.working - window.working < PANEL_BYTES / 2
