import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pretrain.activations import Tensors, activations, storages_of
from pretrain.config import PretrainConfig
from pretrain.cost import (
    BatchShape,
    batch_shape,
    flops_of_reading,
    flops_per_step,
    operations,
    parameters,
    tensor_sizes,
)
from pretrain.plan import main
from pretrain.planning import Plan
from tests.conftest import REPOSITORY, has_bf16, has_fp16
from xlpre.batch import Batch
from xlpre.config import load
from xlpre.model.cache import cached
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import first_memory
from xlpre.training.devices import DEVICES, state_of, traffic_of

PRESETS = sorted((REPOSITORY / "configs/pretrain").glob("*.yaml"))
CONFIG = str(REPOSITORY / "configs/pretrain/xlnet_large_v2.yaml")
LARGE = ModelConfig(vocab_size=32000, n_layer=24, d_model=1024, n_head=16, d_inner=4096)


@st.composite
def models(draw) -> ModelConfig:
    """Small models of every kind."""
    positions = draw(st.sampled_from(["relative", "shaw", "sinusoidal", "learned"]))
    cutoffs = draw(st.sampled_from([[], [20], [13, 40]]))
    return ModelConfig(
        vocab_size=60,
        n_layer=draw(st.integers(1, 3)),
        d_model=draw(st.sampled_from([8, 16])),
        n_head=draw(st.sampled_from([1, 2])),
        d_head=draw(st.sampled_from([0, 6])),
        d_inner=draw(st.integers(3, 30)),
        feed_forward=draw(st.sampled_from(["gelu", "relu", "glu", "swiglu"])),
        norm=draw(st.sampled_from(["post", "pre", "pre_keys"])),
        mem_len=draw(st.sampled_from([0, 5, 12])),
        positions=positions,
        n_positions=draw(st.integers(1, 9)) if positions in ("shaw", "learned") else 0,
        relative_segments=draw(st.booleans()),
        untie_r=draw(st.booleans()),
        cutoffs=cutoffs,
        div_value=draw(st.sampled_from([1, 2])) if cutoffs else 1,
        d_embed=draw(st.sampled_from([0, 4])),
        tie_embedding=draw(st.booleans()),
        tie_projections=draw(st.lists(st.booleans(), min_size=len(cutoffs) + 1, max_size=len(cutoffs) + 1)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        attention="reference",
    )


@st.composite
def shapes(draw) -> BatchShape:
    window, two_streams = draw(st.integers(4, 12)), draw(st.booleans())
    targets = draw(st.integers(1, window))
    rows, mem_len, next_sentence = draw(st.integers(1, 3)), draw(st.sampled_from([0, 5])), draw(st.booleans())
    return BatchShape(rows, window, mem_len, targets, window // 2, two_streams, next_sentence)


def batch_of(shape: BatchShape, vocab_size: int) -> Batch:
    B, T, P = shape.rows, shape.window, shape.targets
    rank = torch.zeros(B, T, dtype=torch.int32)
    positions = torch.stack([torch.randperm(T)[:P].sort().values for _ in range(B)])
    return Batch(
        input_ids=torch.randint(vocab_size, (B, T)),
        segment_ids=torch.randint(2, (B, T)),
        query_rank=rank + 1,
        key_rank=rank,
        target_positions=positions,
        targets=torch.randint(vocab_size, (B, P)),
        target_weights=torch.ones(B, P),
        backward=torch.arange(B) % 2 == 1,
        remembers=torch.full((B,), 100),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=shape.reuse_len,
    )


def shares_of(model: ModelConfig, ids: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(((ids >= low) & (ids < high)).float().mean()) for low, high, _ in model.clusters)


def alike(batch: Batch) -> Batch:
    """Targets in the same clusters, in the same numbers, as the tokens that are read."""
    return dataclasses.replace(batch, targets=batch.input_ids[:, : batch.targets.size(1)].clone())


@settings(max_examples=60, deadline=None)
@given(models(), st.booleans(), st.booleans())
def test_parameters_by_part_are_those_of_the_built_model(model, two_streams, next_sentence):
    sizes = [parameter.numel() for parameter in LanguageModel(model, two_streams, next_sentence).parameters()]
    assert sum(parameters(model, two_streams, next_sentence).values()) == sum(sizes)
    assert tensor_sizes(model, next_sentence) == sizes


@settings(max_examples=100, deadline=None)
@given(models())
def test_the_parts_are_what_they_are_called(model):
    found, D, A, L = parameters(model), model.d_model, model.n_head * model.head_width, model.n_layer
    gated = model.feed_forward in ("glu", "swiglu")
    width = 2 * model.d_inner // 3 if gated else model.d_inner
    relative = model.positions == "relative"
    n_biases = {"relative": 2, "shaw": 1}.get(model.positions, 0) + model.relative_segments
    assert found["attention"] == L * 4 * D * A
    assert found["feed-forward"] == L * (2 + gated) * D * width
    assert found["norms"] == L * 4 * D
    assert found["segments"] == L * 2 * A * model.relative_segments
    assert not relative or found["positions"] == L * D * A
    of_layers = L * ((1 + gated) * width + D) + (L if model.untie_r else 1) * n_biases * A
    assert found["biases"] == of_layers + model.vocab_size + len(model.cutoffs)
    more = parameters(model, next_sentence=True)
    assert (more["next sentence"], more["biases"]) == (D * D + 2 * D, found["biases"] + D + 2)


def built(model: ModelConfig, shape: BatchShape, recomputed: bool) -> LanguageModel:
    language_model = LanguageModel(model, shape.two_streams, shape.next_sentence)
    if recomputed:
        language_model.backbone.recompute_layers()
    return language_model


def counted(model: ModelConfig, shape: BatchShape, recomputed: bool = False) -> tuple[int, BatchShape]:
    """What torch counts in a real step, and the shape with the shares of clusters that were there."""
    language_model = built(model, shape, recomputed)
    batch = batch_of(shape, model.vocab_size)
    if shape.targets == shape.window:
        batch = alike(batch)
    memory = first_memory(model, shape.rows, mem_len=shape.mem_len, initial="zeros")
    with FlopCounterMode(display=False) as counter:
        loss, _, *others = language_model(batch, memory)
        sum(others, start=loss).backward()
    return counter.get_total_flops(), dataclasses.replace(shape, shares=shares_of(model, batch.input_ids))


@settings(max_examples=60, deadline=None)
@given(models().filter(lambda model: not model.cutoffs), shapes(), st.booleans())
def test_operations_are_those_that_torch_counts_in_a_step(model, shape, recomputed):
    total, _ = counted(model, shape, recomputed)
    # torch stops computing again at the last tensor that is needed, which is before or after the last product
    last = recomputed * 2 * shape.rows * (shape.window + shape.targets) * model.d_model * model.d_inner * model.n_layer
    assert abs(sum(operations(model, shape, recomputed=recomputed).values()) - total) <= last


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
@pytest.mark.parametrize("two_streams", [True, False])
@torch.no_grad()
def test_operations_of_reading_are_those_that_torch_counts_once_keys_and_values_are_known(settings_, two_streams):
    sizes = {"vocab_size": 500, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, "attention": "reference"}
    model = ModelConfig(**{**sizes, **settings_})
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32, two_streams)
    language_model, batch = LanguageModel(model, two_streams).eval(), batch_of(shape, 500)
    memory = cached(first_memory(model, 2, mem_len=shape.mem_len), language_model.backbone)
    _, memory = language_model(batch, memory)
    with FlopCounterMode(display=False) as counter:
        language_model(batch, memory)
    assert flops_of_reading(model, shape, "executed") == counter.get_total_flops()


def test_what_is_computed_again_is_executed_but_not_needed():
    shape = BatchShape(2, 64, 48, 10, 32)
    for counting, more in (("executed", 4 / 3), ("needed", 1)):
        once, twice = (sum(operations(LARGE, shape, counting, again).values()) for again in (False, True))
        assert twice / once == pytest.approx(more, rel=0.03)  # embedding and softmax are not computed again


@settings(max_examples=50, deadline=None)
@given(models().filter(lambda model: model.cutoffs), shapes())
def test_operations_of_an_adaptive_softmax_are_those_of_the_tokens_in_each_cluster(model, shape):
    total, seen = counted(model, dataclasses.replace(shape, targets=shape.window))
    assert sum(operations(model, seen).values()) == pytest.approx(total, rel=1e-5)  # shares are float32


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
def test_operations_agree_at_a_size_where_matrices_are_large(settings_):
    model = ModelConfig(
        **{
            "vocab_size": 500,
            "n_layer": 3,
            "d_model": 64,
            "n_head": 4,
            "d_inner": 256,
            "attention": "reference",
            **settings_,
        }
    )
    shape = BatchShape(2, 64, min(48, model.mem_len), 10, 32)
    assert sum(operations(model, shape).values()) == counted(model, shape)[0]


@pytest.mark.parametrize(
    ("model", "gflop_a_token"), [(LARGE, 2.574), (ModelConfig(vocab_size=32000), 0.752)], ids=["large", "base"]
)
def test_operations_needed_are_those_of_an_exact_implementation(model, gflop_a_token):
    # worked out by hand for T 512, M 384, P 85, reused half of the window, 32 rows
    shape = batch_shape(dataclasses.replace(PretrainConfig(), model=model), 32)
    assert (shape.targets, shape.visible) == (85, pytest.approx(6 / 7))
    assert flops_per_step(model, shape) / (32 * 512 * 1e9) == pytest.approx(gflop_a_token, rel=1e-3)


def test_a_causal_model_needs_a_triangle_of_the_window():
    words = ["objective.name=causal", "data.reuse_len=512", "model.mem_len=0"]
    assert batch_shape(load(PretrainConfig, None, words), 1).visible == pytest.approx(0.5, abs=1e-3)


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
    model = ModelConfig(**{**shape, **TRACED[kind]}, attention="reference")
    asked = BatchShape(4, 48, model.mem_len, 48, 24, two_streams, next_sentence=kind == "next sentence")
    batch, language_model = alike(batch_of(asked, 1000)), built(model, asked, recomputed)
    memory = first_memory(model, 4, initial="zeros")
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
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256, attention="reference")
    full, half = (activations(model, shape, dtype, gpu=True) for dtype in (torch.float32, dtype))
    assert 0.5 < half.kept / full.kept < 0.75  # probabilities are computed in fp32, dropout keeps a byte in both


def test_a_model_whose_attention_is_written_by_hand_can_be_planned():
    shape = BatchShape(2, 64, 48, 10, 32)
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256, attention="cpu")
    assert activations(model, shape, torch.float32, gpu=False).kept > 0


def test_layers_that_are_computed_again_keep_their_input_and_what_they_share():
    shape, width = BatchShape(2, 64, 48, 10, 32), 64
    model = ModelConfig(vocab_size=500, n_layer=40, d_model=width, n_head=4, d_inner=256, attention="reference")
    less = dataclasses.replace(model, n_layer=20)
    of_20_layers, of_40_layers = (
        activations(shape_of, shape, torch.bfloat16, gpu=True, recomputed=True).kept for shape_of in (less, model)
    )
    assert of_40_layers - of_20_layers == 20 * 2 * (64 + 10) * width * 2  # layers x rows x (T + P) x D x bytes


OFFLOADED = ["1 optimizer", "2 optimizer", "3 optimizer", "3 param", "3 param optimizer"]
PRECISIONS = ["bf16", "fp32"] if has_bf16() else ["fp32"]
KEPT = [f"{precision} {how}" for precision in PRECISIONS for how in ["1", "2", "3", *OFFLOADED]]
KEPT += ["fp32 0", *(["fp16 1", "fp16 2", "fp16 3", "fp16 1 optimizer"] if has_fp16() else [])]


@pytest.fixture(scope="module")
def kept_by_deepspeed(tmp_path_factory) -> dict[str, int]:
    """Bytes that process 0 of 2 has after updates; on a CPU what is offloaded is among them."""
    script = tmp_path_factory.mktemp("states") / "states.py"
    script.write_text(STATES)
    out = script.with_suffix(".json")
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(out), *KEPT]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True, timeout=240, capture_output=True)
    return json.loads(out.read_text())


STATES = """
import gc, json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from torch import nn
from xlpre.training.distributed import set_defaults
from xlpre.training.engine import TrainConfig, build_engine, settings_for, start_processes
from xlpre.training.optim import OptimConfig

set_defaults()
device = torch.device("cpu")
start_processes(device)


def tensors():
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


result = {}
for case in sys.argv[2:]:
    precision, stage, *offloaded = case.split()
    gc.collect()
    before = tensors()
    model = nn.Sequential(nn.Linear(200, 200), *(nn.Linear(200, 200, bias=False) for _ in range(9)))
    zero = {"stage": int(stage), "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 1000}
    zero |= {"offload_" + name: {"device": "cpu"} for name in offloaded}
    train = TrainConfig(batch_size=4, accumulation=2, precision=precision)
    engine = build_engine(model, settings_for(train, OptimConfig(), device, 2, {"zero_optimization": zero}), train, OptimConfig(), device)
    x = torch.randn(1, 200, dtype=next(model.parameters()).dtype)
    for _ in range(3):
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        del loss
        engine.step()
    gc.collect()
    now = {key: n for key, n in tensors().items() if key not in before}
    result[case] = sum(now.values())
    engine.destroy()
    del engine, model
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
"""


@pytest.mark.xdist_group("kept_by_deepspeed")  # computed once
@pytest.mark.parametrize("case", KEPT)
def test_weights_gradients_and_optimizer_are_what_deepspeed_keeps(kept_by_deepspeed, case):
    precision, stage, *offloaded = case.split()
    sizes, small, width = [200 * 200] * 10 + [200], 200, 4 if precision == "fp32" else 2
    offloads = {f"offload_{name}": True for name in offloaded}
    state = state_of(sizes, int(stage), 2, precision, bucket=sum(sizes), unsplit=1000, **offloads)
    expected = state.on_device + state.host
    if stage == "3":  # after an update nothing is fetched
        expected -= width * (sum(sizes) - small) * (1 if "param" in offloaded else 1 / 2)
    if stage == "2":  # gives its buffers back after each backward
        expected -= width * sum(sizes)
    assert kept_by_deepspeed[case] == pytest.approx(expected, rel=0.01)  # 0.2 % is padding


def test_small_parameters_are_those_that_are_not_split():
    model = ModelConfig(vocab_size=1000, n_layer=1, d_model=64, n_head=4, d_inner=256, attention="reference")
    split = 1000 * 64 + 2 * 64 * 256
    sizes = tensor_sizes(model)
    assert sum(size for size in sizes if size < 10_000) == sum(parameters(model).values()) - split


def test_an_update_of_one_process_sends_nothing():
    assert [traffic_of(10**6, stage, 1, True, 4) for stage in range(4)] == [0, 0, 0, 0]


def test_sharding_gradients_and_weights_sends_more_with_every_micro_step():
    sent = {stage: [traffic_of(10**6, stage, 8, True, steps) for steps in (1, 4)] for stage in range(4)}
    assert sent[1][0] == sent[1][1] == 7 / 8 * 10**6 * 3 * 2
    assert sent[3][1] == 4 * sent[3][0] == 4 * 7 / 8 * 10**6 * 3 * 2
    assert sent[2][0] < sent[2][1] < sent[3][1]


def plan_of(*words: str, device="h200", gpus=8, n_layer=2) -> Plan:
    return Plan(load(PretrainConfig, CONFIG, [*words, f"model.n_layer={n_layer}"]), DEVICES[device], gpus, 1, 0.4)


def test_the_chosen_micro_batch_fits_and_the_next_larger_does_not():
    plan = plan_of()
    stage, micro = plan.choice
    assert stage == 1
    assert plan.fits(stage, micro)
    assert not plan.fits(stage, 2 * micro)


def test_a_higher_stage_is_taken_where_a_lower_one_does_not_fit():
    words = ["train.batch_size=16", "deepspeed.zero_optimization.reduce_bucket_size=1000"]
    plan = plan_of(*words)
    between = (plan.bytes(1, 1) + plan.bytes(2, 1)) / 2 * plan.device.memory / plan.usable
    assert plan_on(plan, between).choice[0] == 2
    assert plan_on(plan, 1e6).largest(3) == 0


@pytest.mark.parametrize(
    ("stage", "gpus", "words"),
    [
        (0, 1, ["train.precision=fp32"]),
        (1, 1, ["train.precision=bf16"]),
        (1, 1, ["train.precision=bf16", "deepspeed.zero_optimization.stage=0"]),  # which training refuses
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.stage=1"]),
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]),
        (1, 8, ["train.precision=fp32"]),
        (2, 8, ["deepspeed.zero_optimization.stage=2"]),
        (0, 8, ["train.precision=fp32", "deepspeed.zero_optimization.stage=0"]),
    ],
)
def test_the_stage_that_is_advised_is_the_one_that_training_takes(stage, gpus, words):
    assert plan_of(*words, gpus=gpus).choice[0] == stage


def test_the_memory_that_a_process_alone_in_fp32_is_told_has_one_copy_of_the_weights(capsys):
    plan = plan_of("train.precision=fp32", "train.batch_size=8", gpus=1)
    assert plan.state(0).on_device == 16 * plan.n_parameters  # weights, gradients, two moments
    assert plan.state(1).on_device == 24 * plan.n_parameters  # and master weights, and a buffer
    main(["--config", CONFIG, "model.n_layer=2", "train.precision=fp32", "train.batch_size=8"])
    shown = capsys.readouterr().out
    assert "Take stage 0 and" in shown
    bytes_of_update = 28 * plan.n_parameters  # reads weights, gradients and moments, writes all but the gradients
    assert f"of it, optimizer at least {bytes_of_update / plan.device.bandwidth:>22,.4f}" in shown
    reach = shown.partition("REACH")[2].splitlines()[2:]
    assert [line.split()[:2] for line in reach] == [["1", "0"], ["8", "1"]]  # GPUs, stage


def plan_on(plan: Plan, memory: float) -> Plan:
    return dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory=memory))


def test_memory_of_the_rows_of_all_micro_steps_is_counted():
    assert plan_of().recurrent_memory == 2 * (8192 // 8) * 384 * 1024 * 2


def test_time_is_what_the_operations_take_at_the_stated_share_of_the_peak():
    plan = plan_of()
    an_update = flops_per_step(plan.model, plan.shape(32)) * 8192 / 32
    assert plan.tokens_per_step / plan.tokens_per_second(32) == pytest.approx(an_update / (8 * 0.4 * 989.5e12))


def test_an_offloaded_optimizer_is_in_the_memory_of_the_node_and_not_of_the_gpu(capsys):
    plan, offloaded = plan_of(), plan_of("deepspeed.zero_optimization.offload_optimizer.device=cpu")
    plain, state = plan.state(2), offloaded.state(2)
    assert (plain.optimizer, state.optimizer, plain.host) == (12 * plan.n_parameters / 8, 0, 0)
    assert offloaded.host(2) == 8 * state.host > 12 * plan.n_parameters
    assert offloaded.bytes(2, 1) < plan.bytes(2, 1)
    words = ["model.n_layer=2", "--gpus", "8", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    main(["--config", CONFIG, *words])
    shown = capsys.readouterr().out
    assert re.search(rf"in the memory of a node .* {offloaded.host(2) / 1e9:.2f}", shown)
    assert "the update runs on the CPU" in shown


def test_muon_keeps_one_moment_of_the_matrices_and_is_not_given_stage_3():
    plain, muon = plan_of(), plan_of("optim.name=muon")
    matrices = 2 * (5 * 1024 * 1024 + 2 * 1024 * 4096)  # query, key, value, output, position key; feed-forward
    for stage in range(3):
        assert plain.state(stage).optimizer - muon.state(stage).optimizer == 4 * matrices / (8 if stage else 1)
    assert plan_on(muon, 1e6).choice == (2, 1)


def test_offloaded_weights_leave_what_is_in_use_on_the_gpu():
    plan = plan_of("deepspeed.zero_optimization.offload_param.device=cpu")
    assert plan.state(3).weights == 2 * plan.n_parameters  # fewer than stage 3 may hold at once
    assert plan.host(3) == 2 * plan.n_parameters
    assert plan.state(2) == plan_of().state(2)  # which does not offload them


def test_computing_layers_again_lets_a_larger_micro_batch_fit():
    plain, again = plan_of(n_layer=12), plan_of("train.activation_checkpointing=true", n_layer=12)
    assert again.largest(1) > plain.largest(1)


def test_tokens_are_those_of_the_batches_as_they_warm_up():
    words = ["train.batch_size=64", "train.accumulation=4", "train.steps=20", "train.batch_warmup_steps=8"]
    plan = plan_of(*words)
    read = list(itertools.accumulate([16, 16, 32, 32, 48, 48, 64, 64] + 12 * [64], initial=0))
    assert [plan.tokens(steps) for steps in range(21)] == [512 * rows for rows in read]
    assert [plan.steps(512 * rows) for rows in read] == list(range(21))
    assert plan.steps(512 * 50) == 3  # the third update ends at 64 rows
    assert all(plan.largest(stage) <= plan.rows // 2 for stage in range(4))


def test_the_last_table_leaves_out_gpus_that_could_not_share_a_batch_that_warms_up(capsys):
    words = ["train.batch_size=64", "train.accumulation=4", "train.batch_warmup_steps=8", "model.n_layer=2"]
    main(["--config", CONFIG, "--gpus", "8", *words])
    table = capsys.readouterr().out.partition("REACH")[2].splitlines()[2:]
    assert [int(line.split()[0]) for line in table if line.strip()[:1].isdigit()] == [1, 8]


def test_a_plan_of_fp16_is_that_of_bf16_but_for_what_stage_1_keeps():
    half, other = plan_of("train.precision=bf16"), plan_of("train.precision=fp16")
    assert (half.precision, other.precision) == ("bf16", "fp16")
    assert (half.bytes(2, 1), half.bytes(3, 1), half.recurrent_memory) == (
        other.bytes(2, 1),
        other.bytes(3, 1),
        other.recurrent_memory,
    )
    assert half.state(1) != other.state(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gpus", "8", "train.batch_size=8", "train.accumulation=2", "train.batch_warmup_steps=9"],
            r"train.batch_warmup_steps \(9\)",
        ),
        (["--gpus", "6"], r"train.batch_size \(8192\) must be a multiple of --gpus \(6\); set train.batch_size=8190"),
        (["--gpus", "8", "--nodes", "3"], r"--nodes \(3\)"),
        (["--gpus", "8", "--mfu", "40"], r"--mfu \(40.0\)"),
        (["--gpus", "100000"], r"--gpus \(100000\) must be at most train.batch_size \(8192\).*; take fewer, or raise"),
        (["--gpus", "0"], r"--gpus \(0\) must be a positive number"),
        (["--nodes", "0"], r"--nodes \(0\) must be a positive number"),
        (["--tokens", "0"], r"--tokens \(0\) must be a positive number"),
        (["--tokens", "-5"], r"--tokens \(-5\) must be a positive number"),
        (["--peak", "0"], r"--peak \(0\) must be a positive number"),
        (["--peak", "-1"], r"--peak \(-1\) must be a positive number"),
        (["--peak", "nan"], r"--peak \(nan\) must be a positive number"),
        (["deepspeed.zero_optimization=1"], r"deepspeed.zero_optimization \(1\) must be a mapping"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_a_way_out(words, message):
    with pytest.raises(ValueError, match=message):
        main(["--config", CONFIG, *words])


def test_every_section_says_whether_it_is_a_count_or_a_prediction(capsys):
    words = [
        "model.n_layer=2",
        "train.batch_size=4096",
        "--gpus",
        "64",
        "--device",
        "a100-80",
        "--tokens",
        "1000000000",
    ]
    main(["--config", CONFIG, *words])
    titles = re.findall(r"^[A-Z]{4}.*", capsys.readouterr().out, re.MULTILINE)
    assert len(titles) == 6
    assert all("(count" in title or "(prediction" in title for title in titles)


def test_a_plan_for_a_day_says_how_many_updates_it_holds(capsys):
    main(["--config", str(REPOSITORY / "configs/pretrain/xlnet_1gpu_1day.yaml"), "model.n_layer=2"])
    assert "updates in train.hours=24" in capsys.readouterr().out


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_loads_and_its_model_can_be_built(path):
    config = load(PretrainConfig, path)
    model = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    assert config.name == path.stem
    assert sum(parameters(model, batch_shape(config, 1).two_streams).values()) > 0
    assert config.train.batch_size % config.train.accumulation == 0


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_opens_with_how_to_run_it_and_where_it_is_from(path):
    head = path.read_text().split("\n\n")[0]
    for heading in ("how to run", "reaches", "source"):
        assert re.search(rf"^# {heading}: +\S", head, re.MULTILINE), f"{path.name} lacks {heading}"
