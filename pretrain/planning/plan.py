"""What a pretraining on so many devices would take, worked out from its settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from dataclasses import dataclass

from pretrain.config import PretrainConfig
from pretrain.planning.activation_memory import Activations, activations
from pretrain.planning.flops import (
    BatchShape,
    batch_shape,
    flops_per_step,
    matrix_shapes,
    operations,
    parameters,
    tensor_sizes,
)
from pretrain.planning.zero_memory import ZeroMemory, communication_volume, zero_memory
from xlpre.model.config import ModelConfig
from xlpre.training.deepspeed_engine import PRECISIONS, reduce_bucket_size
from xlpre.training.deepspeed_overrides import offloads, zero_stage
from xlpre.training.muon import working_bytes

USABLE = 0.92  # of the memory: the rest is the driver's, libraries' and lost between tensors (an assumption)


@dataclass(frozen=True, eq=False)
class Plan:
    """A pretraining on `gpus` devices. Times in seconds, sizes in bytes, rates in window tokens."""

    config: PretrainConfig
    device: DeviceSpec
    gpus: int
    nodes: int
    mfu: float

    def __post_init__(self) -> None:
        rows = self.config.train.global_batch_size
        if self.gpus % self.nodes:
            raise ValueError(
                f"--gpus ({self.gpus}) counts all of them and must be a multiple of --nodes ({self.nodes})"
            )
        if rows < self.gpus:
            raise ValueError(
                f"--gpus ({self.gpus}) must be at most train.global_batch_size ({rows}): each GPU needs a row of its own; take fewer, or "
                "raise train.global_batch_size"
            )
        if rows % self.gpus:
            raise ValueError(
                f"train.global_batch_size ({rows}) must be a multiple of --gpus ({self.gpus}); set train.global_batch_size="
                f"{rows // self.gpus * self.gpus}"
            )
        if self.config.train.batch_warmup_steps and self.rows < 2:
            raise ValueError(
                f"train.batch_warmup_steps ({self.config.train.batch_warmup_steps}) starts with some of a GPU's rows, and --gpus "
                f"({self.gpus}) leaves it {self.rows}; take fewer, raise train.global_batch_size, or set train.batch_warmup_steps=0"
            )
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu ({self.mfu}) is a share of the peak: above 0, at most 1")

    @property
    def model(self) -> ModelConfig:
        """The shape of the model, with the vocabulary that the tokenizer will have."""
        model = self.config.model
        return dataclasses.replace(model, vocab_size=model.vocab_size or self.config.tokenizer.vocab_size)

    @property
    def precision(self) -> str:
        """What it computes in: fp32, bf16 or fp16."""
        wanted = self.config.train.precision
        return wanted if wanted != "auto" else "bf16" if self.device.bf16 else "fp32"

    @property
    def half(self) -> bool:
        """Whether that has 16 bits."""
        return self.precision != "fp32"

    @property
    def rows(self) -> int:
        """Rows of a device in an update."""
        return self.config.train.global_batch_size // self.gpus

    def total_rows(self, n_steps: int) -> int:
        """Return the rows that all devices read in the first `n_steps` steps."""
        train = self.config.train
        if not train.batch_warmup_steps:
            return n_steps * train.global_batch_size
        return train.batch_schedule(self.gpus).total_rows(n_steps)

    @property
    def tokens_per_step(self) -> int:
        """Window tokens of an update, once the batch has warmed up."""
        return self.config.train.global_batch_size * self.config.data.seq_len

    def tokens(self, steps: int) -> int:
        """Window tokens of the first `steps` updates."""
        return self.total_rows(steps) * self.config.data.seq_len

    def steps(self, tokens: float) -> int:
        """The first updates that read `tokens` window tokens, if they end with one."""
        warming = self.config.train.batch_warmup_steps
        if tokens > self.tokens(warming):
            return warming + math.ceil((tokens - self.tokens(warming)) / self.tokens_per_step)
        return bisect_left(range(warming), tokens, key=self.tokens)

    @property
    def recomputed(self) -> bool:
        """Whether layers are computed again for the backward pass."""
        return self.config.train.activation_checkpointing

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """By part."""
        shape = self.shape(1)
        return parameters(self.model, shape.two_streams, shape.next_sentence)

    @property
    def n_parameters(self) -> int:
        """All of them."""
        return sum(self.parameters.values())

    def shape(self, rows: int) -> BatchShape:
        """Of a micro-batch of `rows`."""
        return batch_shape(self.config, rows)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return tensor_sizes(self.model, self.config.objective.next_sentence)

    @functools.cached_property
    def _matrices(self) -> list[tuple[int, ...]]:
        return matrix_shapes(self.model) if self.config.optim.muon else []

    @property
    def offloads(self) -> dict[str, bool]:
        """What is kept in the machine's memory."""
        return offloads(self.config.deepspeed)

    def state(self, stage: int) -> ZeroMemory:
        """Bytes of a device that do not depend on the batch."""
        zero = self.config.deepspeed.get("zero_optimization", {})
        bucket, unsplit = reduce_bucket_size(zero, sum(self._sizes)), zero.get("stage3_param_persistence_threshold", 100_000)
        single = sum(map(math.prod, self._matrices))
        return zero_memory(
            self._sizes, stage, self.gpus, self.precision, bucket, unsplit, **self.offloads, single=single
        )

    def host(self, stage: int) -> float:
        """Bytes of a machine's memory that its devices offload to."""
        return self.state(stage).host * self.gpus / self.nodes

    @property
    def recurrent_memory(self) -> int:
        """Bytes of the recurrent memory of a device's rows, those of all micro-steps."""
        model = self.model
        return model.n_layer * self.rows * model.mem_len * model.d_model * (2 if self.half else 4)

    @functools.lru_cache(maxsize=64)  # noqa: B019  a plan lives as long as its command
    def activations(self, micro: int) -> Activations:
        """Of a micro-batch."""
        return activations(
            self.model, self.shape(micro), PRECISIONS[self.precision], gpu=self.device.bf16, recomputed=self.recomputed
        )

    def lasting(self, stage: int) -> float:
        """Bytes of a device that do not come and go with a micro-batch."""
        return self.state(stage).on_device + self.recurrent_memory

    def updating(self, stage: int) -> int:
        """Bytes that come and go with an update: Muon's, of which stage 3 has none."""
        if not self._matrices or stage == 3:
            return 0
        return working_bytes(self._matrices, self.gpus, flat=stage > 0, gpu=self.device.bf16)

    def bytes(self, stage: int, micro: int) -> float:
        """Of a device in all, when it has most: in a micro-batch, or in an update, before which activations are gone."""
        return self.lasting(stage) + max(self.activations(micro).all, self.updating(stage))

    @property
    def usable(self) -> float:
        """Bytes of a device that training can have."""
        return USABLE * self.device.memory

    def fits(self, stage: int, micro: int) -> bool:
        """Whether the device holds it."""
        return self.bytes(stage, micro) <= self.usable

    def largest(self, stage: int) -> int:
        """Rows of the largest micro-batch that fits and divides a device's rows; 0 if none does."""
        most = self.rows // (2 if self.config.train.batch_warmup_steps else 1)  # it rises by micro-steps
        sizes = [size for size in range(1, most + 1) if self.rows % size == 0]
        n_fitting = bisect_left(sizes, True, key=lambda size: not self.fits(stage, size))
        return sizes[n_fitting - 1] if n_fitting else 0

    @property
    def stage(self) -> int:
        """The ZeRO stage that training takes with these settings."""
        return zero_stage(self.config.deepspeed, self.precision, self.gpus)

    @functools.cached_property
    def choice(self) -> tuple[int, int]:
        """The lowest stage from that of training on, and its largest micro-batch, that fit; the last one and one row if none does."""
        stages = range(max(self.stage, int(self.half)), 3 if self.config.optim.muon else 4)
        return next(((stage, size) for stage in stages if (size := self.largest(stage))), (stages[-1], 1))

    def operations(self, micro: int) -> tuple[dict[str, float], dict[str, float]]:
        """Of a micro-batch, needed and executed, by part."""
        shape = self.shape(micro)
        return operations(self.model, shape, "needed"), operations(self.model, shape, "executed", self.recomputed)

    def needed(self, micro: int) -> float:
        """Operations that a window token needs."""
        return flops_per_step(self.model, self.shape(micro)) / (micro * self.config.data.seq_len)

    def tokens_per_second(self, micro: int) -> float:
        """At the stated MFU, on all devices."""
        return self.gpus * self.device.flops * self.mfu / self.needed(micro)

    @property
    def slowest_link(self) -> float:
        """Bytes a second that a device sends in a ring; one between nodes crosses the network once for all devices of a node."""
        device = self.device
        return device.link if self.nodes == 1 else min(device.link, device.network * self.gpus / self.nodes)

    def communication(self, stage: int, micro: int) -> tuple[float, float]:
        """Bytes that a device sends in an update, and the seconds that it takes."""
        sent = communication_volume(self.n_parameters, stage, self.gpus, self.half, self.rows // micro)
        return sent, sent / self.slowest_link
