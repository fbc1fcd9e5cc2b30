"""The predicted activation memory equals what autograd saves in a real step."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pretrain.planning.activation_memory import ActivationMemory, TensorTracker, activation_memory, storage_keys
from pretrain.planning.flops import BatchShape
from tests.unit.pretrain.planning_cases import build_model, fractions_of, random_batch, with_inputs_as_targets
from xlpre.model.config import ModelConfig
from xlpre.model.memory import initial_memory

VARIANTS = {
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


class SavedTensors(saved_tensors_hooks):
    """Collect the tensors that autograd saves for backward, without those in `excluded`."""

    def __init__(self, excluded: list[Any]) -> None:
        self._excluded = storage_keys(excluded)
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._record, lambda tensor: tensor)

    @property
    def n_bytes(self) -> int:
        """Sum of their sizes."""
        return sum(storage.nbytes() for storage in self.storages.values())

    def _record(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._excluded:
            self.storages[storage._cdata] = storage
        return tensor


def run_step(kind: str, two_streams: bool, checkpointed: bool, backend: str = "reference"):
    """Run a real step; return bytes saved by autograd, bytes alive after the forward pass, the peak, and the prediction."""
    sizes = {"vocab_size": 1000, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, "mem_len": 24}
    model = ModelConfig(**{**sizes, **VARIANTS[kind]}, attention_backend=backend)
    shape = BatchShape(4, 48, model.mem_len, 48, 24, two_streams, next_sentence=kind == "next sentence")
    batch = with_inputs_as_targets(random_batch(shape, 1000))
    language_model = build_model(model, shape, checkpointed)
    memory = initial_memory(model, 4, initial="zeros")
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    inputs = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with TensorTracker(inputs) as tracker:
        with (saved := SavedTensors(inputs)):
            target_loss, new_memory, *auxiliary = language_model(batch, memory)
            loss = sum(auxiliary, start=target_loss)
        saved_bytes = saved.n_bytes
        saved.storages.clear()
        after_forward = tracker.live - new_memory.hidden.nbytes
        loss.backward()
    shape = dataclasses.replace(shape, cluster_fractions=fractions_of(model, batch.input_ids))
    predicted = activation_memory(model, shape, torch.float32, gpu=False, activation_checkpointing=checkpointed)
    return saved_bytes, after_forward, tracker.peak, predicted


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("kind", VARIANTS)
def test_predicted_activations_equal_those_of_a_real_step(kind, two_streams):
    saved_bytes, after_forward, peak, predicted = run_step(kind, two_streams, checkpointed=False)
    assert predicted.saved + predicted.logits == pytest.approx(saved_bytes, rel=0.05)
    assert predicted.saved + predicted.logits == pytest.approx(after_forward, rel=0.05)
    assert predicted.peak == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("kind", VARIANTS)
def test_predicted_activations_equal_those_of_a_real_step_with_checkpointing(kind, two_streams):
    _, after_forward, peak, predicted = run_step(kind, two_streams, checkpointed=True)
    assert predicted.saved + predicted.logits == pytest.approx(after_forward, rel=0.05)
    assert predicted.peak == pytest.approx(peak, rel=0.05)
    plain = run_step(kind, two_streams, checkpointed=False)[-1]
    assert predicted.saved < plain.saved / 2
    assert predicted.peak < plain.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_are_slightly_over_half(dtype):
    shape = BatchShape(2, 64, 48, 10, 32)
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256, attention_backend="reference")
    full, half = (activation_memory(model, shape, dtype, gpu=True) for dtype in (torch.float32, dtype))
    assert 0.5 < half.saved / full.saved < 0.75  # probabilities are in fp32, and dropout saves a byte in both


def test_the_prediction_is_an_upper_bound_for_the_cpu_backend():
    _, after_forward, peak, predicted = run_step("published", True, checkpointed=False, backend="cpu")
    assert after_forward < predicted.saved + predicted.logits < 2 * after_forward
    assert peak < predicted.peak < 2 * peak


def test_checkpointed_layers_save_their_input_and_shared_tensors_only():
    shape, width = BatchShape(2, 64, 48, 10, 32), 64
    model = ModelConfig(vocab_size=500, n_layer=40, d_model=width, n_head=4, d_inner=256, attention_backend="reference")
    half = dataclasses.replace(model, n_layer=20)
    of_20_layers, of_40_layers = (
        activation_memory(config, shape, torch.bfloat16, gpu=True, activation_checkpointing=True).saved
        for config in (half, model)
    )
    assert of_40_layers - of_20_layers == 20 * 2 * (64 + 10) * width * 2  # layers x rows x (T + P) x D x bytes


def triton_memory(shape: BatchShape, dropatt: float = 0.0) -> ActivationMemory:
    model = ModelConfig(
        vocab_size=500, n_layer=1, d_model=256, n_head=16, d_inner=32, attention_backend="triton", dropout=0.0
    )
    return activation_memory(dataclasses.replace(model, dropatt=dropatt), shape, torch.bfloat16, gpu=True)


def test_triton_needs_scores_and_dropout_bits_of_a_layer_as_workspace_only():
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    shape = BatchShape(3, 1024, 512, 1024, 512, two_streams=False)
    plain, with_dropout = triton_memory(shape), triton_memory(shape, dropatt=0.1)
    pairs = 3 * 16 * 1024 * (1024 + 512)  # rows, heads, queries, keys
    assert plain.saved + plain.logits < 2 * pairs < plain.workspace < 3 * pairs
    assert with_dropout.workspace - plain.workspace == pytest.approx(pairs / 8, abs=64)
    assert with_dropout.saved == pytest.approx(plain.saved, abs=64)


def test_triton_needs_a_panel_of_scores_at_most():
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    from xlpre.model.kernels.triton.panels import PANEL_BYTES

    window, double_window = (triton_memory(BatchShape(1, T, 0, T, T // 2, two_streams=False)) for T in (2**15, 2**16))
    assert 20 * PANEL_BYTES < 2 * 16 * 2**30  # bytes of all scores
    assert PANEL_BYTES < window.workspace < 1.5 * PANEL_BYTES
    assert double_window.workspace - window.workspace < PANEL_BYTES / 2
