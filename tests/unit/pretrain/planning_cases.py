"""Shared by the planning tests: small models of every kind, FLOPs of a real step, plans."""

import dataclasses

import torch
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config import PretrainConfig
from pretrain.planning.flops import BatchShape
from pretrain.planning.plan import Plan
from tests.conftest import REPOSITORY
from xlpre.batch import Batch
from xlpre.config.loader import load_config
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.layer import LAYERS
from xlpre.model.memory import initial_memory
from xlpre.model.positions import SCHEMES
from xlpre.training.device_specs import DEVICES

CONFIG = str(REPOSITORY / "configs/pretrain/xlnet_large_v2.yaml")
LARGE = ModelConfig(vocab_size=32000, n_layer=24, d_model=1024, n_head=16, d_inner=4096)


@st.composite
def models(draw) -> ModelConfig:
    """Draw a small model of any kind."""
    positions = draw(st.sampled_from(list(SCHEMES)))
    cutoffs = draw(st.sampled_from([[], [20], [13, 40]]))
    norm = draw(st.sampled_from(list(LAYERS)))
    return ModelConfig(
        vocab_size=60,
        n_layer=draw(st.integers(1, 3)),
        d_model=draw(st.sampled_from([8, 16])),
        n_head=draw(st.sampled_from([1, 2])),
        d_head=draw(st.sampled_from([None, 6])),
        d_inner=draw(st.integers(3, 30)),
        feed_forward=draw(st.sampled_from(["gelu", "relu", "glu", "swiglu"])),
        norm=norm,
        final_norm=norm != "post" and draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        mem_len=draw(st.sampled_from([0, 5, 12])),
        positions=positions,
        n_positions=draw(st.integers(1, 9)) if positions in ("shaw", "learned") else None,
        relative_segments=draw(st.booleans()),
        untie_r=draw(st.booleans()),
        cutoffs=cutoffs,
        div_value=draw(st.sampled_from([1, 2])) if cutoffs else 1,
        d_embed=draw(st.sampled_from([None, 4])),
        tie_embedding=draw(st.booleans()),
        tie_projections=draw(st.lists(st.booleans(), min_size=len(cutoffs) + 1, max_size=len(cutoffs) + 1)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        attention_backend="reference",
    )


@st.composite
def shapes(draw) -> BatchShape:
    seq_len, two_streams = draw(st.integers(4, 12)), draw(st.booleans())
    n_targets = draw(st.integers(1, seq_len))
    rows, mem_len, next_sentence = draw(st.integers(1, 3)), draw(st.sampled_from([0, 5])), draw(st.booleans())
    return BatchShape(rows, seq_len, mem_len, n_targets, seq_len // 2, two_streams, next_sentence)


def random_batch(shape: BatchShape, vocab_size: int) -> Batch:
    B, T, P = shape.rows, shape.seq_len, shape.n_targets
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
        visible_mem_len=torch.full((B,), 100),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=shape.reuse_len,
    )


def fractions_of(model: ModelConfig, ids: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(((ids >= low) & (ids < high)).float().mean()) for low, high, _ in model.clusters)


def with_inputs_as_targets(batch: Batch) -> Batch:
    """Return the batch with as many targets in each cluster as input tokens."""
    return dataclasses.replace(batch, targets=batch.input_ids[:, : batch.targets.size(1)].clone())


def build_model(model: ModelConfig, shape: BatchShape, checkpointed: bool) -> LanguageModel:
    language_model = LanguageModel(model, shape.two_streams, shape.next_sentence)
    if checkpointed:
        language_model.backbone.enable_activation_checkpointing()
    return language_model


def count_flops(model: ModelConfig, shape: BatchShape, checkpointed: bool = False) -> tuple[int, BatchShape]:
    """Return the FLOPs that torch counts in a real step, and the shape with the cluster fractions of its tokens."""
    language_model = build_model(model, shape, checkpointed)
    batch = random_batch(shape, model.vocab_size)
    if shape.n_targets == shape.seq_len:
        batch = with_inputs_as_targets(batch)
    memory = initial_memory(model, shape.rows, mem_len=shape.mem_len, initial="zeros")
    with FlopCounterMode(display=False) as counter:
        loss, _, *auxiliary = language_model(batch, memory)
        sum(auxiliary, start=loss).backward()
    return counter.get_total_flops(), dataclasses.replace(shape, cluster_fractions=fractions_of(model, batch.input_ids))


def make_plan(*overrides: str, device="h200", gpus=8, n_layer=2) -> Plan:
    settings = ["model.attention_backend=sdpa", *overrides, f"model.n_layer={n_layer}"]
    return Plan(load_config(PretrainConfig, CONFIG, settings), DEVICES[device], gpus, 1, 0.4)


def with_device_memory(plan: Plan, memory: float) -> Plan:
    return dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory=memory))
