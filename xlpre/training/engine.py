"""The engine is DeepSpeed's own, neither wrapped nor patched. The one door to deepspeed."""

from __future__ import annotations

import logging
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from xlpre.training.optim import OptimConfig, build_optimizer

# what the project decides from its own settings; the user's `deepspeed:` may not contradict it
OWNED = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.batch_size and train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim.*",
    "scheduler": "schedule.*",
    "bf16": "train.precision",
    "fp16": "train.precision",
}


@dataclass(frozen=True)
class TrainConfig:
    """The course of a run.

    Attributes:
        steps: updates in all.
        hours: a time budget; the schedule then follows the clock where it runs ahead of the steps. null: no budget.
        batch_size: rows (lanes) of an update, over all processes and accumulation.
        accumulation: micro-steps of an update.
        precision: `auto` is bf16 on a GPU that has it, else fp32.
        log_every: updates between lines of metrics.
        save_every: updates between checkpoints.
        keep_last: checkpoints to keep,
        keep_every: and those of every so many updates besides; null: no others.
        max_skipped: updates in a row whose gradients are not finite, and which are therefore not made, before the run stops.
        patience_minutes: a process that hears nothing from another for so long ends the job.
        wandb: project of Weights & Biases to which metrics also go; empty: none.
    """

    steps: int = 100_000
    hours: float | None = None
    batch_size: int = 32
    accumulation: int = 1
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    log_every: int = 20
    save_every: int = 500
    keep_last: int = 2
    keep_every: int | None = None
    max_skipped: int = 20
    patience_minutes: float = 20.0
    wandb: str = ""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulation", "log_every", "save_every", "keep_last", "max_skipped")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} ({getattr(self, name)}) must be at least 1")
        if self.patience_minutes <= 0 or (self.keep_every is not None and self.keep_every < 1):
            raise ValueError(
                f"train.patience_minutes ({self.patience_minutes}) must be positive and train.keep_every ({self.keep_every}) at "
                "least 1, or null"
            )
        if self.hours is not None and self.hours <= 0:
            raise ValueError(f"train.hours ({self.hours}) must be positive, or null for no budget of time")


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ValueError for settings of DeepSpeed that the project owns, or that are known to be wrong."""
    for key in overrides:
        if key in OWNED:
            raise ValueError(f"deepspeed.{key} is decided by {OWNED[key]}; set that instead")
    if overrides.get("zero_optimization", {}).get("stage", 1) == 0:
        raise ValueError(
            "deepspeed.zero_optimization.stage=0 takes updates that are not finite, and a hidden one in bf16; leave it out, or set 1, 2, 3"
        )


def start_processes(device: torch.device) -> None:
    """Join the other processes of the job."""
    _deepspeed(device).init_distributed(verbose=False)


def build_engine(
    model: nn.Module,
    train: TrainConfig,
    optim: OptimConfig,
    device: torch.device,
    n_processes: int,
    overrides: dict[str, Any],
) -> Any:
    """DeepSpeed's engine around `model`.

    Args:
        model: called by the engine as it would be by hand.
        train: batch size, accumulation, precision.
        optim: AdamW.
        device: of this process.
        n_processes: of the job.
        overrides: settings for DeepSpeed, handed on untouched; `check_overrides` has passed them.

    Raises:
        ValueError: a batch that the processes cannot share equally, or a key that DeepSpeed does not have.
    """
    shares = n_processes * train.accumulation
    if train.batch_size % shares:
        raise ValueError(
            f"train.batch_size ({train.batch_size}) must be a multiple of {n_processes} processes times train.accumulation "
            f"({train.accumulation}); set train.batch_size={max(train.batch_size // shares, 1) * shares}"
        )
    bf16 = train.precision == "bf16" or (
        train.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    settings = {
        "train_micro_batch_size_per_gpu": train.batch_size // shares,
        "gradient_accumulation_steps": train.accumulation,
        "gradient_clipping": optim.clip,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 2**31,
    }
    try:
        engine, *_ = _deepspeed(device).initialize(
            model=model, optimizer=build_optimizer(model, optim), config=_merged(settings, overrides)
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"deepspeed: {'.'.join(map(str, first['loc']))}: {first['msg']} (its own name of the key)"
        ) from None
    return engine


def full_weights(engine: Any, keep: bool) -> dict[str, Tensor]:
    """The model's weights in fp32 on the CPU, whole, whatever the ZeRO stage.

    Every process must call it; those that do not `keep` them get none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)  # stage 3 keeps a share of the parameter only
        if keep:
            weights[name] = (parameter if whole is None else whole).detach().float().cpu().view(shape)
    return weights


@contextmanager
def tensors_only(checkpoint: Path) -> Iterator[None]:
    """Let torch.load make tensors and DeepSpeed's own small records, and nothing else, though DeepSpeed asks for any object.

    Raises:
        ValueError: a file of `checkpoint` that cannot be read, or that holds more.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    key = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {asked[1]}" if asked else "it is no checkpoint"
        raise ValueError(
            f"{checkpoint}: a file in it holds more than tensors ({what}) and was not read; delete the folder to go on from the one before"
        ) from None
    except (EOFError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise  # the device's or the network's fault, not the file's
        raise ValueError(
            f"{checkpoint}: cannot be read ({str(error).splitlines()[0]}); delete the folder to go on from the one before"
        ) from None
    finally:
        os.environ.pop(key) if before is None else os.environ.update({key: before})


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
    from deepspeed.ops import __compatible_ops__

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    __compatible_ops__["deepspeed_shm_comm"] = False  # compiled at start-up on a CPU and of no use here
    return deepspeed
