"""Plan of a pretraining run on a number of devices, computed from its settings."""

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
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.backend import HAS_TRITON
from xlpre.model.kernels.triton.tiles import MAX_HEAD_WIDTH
from xlpre.training.deepspeed_engine import PRECISIONS, reduce_bucket_size
from xlpre.training.deepspeed_overrides import communication_dtype, enabled_offloads, zero_stage
from xlpre.training.device_specs import DeviceSpec
from xlpre.training.muon import sent_bytes, working_bytes

USABLE_FRACTION = (
    0.92  # of the device memory is available to training; driver, libraries and fragmentation take the rest (assumed)
)
SECONDS_PER_DAY = 86_400
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
        if self.config.init_from:
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
        return count_parameters(self.model, shape.next_sentence)

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
