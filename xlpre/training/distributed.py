"""Processes: who am I, how many are we, what do we agree on. torch.distributed only."""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def init_env() -> None:
    """Make a plain `python run.py` a job of one process, as a launcher would have."""
    if "RANK" not in os.environ:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address)


def set_timeout(minutes: float) -> None:
    """How long a process waits for the others before the job ends; call it before they are joined.

    DeepSpeed's own groups take torch's default and no setting of theirs, so it is the default that is changed.
    """
    dist.distributed_c10d.default_pg_timeout = timedelta(minutes=minutes)
    dist.distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=minutes)


def leave() -> None:
    """Let go of the other processes, at the end of all; NCCL complains if that is left to the end of the program."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launcher(processes: int) -> list[str]:
    """The command `deepspeed` of this Python, for so many processes on this machine; what they run goes after it."""
    beside = Path(sys.executable).with_name("deepspeed")
    program = [str(beside)] if beside.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if torch.cuda.is_available() else []
    if listed and all(number.isdigit() for number in listed):  # which it would forget beside --num_gpus
        chosen = ["--include", f"localhost:{','.join(listed[:processes])}"]
    else:
        chosen = ["--num_gpus", str(processes)]
    return [*program, "-q", *chosen, "--master_port", str(free_port())]


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_rank_zero() -> bool:
    """Whether this is process 0, which prints and writes."""
    return rank() == 0


def device_type() -> str:
    """What is computed on here, `cuda` or `cpu`. DeepSpeed's own word for "not the GPU", DS_ACCELERATOR=cpu, is obeyed."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"


def use_device() -> torch.device:
    """The device of this process; on a CPU, also share the cores out among the processes of this machine.

    OMP_NUM_THREADS is obeyed, as the most threads of a process.

    Raises:
        OSError: this process sees fewer GPUs than its number on this machine takes.
    """
    if device_type() == "cuda":
        number, n_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= n_gpus:
            raise OSError(
                f"LOCAL_RANK ({number}) must be below the number of GPUs that process {rank()} sees ({n_gpus}); start a process for "
                "each of them, or set LOCAL_RANK=0 where each sees one of its own"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        # cuDNN's attention refuses masks that need a gradient, so that it would run at evaluation only, and its masks have had faults
        torch.backends.cuda.enable_cudnn_sdp(False)
        return device
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size())
    cores, most = len(os.sched_getaffinity(0)) // here, os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(max(1, min(cores, int(most)) if most.isdecimal() else cores))
    return torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed the global generators, which starting values are drawn from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, process: int) -> None:
    """Seed what dropout draws from: a function of the step, so that there is no state to keep, and other on each process."""
    torch.manual_seed(
        int(np.random.SeedSequence([seed, step, process]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    )


def check_shared_filesystem(folder: Path, comm: Comm, patience_seconds: float = 60.0) -> None:
    """Raise ValueError, on every process, if a machine does not see what process 0 writes to `folder`."""
    # a name that nobody looked for before, so that no network file system remembers its absence
    sign = folder / f".seen_{comm.broadcast(secrets.token_hex(8))}"
    if is_rank_zero():
        for left in folder.glob(".seen_*"):  # by who was killed here
            left.unlink()
        sign.touch()
    comm.barrier()
    until = time.monotonic() + patience_seconds
    while not (seen := sign.name in _names_in(folder)) and time.monotonic() < until:
        time.sleep(0.5)
    blind = sorted({machine for machine, sees in comm.all_gather((socket.gethostname(), seen)) if not sees})
    if is_rank_zero():
        sign.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"run_dir={folder}, as process 0 writes it, is not seen on {', '.join(blind)}; put it on a file system that all machines "
            "share (docs/clusters.md)"
        )


def _names_in(folder: Path) -> list[str]:
    """Of its files: opening the folder makes a network file system look again."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


class Comm:
    """Small numbers that all processes must agree on, exchanged over the CPU so that no GPU waits."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None

    def all_reduce_max(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def broadcast(self, value: str) -> str:
        """A word of process 0."""
        box = [value]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """A small value of each process, by its number."""
        box = [value] * world_size()
        if self._group is not None:
            dist.all_gather_object(box, value, group=self._group)
        return box

    def barrier(self) -> None:
        """Wait for all."""
        if self._group is not None:
            dist.barrier(self._group)

    def _reduce(self, values: tuple[float, ...], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self._group is None:
            return list(values)
        tensor: Tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self._group)
        return tensor.tolist()
