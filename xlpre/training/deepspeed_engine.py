"""The engine is DeepSpeed's own, neither wrapped nor patched. The one door to deepspeed."""

from __future__ import annotations

import io
import logging
import os
import platform
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from xlpre.training.batch_schedule import BatchSchedule, split_batch
from xlpre.training.deepspeed_overrides import Asked, check_known, zero_stage
from xlpre.training.distributed import world_size
from xlpre.training.optimizer import OptimConfig, build_optimizer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainConfig:
    """The course of a run.

    Attributes:
        steps: updates in all.
        hours: a time budget; the schedule then follows the clock where it runs ahead of the steps. null: no budget.
        global_batch_size: rows (lanes) of a step, over all processes and micro-steps.
        micro_batch_size: rows of one process in one forward and backward pass; null: all rows of the process. The number of micro-steps
            (accumulation) is global_batch_size / (number of processes * micro_batch_size).
        batch_warmup_steps: steps during which the micro-steps of a step rise from 1 to the accumulation. The lanes of the missing
            micro-steps are not read.
        precision: `auto` is bf16 on a GPU that has it, else fp32.
        activation_checkpointing: keep no activations inside layers and compute them again for the backward pass: less memory,
            a third more operations.
        compile: the model goes through torch.compile, which takes a minute or more at the start.
        log_every: updates between lines of metrics.
        save_every: updates between checkpoints.
        keep_last_checkpoints: checkpoints to keep,
        keep_checkpoints_every: and those of every so many updates besides; null: no others.
        max_skipped_steps: updates in a row whose gradients are not finite, and which are therefore not made, before the run stops.
        timeout_minutes: a process that hears nothing from another for so long ends the job.
        wandb: project of Weights & Biases to which metrics also go; empty: none.
    """

    steps: int = 100_000
    hours: float | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    batch_warmup_steps: int = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 20
    save_every: int = 500
    keep_last_checkpoints: int = 2
    keep_checkpoints_every: int | None = None
    max_skipped_steps: int = 20
    timeout_minutes: float = 20.0
    wandb: str = ""

    def __post_init__(self) -> None:
        counts = (
            "steps",
            "global_batch_size",
            "log_every",
            "save_every",
            "keep_last_checkpoints",
            "max_skipped_steps",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} ({getattr(self, name)}) must be at least 1")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(
                f"train.micro_batch_size={self.micro_batch_size} is invalid: it must be at least 1. "
                "Set train.micro_batch_size=null for one micro-step."
            )
        if self.batch_warmup_steps < 0:
            raise ValueError(f"train.batch_warmup_steps ({self.batch_warmup_steps}) must be at least 0")
        if self.timeout_minutes <= 0 or (self.keep_checkpoints_every is not None and self.keep_checkpoints_every < 1):
            raise ValueError(
                f"train.timeout_minutes ({self.timeout_minutes}) must be positive and train.keep_checkpoints_every ({self.keep_checkpoints_every}) at "
                "least 1, or null"
            )
        if self.hours is not None and self.hours <= 0:
            raise ValueError(f"train.hours ({self.hours}) must be positive, or null for no budget of time")

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Divide the global batch among `world_size` processes.

        Raises:
            ValueError: the rows cannot be divided equally, or `batch_warmup_steps` is set and there is one micro-step only.
        """
        micro_batch_size, accumulation = split_batch(self.global_batch_size, self.micro_batch_size, world_size)
        if self.batch_warmup_steps and accumulation == 1:
            raise ValueError(
                f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: it adds micro-steps, and a step of {world_size} "
                f"process(es) has one micro-step of {micro_batch_size} rows each. Lower train.micro_batch_size, or set "
                "train.batch_warmup_steps=0."
            )
        return BatchSchedule(world_size, micro_batch_size, accumulation, self.batch_warmup_steps)


def check_compile(train: TrainConfig, attention: str) -> None:
    """Raise ValueError if a model is to be compiled whose attention (`model.attention_backend`) torch.compile cannot follow."""
    if train.compile and attention == "cpu":
        raise ValueError(
            "train.compile=true cannot compile model.attention_backend=cpu, which is written by hand; set model.attention_backend=auto"
        )


def init_process_group(device: torch.device) -> None:
    """Join the other processes of the job, for as long as `set_timeout` says: DeepSpeed would give them ten minutes."""
    _deepspeed(device).init_distributed(verbose=False, timeout=dist.distributed_c10d.default_pg_timeout)


def build_deepspeed_config(
    train: TrainConfig, optim: OptimConfig, device: torch.device, processes: int, overrides: dict[str, Any]
) -> dict[str, Any]:
    """What DeepSpeed is told, once the processes are joined.

    Args:
        train: batch size, accumulation, precision.
        optim: clipping.
        device: of this process.
        processes: of the job.
        overrides: settings for DeepSpeed, handed on untouched; `check_overrides` has passed them.

    Raises:
        ValueError: a precision that the device does not have or the stage gets wrong, a key that DeepSpeed does not have.
    """
    batch = train.batch_schedule(processes)
    precision = resolve_precision(device, train.precision)
    stage = zero_stage(overrides, precision, processes)
    if stage == 0 and precision != "fp32":
        raise ValueError(
            f"deepspeed.zero_optimization.stage=0 with {precision} (train.precision={train.precision}) is computed wrongly by DeepSpeed; "
            "leave the stage out, or set 1, 2, 3, or train.precision=fp32"
        )
    ours = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": optim.max_grad_norm if stage else 0.0,  # without ZeRO the optimizer clips
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": precision == "fp16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW under offload, too: it needs no compiler
        "zero_allow_untested_optimizer": optim.muon,
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},  # which waits for the device twice in every micro-step
    }
    settings = _merged(ours, overrides)
    asked = Asked(settings)
    deepspeed = _deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfigError
    from pydantic import ValidationError  # which DeepSpeed brings

    try:
        deepspeed.DeepSpeedConfig(asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"deepspeed: {'.'.join(map(str, first['loc']))}: {first['msg']} (its own name of the key)"
        ) from None
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError) as error:  # whatever it stumbles over
        raise ValueError(f"deepspeed: DeepSpeed refuses these settings: {error}") from None
    check_known(overrides, asked)
    return settings


def build_engine(
    model: nn.Module, settings: dict[str, Any], train: TrainConfig, optim: OptimConfig, device: torch.device
) -> Any:
    """DeepSpeed's engine around `model`, which it calls as one would by hand, with `build_deepspeed_config` it."""
    zero = settings["zero_optimization"]
    guarded = zero["stage"] == 0
    bucket = {"reduce_bucket_size": reduce_bucket_size(zero, sum(parameter.numel() for parameter in model.parameters()))}
    settings, optimizer = _merged(settings, {"zero_optimization": bucket}), build_optimizer(model, optim, guarded)
    deepspeed = _deepspeed(device)  # whose log goes on to what stdout is at its first import
    with redirect_stdout(io.StringIO()):  # in bf16 it prints many lines of the memory at hand
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    bf16_of_stage_1 = hasattr(engine.optimizer, "get_grads_for_reduction")
    if (guarded or bf16_of_stage_1) and world_size() == 1:
        # it would copy all gradients twice, though there is nobody to add them to, and in bf16 round what was accumulated in fp32
        engine.enable_backward_allreduce = False
    if train.compile:
        # how many tokens are in a cluster of the adaptive softmax is known by then only; else the graph would end there
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        engine.compile()
    return engine


def reduce_bucket_size(zero: dict[str, Any], parameters: int) -> int:
    """Elements of the buffer in which gradients are reduced: DeepSpeed's 500 million, and no more than the model has.

    Args:
        zero: the settings `zero_optimization`, in which `reduce_bucket_size` decides.
        parameters: of the model.
    """
    return int(zero.get("reduce_bucket_size", min(parameters, 500_000_000)))


def resolve_precision(device: torch.device, wanted: str) -> str:
    """What `wanted`, a `train.precision`, is on `device`: fp32, bf16 or fp16.

    Raises:
        ValueError: the device does not have it.
    """
    on_gpu = device.type == "cuda"
    if wanted == "auto":
        return "bf16" if on_gpu and _has_bf16(device) else "fp32"
    if wanted == "bf16" and not _has_bf16(device):
        where = "a processor without instructions for it (AVX512-BF16, AMX)"
        if on_gpu:
            where = f"{torch.cuda.get_device_name(device)}, which is older than compute capability 8 and emulates it,"
        raise ValueError(f"train.precision=bf16 on {where} is many times slower than fp32; leave train.precision=auto")
    if wanted == "fp16" and not _deepspeed(device).accelerator.get_accelerator().is_fp16_supported():
        raise ValueError(f"train.precision=fp16 is not to be had on this {device.type}; leave train.precision=auto")
    return wanted


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _merged(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `overrides` in them, group by group."""
    merged = dict(settings)
    for key, value in overrides.items():
        inner = settings.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _deepspeed(device: torch.device) -> Any:
    """The library, told where it runs before its first import, and silent."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":  # elsewhere all operators would be tried for
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled at start-up and of no use here
    return deepspeed
