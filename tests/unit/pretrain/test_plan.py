import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config import PretrainConfig
from pretrain.cost import (
    BatchShape,
    Kept,
    Tensors,
    activations,
    batch_shape,
    flops_per_step,
    operations,
    parameters,
    small_parameters,
)
from pretrain.plan import Plan, main
from tests.conftest import REPOSITORY
from xlpre.batch import Batch
from xlpre.config import load
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
    )


@st.composite
def shapes(draw) -> BatchShape:
    window, two_streams = draw(st.integers(4, 12)), draw(st.booleans())
    targets = draw(st.integers(1, window))
    return BatchShape(draw(st.integers(1, 3)), window, draw(st.sampled_from([0, 5])), targets, window // 2, two_streams)


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


@settings(max_examples=150, deadline=None)
@given(models(), st.booleans())
def test_parameters_by_part_are_those_of_the_built_model(model, two_streams):
    assert sum(parameters(model, two_streams).values()) == sum(
        parameter.numel() for parameter in LanguageModel(model, two_streams).parameters()
    )


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


def counted(model: ModelConfig, shape: BatchShape) -> tuple[int, BatchShape]:
    """What torch counts in a real step, and the shape with the shares of clusters that were there."""
    language_model = LanguageModel(model, shape.two_streams)
    batch = batch_of(shape, model.vocab_size)
    if shape.targets == shape.window:
        batch = alike(batch)
    memory = first_memory(model, shape.rows, mem_len=shape.mem_len, initial="zeros")
    with FlopCounterMode(display=False) as counter:
        language_model(batch, memory)[0].backward()
    return counter.get_total_flops(), dataclasses.replace(shape, shares=shares_of(model, batch.input_ids))


@settings(max_examples=150, deadline=None)
@given(models().filter(lambda model: not model.cutoffs), shapes())
def test_operations_are_those_that_torch_counts_in_a_step(model, shape):
    total, _ = counted(model, shape)
    assert sum(operations(model, shape).values()) == total


@settings(max_examples=50, deadline=None)
@given(models().filter(lambda model: model.cutoffs), shapes())
def test_operations_of_an_adaptive_softmax_are_those_of_the_tokens_in_each_cluster(model, shape):
    total, seen = counted(model, dataclasses.replace(shape, targets=shape.window))
    assert sum(operations(model, seen).values()) == pytest.approx(total, rel=1e-5)  # shares are float32


@pytest.mark.parametrize("settings_", [{}, {"positions": "shaw", "n_positions": 40, "norm": "pre"}, {"mem_len": 0}])
def test_operations_agree_at_a_size_where_matrices_are_large(settings_):
    model = ModelConfig(**{"vocab_size": 500, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, **settings_})
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
}


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("kind", TRACED)
def test_activations_are_what_a_real_step_keeps_and_needs(kind, two_streams):
    shape = {"vocab_size": 1000, "n_layer": 3, "d_model": 64, "n_head": 4, "d_inner": 256, "mem_len": 24}
    model = ModelConfig(**{**shape, **TRACED[kind]})
    asked = BatchShape(4, 48, model.mem_len, 48, 24, two_streams)
    batch, language_model = alike(batch_of(asked, 1000)), LanguageModel(model, two_streams)
    memory = first_memory(model, 4, initial="zeros")
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    given_ = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with Tensors(given_) as tensors:
        with (kept := Kept(given_)):
            loss, _new_memory = language_model(batch, memory)
        n_kept = kept.n_bytes
        kept.storages.clear()
        loss.backward()
    asked = dataclasses.replace(asked, shares=shares_of(model, batch.input_ids))
    found = activations(model, asked, torch.float32, gpu=False)
    assert found.kept + found.logits == pytest.approx(n_kept, rel=0.05)
    assert found.all == pytest.approx(tensors.peak, rel=0.05)


def test_activations_of_bf16_are_a_little_over_half():
    shape = BatchShape(2, 64, 48, 10, 32)
    model = ModelConfig(vocab_size=500, n_layer=2, d_model=64, n_head=4, d_inner=256)
    full, half = (activations(model, shape, dtype, gpu=True) for dtype in (torch.float32, torch.bfloat16))
    assert 0.5 < half.kept / full.kept < 0.75  # probabilities are computed in fp32, dropout keeps a byte in both


@pytest.fixture(scope="module")
def kept_by_deepspeed(tmp_path_factory) -> dict[str, list[int]]:
    """Bytes of weights and optimizer, and with gradients, of process 0 of 2, by stage and precision."""
    script = tmp_path_factory.mktemp("states") / "states.py"
    script.write_text(STATES)
    out = script.with_suffix(".json")
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True, timeout=240, capture_output=True)
    return json.loads(out.read_text())


STATES = """
import gc, json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from torch import nn
from xlpre.training.distributed import set_defaults
from xlpre.training.engine import TrainConfig, build_engine, start_processes
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
for precision in ("bf16", "fp32"):
    for stage in (1, 2, 3):
        gc.collect()
        before = tensors()
        model = nn.Sequential(nn.Linear(200, 200), *(nn.Linear(200, 200, bias=False) for _ in range(9)))
        buckets = {"reduce_bucket_size": 500_000, "stage3_prefetch_bucket_size": 1000}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, **buckets}
        train = TrainConfig(batch_size=4, accumulation=2, precision=precision)
        engine = build_engine(model, train, OptimConfig(), device, 2, {"zero_optimization": zero})
        x = torch.randn(1, 200, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        for _ in range(3):
            loss = engine(x).float().pow(2).mean()
            engine.backward(loss)
            del loss
            engine.step()
        gc.collect()
        now = {key: n for key, n in tensors().items() if key not in before}
        result[f"{precision} {stage}"] = sum(now.values())
        engine.destroy()
        del engine, model
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_gradients_and_optimizer_are_what_deepspeed_keeps(kept_by_deepspeed, precision, stage):
    n, small, width = 10 * 200 * 200 + 200, 200, 2 if precision == "bf16" else 4
    state = state_of(n, small, stage, 2, precision == "bf16", bucket=500_000)
    expected = state.weights + state.gradients + state.optimizer
    if stage == 3:
        expected -= width * (n - small) / 2  # after an update nothing is fetched
    if stage != 2:
        expected += state.buffers  # which stage 2 gives back after each backward
    assert kept_by_deepspeed[f"{precision} {stage}"] == pytest.approx(expected, rel=0.01)  # 0.2 % is padding


def test_small_parameters_are_those_that_are_not_split():
    model = ModelConfig(vocab_size=1000, n_layer=1, d_model=64, n_head=4, d_inner=256)
    split = 1000 * 64 + 2 * 64 * 256
    assert small_parameters(model, 10_000) == sum(parameters(model).values()) - split


def test_an_update_of_one_process_sends_nothing():
    assert [traffic_of(10**6, stage, 1, True, 4) for stage in range(4)] == [0, 0, 0, 0]


def test_sharding_gradients_and_weights_sends_more_with_every_micro_step():
    sent = {stage: [traffic_of(10**6, stage, 8, True, steps) for steps in (1, 4)] for stage in range(4)}
    assert sent[1][0] == sent[1][1] == 7 / 8 * 10**6 * (2 * 4 + 2)
    assert sent[3][1] == 4 * sent[3][0] == 4 * 7 / 8 * 10**6 * 3 * 2
    assert sent[2][0] < sent[2][1] < sent[3][1]


def plan_of(*words: str, device="h200", gpus=8) -> Plan:
    return Plan(load(PretrainConfig, CONFIG, [*words, "model.n_layer=2"]), DEVICES[device], gpus, 1, 0.4)


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


def plan_on(plan: Plan, memory: float) -> Plan:
    return dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory=memory))


def test_memory_of_the_rows_of_all_micro_steps_is_counted():
    assert plan_of().cache == 2 * (8192 // 8) * 384 * 1024 * 2


def test_time_is_what_the_operations_take_at_the_stated_share_of_the_peak():
    plan = plan_of()
    an_update = flops_per_step(plan.model, plan.shape(32)) * 8192 / 32
    assert plan.tokens_per_step / plan.tokens_per_second(32) == pytest.approx(an_update / (8 * 0.4 * 989.5e12))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "6"], r"train.batch_size \(8192\) must be a multiple of --gpus \(6\); set train.batch_size=8190"),
        (["--gpus", "8", "--nodes", "3"], r"--nodes \(3\)"),
        (["--gpus", "8", "--mfu", "40"], r"--mfu \(40.0\)"),
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
