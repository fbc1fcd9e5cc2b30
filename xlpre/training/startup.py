"""Start-up of a training process, shared by pretraining and fine-tuning.

A trainer starts in this order::

    check_wandb_installed(config.train.wandb)
    inputs = RunInputs(config)                               # reads and checks the inputs; writes nothing
    context = start_training(config.train, config.optim, config.deepspeed, partial(run_needed_selfchecks, ...))
    lock = context.lock_run_dir(run_dir, "pretraining")      # the first write
    backend = context.comm.call_on_rank_zero(lambda: resolve_backend(...))   # all processes compute with the same kernels
    engine = build_engine(model, context.deepspeed_config, config.train, config.optim, context.device)
    print(f"... {context.describe()}")                       # batch, processes, device, precision, ZeRO stage
    ...
    lock.close()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xlpre.common.files import lock_dir
from xlpre.training.batch_schedule import BatchSchedule
from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import (
    PRECISIONS,
    build_deepspeed_config,
    cpu_has_bf16,
    init_process_group,
    resolve_precision,
)
from xlpre.training.distributed import (
    Comm,
    check_shared_filesystem,
    init_env,
    is_rank_zero,
    local_device,
    set_timeout,
    use_device,
    world_size,
)

# function of the device, the dtype of activations and a time limit in seconds, which checks the kernels of that device
KernelCheck = Callable[[torch.device, torch.dtype, float], None]


@dataclass(frozen=True)
class TrainingContext:
    """A process of a training job, after the processes have joined.

    Attributes:
        device: device of this process.
        precision: `fp32`, `bf16` or `fp16`.
        batch: division of the global batch among processes and micro-steps.
        comm: collectives for small values.
        deepspeed_config: the complete configuration for DeepSpeed.
    """

    device: torch.device
    precision: str
    batch: BatchSchedule
    comm: Comm
    deepspeed_config: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The data type of activations."""
        return PRECISIONS[self.precision]

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self.deepspeed_config["zero_optimization"]["stage"])

    def lock_run_dir(self, run_dir: Path, kind: str) -> ExitStack:
        """Lock the run folder on rank 0 until the returned object is closed, and check that all machines see it.

        Every process must call it.

        Args:
            run_dir: the folder, which is created.
            kind: name of the run for the error message, such as `pretraining`.

        Raises:
            InputError: another process uses the folder, or a machine does not see it.
        """
        refusal = f"another {kind} process uses this folder; wait until it ends, or stop it"
        lock = ExitStack()

        def acquire() -> None:
            lock.enter_context(lock_dir(run_dir, refusal))

        self.comm.call_on_rank_zero(acquire)
        check_shared_filesystem(run_dir, self.comm)
        return lock

    def describe(self) -> str:
        """Return batch size, number of processes, device, precision and ZeRO stage in one line."""
        return f"{self.batch}; {self.device.type}, {self.precision}, ZeRO stage {self.zero_stage}"

    def precision_note(self) -> str:
        """Return a note if the processor computes faster in bf16 than in the precision of the job, else an empty string."""
        if self.device.type != "cpu" or self.precision != "fp32" or not cpu_has_bf16():
            return ""
        return (
            "note: this processor has bf16 instructions. With train.precision=bf16, a step is 1.3 to 3.5 times as fast"
        )


def join_processes(train: TrainConfig) -> Comm:
    """Join the other processes of the job. If this process has already joined them, keep that group.

    Raises:
        OSError: this process has no GPU.
    """
    set_timeout(train.timeout_minutes)
    device = use_device()
    init_process_group(device)
    comm = Comm()
    if device.type == "cpu":
        comm.divide_cores()
    return comm


def start_training(
    train: TrainConfig, optim: OptimConfig, overrides: Mapping[str, Any], check_kernels: KernelCheck
) -> TrainingContext:
    """Join the other processes of the job and check the settings that depend on their number and device.

    Writes nothing to the run folder.

    Args:
        train: batch size, precision and timeout.
        optim: optimizer settings that DeepSpeed reads.
        overrides: the `deepspeed` settings of the user.
        check_kernels: called on rank 0 before this process uses its GPU, because the GPU may admit only one process at a time. The other
            processes wait for rank 0 for up to `train.timeout_minutes`, so the time limit is half of it.

    Raises:
        InputError: the global batch cannot be divided among the processes, the device does not have the precision, or DeepSpeed
            refuses a setting.
        OSError: this process has no GPU.
    """
    init_env()
    batch, device = train.batch_schedule(world_size()), local_device()
    precision = resolve_precision(device, train.precision)
    if is_rank_zero():
        check_kernels(device, PRECISIONS[precision], train.timeout_minutes * 60 / 2)
    comm = join_processes(train)
    deepspeed_config = build_deepspeed_config(train, optim, device, world_size(), dict(overrides))
    return TrainingContext(device, precision, batch, comm, deepspeed_config)
