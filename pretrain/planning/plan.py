"""Plan of a pretraining run on a number of devices, computed from its settings, and its description as text."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from pretrain.config import PretrainConfig, reason_against_cuda_graphs
from pretrain.planning.activation_memory import ActivationMemory, activation_memory
from pretrain.planning.flops import (
    BatchShape,
    batch_shape,
    count_parameters,
    flops_by_part,
    flops_per_step,
    matrix_shapes,
    parameter_sizes,
)
from pretrain.planning.zero_memory import ZeroMemory, communication_volume, zero_memory
from xlpre.common.errors import InputError
from xlpre.common.messages import counted
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.backend import HAS_TRITON
from xlpre.model.kernels.triton.tiles import MAX_HEAD_WIDTH
from xlpre.training.deepspeed_engine import PRECISIONS, reduce_bucket_size
from xlpre.training.deepspeed_overrides import communication_dtype, enabled_offloads, zero_stage
from xlpre.training.device_specs import DeviceSpec
from xlpre.training.metrics_writer import format_duration
from xlpre.training.muon import sent_bytes, working_bytes

USABLE_FRACTION = (
    0.92  # of the device memory is available to training; driver, libraries and fragmentation take the rest (assumed)
)
SECONDS_PER_DAY = 86_400
GPU_COUNTS = (1, 8, 64, 512, 1024, 4096, 8192)  # numbers of GPUs in the scaling table
STAGES = range(4)  # of ZeRO


@dataclass(frozen=True, eq=False)
class Plan:
    """A pretraining run on `gpus` devices. Times are in seconds, sizes in bytes, rates in window tokens per second.

    Attributes:
        config: settings of the pretraining run.
        device: speed, memory and links of a device.
        gpus: number of devices.
        nodes: number of machines.
        mfu: expected model FLOPs utilization, as a fraction of the device's peak.

    Raises:
        InputError: the batch cannot be divided among the devices, or the devices among the machines.
    """

    config: PretrainConfig
    device: DeviceSpec
    gpus: int
    nodes: int
    mfu: float

    def __post_init__(self) -> None:
        rows = self.config.train.global_batch_size
        if self.gpus % self.nodes:
            raise InputError(
                f"--gpus={self.gpus} is invalid: it is the total number of GPUs and must be a multiple of --nodes={self.nodes}. "
                f"Set --gpus={math.ceil(self.gpus / self.nodes) * self.nodes}, or another --nodes."
            )
        if rows < self.gpus:
            raise InputError(
                f"--gpus={self.gpus} is invalid: it must be at most train.global_batch_size={rows}, because each GPU needs a batch row. "
                "Lower --gpus, or raise train.global_batch_size."
            )
        if rows % self.gpus:
            raise InputError(
                f"train.global_batch_size={rows} is invalid: it must be a multiple of --gpus={self.gpus}. "
                f"Set train.global_batch_size={rows // self.gpus * self.gpus}."
            )
        if warmup_steps := self.config.train.batch_warmup_steps:
            if self.rows_per_gpu < 2:
                raise InputError(
                    f"train.batch_warmup_steps={warmup_steps} is invalid: the number of micro-steps grows in the warm-up, so each GPU "
                    f"needs at least 2 rows, but --gpus={self.gpus} leaves {self.rows_per_gpu}. Lower --gpus, "
                    "raise train.global_batch_size, or set train.batch_warmup_steps=0."
                )
            self.config.train.batch_schedule(self.gpus)
        if self.config.init_from is not None:
            raise InputError(
                f"init_from={self.config.init_from} is invalid here: the plan does not read the shape of that model. Set init_from=null, "
                "and give model.n_layer, model.d_model, model.n_head and model.d_inner the values of that model."
            )
        if not 0 < self.mfu <= 1:
            raise InputError(
                f"--mfu={self.mfu} is invalid: it is a fraction of the peak and must be above 0 and at most 1. Leave it out for 0.15."
            )

    @property
    def model(self) -> ModelConfig:
        """Model config, with the vocabulary size of the tokenizer if none is set, and the backend that `auto` selects on a GPU."""
        model = self.config.model
        vocab_size = model.vocab_size or self.config.tokenizer.n_pieces
        backend: Any = model.attention_backend
        if backend == "auto" and self._is_gpu:
            is_fast = HAS_TRITON and self.is_half and model.head_width <= MAX_HEAD_WIDTH
            backend = "triton" if is_fast else "sdpa"
        return dataclasses.replace(model, vocab_size=vocab_size, attention_backend=backend)

    @property
    def precision(self) -> str:
        """Precision of the model: fp32, bf16 or fp16."""
        configured = self.config.train.precision
        return configured if configured != "auto" else "bf16" if self.device.bf16 else "fp32"

    @property
    def is_half(self) -> bool:
        """True if the precision has 16 bits."""
        return self.precision != "fp32"

    @property
    def _is_gpu(self) -> bool:
        """True if the device is a GPU: all that are known train in bf16."""
        return self.device.bf16

    def uses_cuda_graphs(self, stage: int) -> bool:
        """Return True if training in this ZeRO stage uses CUDA graphs."""
        return not reason_against_cuda_graphs(self.config, self.model, self._is_gpu, self.precision, stage, self.gpus)

    @property
    def rows_per_gpu(self) -> int:
        """Number of batch rows that a device reads in a step."""
        return self.config.train.global_batch_size // self.gpus

    def total_rows(self, n_steps: int) -> int:
        """Return the number of batch rows that all devices read in the first `n_steps` steps."""
        train = self.config.train
        if not train.batch_warmup_steps:
            return n_steps * train.global_batch_size
        return train.batch_schedule(self.gpus).total_rows(n_steps)

    @property
    def tokens_per_step(self) -> int:
        """Number of window tokens of a step after the batch warm-up."""
        return self.config.train.global_batch_size * self.config.data.seq_len

    def total_tokens(self, n_steps: int) -> int:
        """Return the number of window tokens of the first `n_steps` steps."""
        return self.total_rows(n_steps) * self.config.data.seq_len

    def steps_for(self, n_tokens: float) -> int:
        """Return the number of steps after which at least `n_tokens` window tokens were read."""
        warmup_steps = self.config.train.batch_warmup_steps
        if n_tokens > self.total_tokens(warmup_steps):
            return warmup_steps + math.ceil((n_tokens - self.total_tokens(warmup_steps)) / self.tokens_per_step)
        return bisect_left(range(warmup_steps), n_tokens, key=self.total_tokens)

    @property
    def activation_checkpointing(self) -> bool:
        """True if layers are recomputed in the backward pass."""
        return self.config.train.activation_checkpointing

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """Number of parameters by part."""
        shape = self.batch_shape(1)
        return count_parameters(self.model, shape.two_streams, shape.next_sentence)

    @property
    def n_parameters(self) -> int:
        """Number of all parameters."""
        return sum(self.parameters.values())

    def batch_shape(self, rows: int) -> BatchShape:
        """Return the sizes of a micro-batch of `rows` rows."""
        return batch_shape(self.config, rows)

    @functools.cached_property
    def _parameter_sizes(self) -> list[int]:
        return parameter_sizes(self.model, self.config.objective.next_sentence)

    @functools.cached_property
    def _muon_shapes(self) -> list[tuple[int, ...]]:
        return matrix_shapes(self.model) if self.config.optim.muon else []

    @property
    def offloads(self) -> dict[str, bool]:
        """For each part that can be offloaded to host memory, True if it is."""
        return enabled_offloads(self.config.deepspeed)

    def zero_memory(self, stage: int) -> ZeroMemory:
        """Return the memory of a device that does not depend on the batch."""
        zero = self.config.deepspeed.get("zero_optimization", {})
        return zero_memory(
            self._parameter_sizes,
            stage,
            self.gpus,
            self.precision,
            reduce_bucket_size(zero, stage, self._parameter_sizes),
            zero.get("stage3_param_persistence_threshold", 100_000),
            **self.offloads,
            n_single_moment=sum(map(math.prod, self._muon_shapes)),
            overlap_comm=bool(zero.get("overlap_comm", False)),
        )

    @property
    def checkpoint_parts(self) -> dict[str, int]:
        """Bytes of a checkpoint by part. Recurrent memory counts as 0 if it is not saved."""
        n_single_moment = sum(map(math.prod, self._muon_shapes))
        return {
            "weights": 4 * self.n_parameters,
            "best weights": 4 * self.n_parameters,
            "optimizer moments": 8 * self.n_parameters - 4 * n_single_moment,
            "recurrent memory": 0 if self.config.train.save_memory == "none" else self.recurrent_memory * self.gpus,
        }

    @property
    def checkpoints_on_disk(self) -> int:
        """Largest size in bytes of all checkpoints together, reached while one is written. `train.keep_checkpoints_every` is ignored."""
        *others, memory = self.checkpoint_parts.values()
        n_checkpoints = self.config.train.keep_last_checkpoints + 1
        return n_checkpoints * sum(others) + (n_checkpoints if self.config.train.save_memory == "all" else 2) * memory

    def host_memory(self, stage: int) -> float:
        """Return the bytes of host memory per machine that offloading uses."""
        return self.zero_memory(stage).host * self.gpus / self.nodes

    @property
    def recurrent_memory(self) -> int:
        """Bytes of the recurrent memory of a device: the rows of all micro-steps."""
        model = self.model
        return model.n_layer * self.rows_per_gpu * model.mem_len * model.d_model * (2 if self.is_half else 4)

    @functools.lru_cache(maxsize=64)  # noqa: B019  a plan lives as long as its command
    def activation_memory(self, micro_batch_size: int) -> ActivationMemory:
        """Return the memory of the activations of a micro-batch."""
        return activation_memory(
            self.model,
            self.batch_shape(micro_batch_size),
            PRECISIONS[self.precision],
            gpu=self._is_gpu,
            activation_checkpointing=self.activation_checkpointing,
        )

    def static_memory(self, stage: int) -> float:
        """Return the bytes of a device that stay allocated between micro-batches."""
        return self.zero_memory(stage).on_device + self.recurrent_memory

    def muon_workspace(self, stage: int) -> int:
        """Return the bytes that Muon allocates during an update; 0 in stage 3, which does not support it."""
        if not self._muon_shapes or stage == 3:
            return 0
        return working_bytes(
            self._muon_shapes, self.gpus, is_flat=stage > 0, in_bf16=self._is_gpu or self.precision == "bf16"
        )

    def muon_communication(self, stage: int) -> float:
        """Return the bytes that a device sends in an update of Muon; 0 in stage 3, which does not support it.

        Matrices are sent in fp32 in every precision.
        """
        return 0.0 if stage == 3 else sent_bytes(self._muon_shapes, self.gpus, is_flat=stage > 0)

    def graph_memory(self, stage: int, micro_batch_size: int) -> int:
        """Return the bytes that CUDA graphs need: two copies of the gradients and of the memory of a micro-batch. 0 without graphs."""
        memory = self.recurrent_memory * micro_batch_size // self.rows_per_gpu
        gradients = (2 if self.is_half else 4) * self.n_parameters
        return 2 * (gradients + memory) * self.uses_cuda_graphs(stage)

    def peak_memory(self, stage: int, micro_batch_size: int) -> float:
        """Return the peak memory of a device.

        It is the larger of two peaks: in a micro-batch, and in Muon's update, when activations are freed. CUDA graphs keep the memory of
        activations; both are added then.
        """
        activations, update = self.activation_memory(micro_batch_size).peak, self.muon_workspace(stage)
        peak = activations + update if self.uses_cuda_graphs(stage) else max(activations, update)
        return self.static_memory(stage) + self.graph_memory(stage, micro_batch_size) + peak

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that are available to training."""
        return USABLE_FRACTION * self.device.memory

    def fits(self, stage: int, micro_batch_size: int) -> bool:
        """Return True if the peak memory fits into the usable memory."""
        return self.peak_memory(stage, micro_batch_size) <= self.usable_memory

    def largest_micro_batch(self, stage: int) -> int:
        """Return the largest micro-batch size that fits and divides the rows of a device, or 0."""
        limit = self.rows_per_gpu // (2 if self.config.train.batch_warmup_steps else 1)  # warm-up needs two micro-steps
        sizes = [size for size in range(1, limit + 1) if self.rows_per_gpu % size == 0]
        n_fitting = bisect_left(sizes, True, key=lambda size: not self.fits(stage, size))
        return sizes[n_fitting - 1] if n_fitting else 0

    @property
    def configured_stage(self) -> int:
        """ZeRO stage that training uses with these settings."""
        return zero_stage(self.config.deepspeed, self.precision, self.gpus)

    @functools.cached_property
    def recommendation(self) -> tuple[int, int]:
        """Recommended ZeRO stage, the lowest one that fits and is not below the configured stage, and its largest micro-batch size.

        If no stage fits: the highest supported stage and a micro-batch size of 1.
        """
        stages = range(max(self.configured_stage, int(self.is_half)), 3 if self.config.optim.muon else 4)
        return next(((stage, size) for stage in stages if (size := self.largest_micro_batch(stage))), (stages[-1], 1))

    def flops(self, micro_batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the model FLOPs and the hardware FLOPs of a micro-batch by part."""
        shape = self.batch_shape(micro_batch_size)
        hardware = flops_by_part(self.model, shape, "hardware", self.activation_checkpointing)
        return flops_by_part(self.model, shape, "model"), hardware

    def flops_per_token(self, micro_batch_size: int) -> float:
        """Return the model FLOPs of a window token."""
        flops = flops_per_step(self.model, self.batch_shape(micro_batch_size))
        return flops / (micro_batch_size * self.config.data.seq_len)

    def tokens_per_second(self, micro_batch_size: int) -> float:
        """Return the window tokens per second of all devices at the given MFU."""
        return self.gpus * self.device.flops * self.mfu / self.flops_per_token(micro_batch_size)

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second that a device sends in a ring. Across nodes, the network links of all devices of a node serve the ring."""
        device = self.device
        return device.link if self.nodes == 1 else min(device.link, device.network * self.gpus / self.nodes)

    def communication(self, stage: int, micro_batch_size: int) -> tuple[float, float]:
        """Return the bytes that a device sends in a step, and the seconds that this takes."""
        micro_steps = self.rows_per_gpu // micro_batch_size
        gradient_dtype = communication_dtype(self.config.deepspeed, self.precision, stage)
        sent = communication_volume(self.n_parameters, stage, self.gpus, self.precision, gradient_dtype, micro_steps)
        sent += self.muon_communication(stage)
        return sent, sent / self.link_bandwidth


def describe(plan: Plan, device: str, n_tokens: int | None) -> str:
    """Return a plan as text.

    Args:
        plan: the plan.
        device: name of the device.
        n_tokens: window tokens to train on; None: `train.steps` steps.
    """
    stage, micro_batch_size = plan.recommendation
    n_steps = plan.steps_for(n_tokens) if n_tokens else plan.config.train.steps
    head = [
        f"{plan.config.name} on {plan.gpus:,} x {device} ({counted(plan.nodes, 'node')}), "
        f"{plan.precision}. Nothing is measured: parameters and FLOPs are counts, all other figures are predictions."
    ]
    sections = [
        head,
        _describe_parameters(plan),
        _describe_checkpoint(plan),
        _describe_memory(plan, stage, micro_batch_size),
        _describe_flops(plan, micro_batch_size),
        _describe_time(plan, stage, micro_batch_size, n_steps),
        _describe_communication(plan, micro_batch_size),
        _describe_scaling(plan, stage, micro_batch_size, n_steps),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _describe_parameters(plan: Plan) -> list[str]:
    total = plan.n_parameters
    rows = [f"  {part:32}{n:>16,}{n / total:>8.1%}" for part, n in plan.parameters.items() if n]
    vocabulary = f"vocabulary of {plan.model.vocab_size:,}: model.vocab_size, or else tokenizer.vocab_size"
    return [f"PARAMETERS (count; {vocabulary})", *rows, f"  {'total':32}{total:>16,}"]


def _describe_checkpoint(plan: Plan) -> list[str]:
    parts, train = plan.checkpoint_parts, plan.config.train
    unit, unit_name = (1e9, "GB") if sum(parts.values()) > 1e9 else (1e6, "MB")
    rows = {**parts, "total": sum(parts.values()), "on disk while one is written, at most": plan.checkpoints_on_disk}
    return [
        f"CHECKPOINT in {unit_name} (count; train.save_memory={train.save_memory}, train.keep_last_checkpoints="
        f"{train.keep_last_checkpoints})",
        *(f"  {part:40}{size / unit:>16,.2f}" for part, size in rows.items()),
    ]


def _describe_memory(plan: Plan, stage: int, micro_batch_size: int) -> list[str]:
    by_stage = [plan.zero_memory(s) for s in STAGES]
    activations = plan.activation_memory(micro_batch_size)
    same_in_all_stages = {
        "activations saved for backward": activations.saved,
        "logits saved for backward": activations.logits,
        "workspace at the peak": activations.workspace,
        f"recurrent memory of {plan.rows_per_gpu:,} rows": plan.recurrent_memory,
    }
    unit, unit_name = (1e9, "GB") if plan.n_parameters > 1e7 else (1e6, "MB")
    micro_steps = plan.rows_per_gpu // micro_batch_size
    lines = [
        f"MEMORY PER GPU in {unit_name} (prediction; train.micro_batch_size={micro_batch_size}, {counted(micro_steps, 'micro-step')})",
        f"  {'ZeRO stage':36}" + "".join(f"{s:>10}" for s in STAGES),
    ]
    rows: dict[str, list[float]] = {
        name: [getattr(memory, name) for memory in by_stage]
        for name in ("weights", "gradients", "optimizer", "buffers")
    }
    rows |= {name: [n] * 4 for name, n in same_in_all_stages.items()}
    if any(copies := [plan.graph_memory(s, micro_batch_size) for s in STAGES]):
        rows["copies for CUDA graphs"] = [float(n) for n in copies]
    if plan.config.optim.muon:
        instead_of = "" if plan.uses_cuda_graphs(stage) else ", instead of activations"
        rows[f"Muon's update{instead_of}"] = [plan.muon_workspace(s) for s in STAGES]
    rows["peak"] = [plan.peak_memory(s, micro_batch_size) for s in STAGES]
    if any(plan.offloads.values()):
        rows["host memory per node"] = [plan.host_memory(s) for s in STAGES]
    lines += [f"  {name:36}" + "".join(f"{n / unit:>10.2f}" for n in row) for name, row in rows.items()]
    usable = f"fits {USABLE_FRACTION:.0%} of {plan.device.memory / 1e9:.0f} GB"
    lines.append(f"  {usable:36}" + "".join(f"{'yes' if plan.fits(s, micro_batch_size) else 'no':>10}" for s in STAGES))
    largest = [plan.largest_micro_batch(s) for s in STAGES]
    lines.append(f"  {'largest micro-batch that fits':36}" + "".join(f"{size or '-':>10}" for size in largest))
    if not plan.fits(stage, micro_batch_size):
        return [*lines, "  Nothing fits: use more GPUs, a smaller model, or a shorter data.seq_len or model.mem_len."]
    configured = plan.config.train.micro_batch_size or plan.rows_per_gpu
    instead = f" (configured: train.micro_batch_size={configured})" * (configured != micro_batch_size)
    backend, configured_backend = plan.model.attention_backend, plan.config.model.attention_backend
    if backend != configured_backend:
        reason = "" if HAS_TRITON else "; with the package triton it would be `triton`, which needs less"
        lines.append(f"  model.attention_backend={configured_backend} is {backend} on this device{reason}.")
    return [
        *lines,
        f"  Recommended: ZeRO stage {stage}, train.micro_batch_size={micro_batch_size}{instead}.",
        "  Stage 0 is the default of a single process in fp32; training refuses it in bf16 and fp16."
        + " Stage 3 does not support optim.name=muon." * plan.config.optim.muon,
    ]


def _describe_flops(plan: Plan, micro_batch_size: int) -> list[str]:
    shape, n_tokens = plan.batch_shape(micro_batch_size), micro_batch_size * plan.config.data.seq_len
    of_model, hardware = plan.flops(micro_batch_size)
    lines = [
        f"FLOPS of matrix products, forward and backward, in MFLOP per window token (count; {shape.mem_len:,} memory columns and "
        f"{counted(shape.n_targets, 'target')} per row)",
        f"  {'':32}{'model':>12}{'hardware':>12}",
    ]
    lines += [
        f"  {part:32}{of_model[part] / n_tokens / 1e6:>12,.1f}{hardware[part] / n_tokens / 1e6:>12,.1f}"
        for part in of_model
        if hardware[part]
    ]
    sums = sum(of_model.values()), sum(hardware.values())
    lines.append(f"  {'total':32}" + "".join(f"{n / n_tokens / 1e6:>12,.1f}" for n in sums))
    per_step = [n * plan.config.train.global_batch_size / micro_batch_size for n in sums]
    name, unit = ("PFLOP", 1e15) if per_step[0] > 1e13 else ("GFLOP", 1e9)
    lines.append(f"  {f'{name} per step':32}" + "".join(f"{n / unit:>12,.3f}" for n in per_step))
    return lines


def _describe_time(plan: Plan, stage: int, micro_batch_size: int, n_steps: int) -> list[str]:
    train, data = plan.config.train, plan.config.data
    rate, memory = plan.tokens_per_second(micro_batch_size), plan.zero_memory(stage)
    optimizer = memory.optimizer + (0 if stage else memory.weights)  # stage 0 in fp32 updates the weights themselves
    total_tokens = plan.total_tokens(n_steps)
    # the update reads and writes three fp32 numbers per parameter (weight and moments), and reads one gradient
    update_seconds = (2 + 1 / 3) * optimizer / plan.device.bandwidth
    lines = [
        f"TIME at {plan.mfu:.0%} MFU of {plan.device.flops / 1e12:,g} TFLOP/s (prediction; the MFU is your assumption)",
        f"  {'window tokens per second':32}{rate:>16,.0f}",
        f"  {'seconds per step':32}{plan.tokens_per_step / rate:>16,.3f}",
        f"  {'part of the optimizer, at least':32}{update_seconds:>16,.4f}"
        if optimizer
        else "  the optimizer runs on the CPU and is not counted",
        f"  {f'time for {n_steps:,} steps':32}{format_duration(total_tokens / rate):>16}",
        f"  {'GPU-hours':32}{plan.gpus * total_tokens / rate / 3600:>16,.1f}",
        f"  {'window tokens in total':32}{total_tokens:>16,}",
        f"  {'text tokens in total':32}{plan.total_rows(n_steps) * data.reuse_len:>16,}",
    ]
    if train.hours and n_steps == train.steps:
        complete_steps = plan.steps_for(train.hours * 3600 * rate + 1) - 1
        lines.append(f"  {f'steps in train.hours={train.hours:g}':32}{min(complete_steps, n_steps):>16,}")
    return [
        *lines,
        f"  A window has data.seq_len={data.seq_len:,} tokens, of which data.reuse_len={data.reuse_len:,} are new text.",
    ]


def _describe_communication(plan: Plan, micro_batch_size: int) -> list[str]:
    if plan.gpus == 1:
        return ["COMMUNICATION (prediction): none, because there is a single GPU"]
    compute_seconds = plan.tokens_per_step / plan.tokens_per_second(micro_batch_size)
    network = f"{plan.nodes:,} nodes" if plan.nodes > 1 else "the links of a node"
    lines = [
        f"COMMUNICATION per GPU and step over {network}, {plan.link_bandwidth / 1e9:,.1f} GB/s (prediction; without latency)",
        f"  {'ZeRO stage':16}{'GB sent':>12}{'seconds':>12}{'share of a step without overlap':>36}",
    ]
    for stage in STAGES:
        sent, seconds = plan.communication(stage, micro_batch_size)
        fraction = seconds / (seconds + compute_seconds)
        lines.append(f"  {stage:<16}{sent / 1e9:>12.2f}{seconds:>12.3f}{fraction:>36.1%}")
    return lines


def _describe_scaling(plan: Plan, stage: int, micro_batch_size: int, n_steps: int) -> list[str]:
    """Describe the same pretraining on other numbers of GPUs, once with all communication overlapped by computation and once with none."""
    lines = [
        f"SCALING with the same train.global_batch_size (prediction; {plan.mfu:.0%} MFU, communication overlapped or not)",
        f"  {'GPUs':>8}{'stage':>8}{'rows each':>12}{'micro-batch':>12}{'k window tokens/s':>24}{'not overlapped':>16}"
        f"{'days':>18}{'fits':>6}",
    ]
    has_full_nodes = plan.nodes == math.ceil(plan.gpus / plan.device.per_node)
    per_node = plan.device.per_node if has_full_nodes else plan.gpus // plan.nodes
    for gpus in sorted({plan.gpus, *GPU_COUNTS}):
        nodes = next(n for n in range(math.ceil(gpus / per_node), gpus + 1) if gpus % n == 0)
        try:
            scaled = dataclasses.replace(plan, gpus=gpus, nodes=nodes)
        except InputError:  # this number of GPUs cannot share the batch
            continue
        size = math.gcd(micro_batch_size, scaled.rows_per_gpu)
        # a single process may have another default stage than several
        scaled_stage = scaled.configured_stage if stage == plan.configured_stage else stage
        compute = plan.tokens_per_step / scaled.tokens_per_second(size)
        communication = scaled.communication(scaled_stage, size)[1]
        rates = (
            plan.tokens_per_step / max(compute, communication),
            plan.tokens_per_step / (compute + communication),
        )
        days = [plan.total_tokens(n_steps) / rate / SECONDS_PER_DAY for rate in rates]
        fits = "yes" if scaled.fits(scaled_stage, size) else "no"
        lines.append(
            f"  {gpus:>8,}{scaled_stage:>8}{scaled.rows_per_gpu:>12,}{size:>12}{rates[0] / 1e3:>24,.0f}{rates[1] / 1e3:>16,.0f}"
            f"{f'{days[0]:.2f} - {days[1]:.2f}':>18}{fits:>6}"
        )
    return lines
