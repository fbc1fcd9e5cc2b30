"""Configuration of DeepSpeed, and construction of its engine, which is neither wrapped nor patched."""

from __future__ import annotations

import io
import logging
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from xlpre.common.errors import InputError
from xlpre.config.key_suggestions import suggest_key
from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_overrides import communication_dtype, zero_stage
from xlpre.training.distributed import world_size
from xlpre.training.optimizer import build_optimizer
from xlpre.training.optimizer_state import init_moments

if TYPE_CHECKING:
    from pydantic import ValidationError  # a dependency of DeepSpeed

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def init_process_group(device: torch.device) -> None:
    """Join the other processes of the job, with the timeout that `set_timeout` has set. DeepSpeed's own timeout is ten minutes."""
    _import_deepspeed(device).init_distributed(verbose=False, timeout=dist.distributed_c10d.default_pg_timeout)


def build_deepspeed_config(
    train: TrainConfig, optim: OptimConfig, device: torch.device, n_processes: int, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Build and check the configuration of DeepSpeed. Call it after the processes have joined.

    Args:
        train: settings of batch size and precision.
        optim: settings of gradient clipping and of the optimizer's name.
        device: device of this process.
        n_processes: number of processes.
        overrides: the `deepspeed` settings, checked by `check_overrides`. They override all other entries.

    Raises:
        InputError: the batch cannot be divided, the device or the ZeRO stage does not support the precision, or DeepSpeed refuses a
            value.
    """
    batch = train.batch_schedule(n_processes)
    precision = resolve_precision(device, train.precision)
    stage = zero_stage(overrides, precision, n_processes)
    if stage == 0 and precision != "fp32":
        raise InputError(
            f"deepspeed.zero_optimization.stage=0 is invalid with train.precision={train.precision}: DeepSpeed computes wrong numbers "
            f"in {precision} without ZeRO. Leave the stage out, set stage 1, 2 or 3, or set train.precision=fp32."
        )
    defaults = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": (optim.max_grad_norm or 0.0) if stage else 0.0,  # without ZeRO the optimizer clips
        # immediate_grad_update: add each gradient to its fp32 sum and free it, instead of keeping all until the update
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True, "immediate_grad_update": True},
        "fp16": {"enabled": precision == "fp16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": communication_dtype(overrides, precision, stage),
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,  # use torch's AdamW with offloading, too: it needs no compiler
        "zero_allow_untested_optimizer": optim.muon,
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device twice in every micro-step
    }
    config = _merge(defaults, overrides)
    deepspeed = _import_deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfigError
    from pydantic import ValidationError  # a dependency of DeepSpeed

    try:
        deepspeed.DeepSpeedConfig(dict(config))
    except ValidationError as error:
        raise InputError(_format_validation_error(error, overrides)) from None
    # DeepSpeed has no common error class
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError, AttributeError, KeyError) as error:
        raise InputError(_refusal(error)) from None
    return config


def build_engine(
    model: nn.Module, config: dict[str, Any], train: TrainConfig, optim: OptimConfig, device: torch.device
) -> Any:
    """Build the optimizer, and DeepSpeed's engine around `model`.

    Args:
        model: the model, on any device.
        config: configuration from `build_deepspeed_config`.
        train: settings, of which `compile` is read.
        optim: settings of the optimizer.
        device: device of this process.

    Raises:
        InputError: the state of this version of DeepSpeed cannot be saved; see `init_moments`.
    """
    zero = config["zero_optimization"]
    without_zero = zero["stage"] == 0
    bucket = {"reduce_bucket_size": reduce_bucket_size(zero, zero["stage"], [p.numel() for p in model.parameters()])}
    config = _merge(config, {"zero_optimization": bucket})
    bf16_on_cpu = config["bf16"]["enabled"] and _supports_bf16(torch.device("cpu"))
    optimizer = build_optimizer(model, optim, clip_and_skip=without_zero, bf16_on_cpu=bf16_on_cpu)
    # before the redirection, because DeepSpeed's logger keeps the stdout of the first import
    deepspeed = _import_deepspeed(device)
    with redirect_stdout(io.StringIO()):  # in bf16, DeepSpeed prints many lines about memory
        try:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        except (AssertionError, ValueError) as error:  # settings that contradict each other
            raise InputError(_refusal(error)) from error
    is_bf16_stage_1 = hasattr(engine.optimizer, "get_grads_for_reduction")
    if (without_zero or is_bf16_stage_1) and world_size() == 1:
        # with one process, this reduction would only copy all gradients twice and, in bf16, round the sums, which are in fp32
        engine.enable_backward_allreduce = False
    loss_scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(loss_scaler, "raise_error_at_min_scale"):
        # this project counts skipped steps (train.max_skipped_steps); DeepSpeed would end fp16 training after 17
        loss_scaler.raise_error_at_min_scale = False
    init_moments(engine)
    if train.compile:
        # the number of tokens in a cluster of the adaptive softmax is dynamic; the graph would break there
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        engine.compile()
    return engine


def _refusal(error: Exception) -> str:
    return (
        f"deepspeed: DeepSpeed refuses the settings: {(str(error) or type(error).__name__).rstrip('.')}. Correct them."
    )


def reduce_bucket_size(zero: Mapping[str, Any], stage: int, sizes: Sequence[int]) -> int:
    """Return the number of elements of the buffer in which gradients are reduced: DeepSpeed's default, but at most the model size.

    If the reduction overlaps with the backward pass, it is an eighth of the model, because a reduction starts when the buffer is full; and
    at least the largest parameter, because DeepSpeed does not put a larger gradient into the buffer.

    Args:
        zero: the settings `zero_optimization`. If they have `reduce_bucket_size`, its value is returned.
        stage: ZeRO stage.
        sizes: number of elements of each parameter.
    """
    overlaps = zero.get("overlap_comm", stage == 3)
    n_elements = max(*sizes, sum(sizes) // 8) if overlaps else sum(sizes)
    return int(zero.get("reduce_bucket_size", min(n_elements, 500_000_000)))


def resolve_precision(device: torch.device, precision: str) -> str:
    """Return `fp32`, `bf16` or `fp16` for a `train.precision`, which may be `auto`.

    Raises:
        InputError: the device does not support it.
    """
    on_gpu = device.type == "cuda"
    if precision == "auto":
        return "bf16" if on_gpu and _supports_bf16(device) else "fp32"
    if precision == "bf16" and not _supports_bf16(device):
        reason = "this processor has no bf16 instructions (AVX512-BF16, AMX)"
        if on_gpu:
            reason = f"{torch.cuda.get_device_name(device)} emulates bf16 (compute capability below 8)"
        raise InputError(
            f"train.precision=bf16 is invalid: {reason} and would be many times slower than in fp32. Set train.precision=auto."
        )
    if precision == "fp16" and not _import_deepspeed(device).accelerator.get_accelerator().is_fp16_supported():
        raise InputError(
            f"train.precision=fp16 is invalid: this {device.type} does not support it. Set train.precision=auto."
        )
    return precision


def cpu_has_bf16() -> bool:
    """Return True if this processor is known to have instructions for bf16 (AVX512-BF16 or AMX)."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _supports_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or cpu_has_bf16() or platform.machine() not in ("x86_64", "AMD64")


def _merge(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `config` updated with `overrides`; nested mappings are merged."""
    merged = dict(config)
    for key, value in overrides.items():
        nested = config.get(key)
        merged[key] = _merge(nested, value) if isinstance(nested, dict) and isinstance(value, dict) else value
    return merged


def _import_deepspeed(device: torch.device) -> Any:
    """Import deepspeed without its messages. The accelerator must be set before its first import."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":  # on a GPU this import would probe all operators
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at start-up, and is not used here
    return deepspeed


def _format_validation_error(error: ValidationError, overrides: Mapping[str, Any]) -> str:
    """Return the message for a group of settings that DeepSpeed refuses, with the full key of the setting."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    first = error.errors()[0]
    path = tuple(map(str, first["loc"]))
    # the error names the class of the group, but not the group
    keys = [".".join(("deepspeed", name, *path)) for name, value in overrides.items() if _contains(value, path)]
    key = " or ".join(keys) or ".".join(("deepspeed", *path))
    if first["type"] != "extra_forbidden":
        return f"{key} is invalid: {first['msg']}. Correct it."
    known: list[str] = []
    if len(path) == 1:
        models = {model.__name__: model for model in DeepSpeedConfigModel.__subclasses__()}
        known = list(models[error.title].model_fields) if error.title in models else []
    suggestion = suggest_key(path[-1], known)
    return f"{key} is invalid: DeepSpeed has no such setting" + (f"; {suggestion}" if suggestion else ". Correct it.")


def _contains(value: Any, path: Sequence[str]) -> bool:
    """Return True if nested mappings have a value at `path`."""
    for name in path:
        if not (isinstance(value, Mapping) and name in value):
            return False
        value = value[name]
    return True
