"""Rank, world size, device of the process, and small collectives on the CPU. Uses torch.distributed only."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from xlpre.common.errors import InputError
from xlpre.common.launcher import read_launcher
from xlpre.common.messages import counted

T = TypeVar("T")


def rank() -> int:
    """Return the global rank of this process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_rank_zero() -> bool:
    """Return True on the process that prints and writes."""
    return rank() == 0


def init_env() -> None:
    """Set the environment variables that a launcher sets, so that `python run.py` is a job of one process.

    Prints a hint if the machine has more than one GPU.

    Raises:
        InputError: see `read_launcher`.
    """
    read_launcher()
    if "RANK" not in os.environ:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address)
        if device_type() == "cuda" and (n_gpus := torch.cuda.device_count()) > 1:
            print(
                f"1 of {n_gpus} GPUs is used. To use all: deepspeed {sys.argv[0]} ... (docs/distributed.md)", flush=True
            )


def set_timeout(minutes: float) -> None:
    """Set the time after which a collective fails. Call it before the process group is created.

    DeepSpeed creates its groups with the default timeout of torch and has no setting for it, so the default is changed.
    """
    dist.distributed_c10d.default_pg_timeout = timedelta(minutes=minutes)
    dist.distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=minutes)


def destroy_process_group() -> None:
    """Destroy the process group at the end of the job. NCCL prints a warning if the interpreter exits first."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """Return a TCP port of this machine that is not in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def deepspeed_launcher(n_processes: int) -> list[str]:
    """Return a `deepspeed` command that starts `n_processes` processes on this machine. Append the script and its arguments to it."""
    executable = Path(sys.executable).with_name("deepspeed")
    program = [str(executable)] if executable.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device_type() == "cuda" else []
    if visible and all(index.isdigit() for index in visible):  # the launcher ignores the variable if --num_gpus is set
        devices = ["--include", f"localhost:{','.join(visible[:n_processes])}"]
    else:
        devices = ["--num_gpus", str(n_processes)]
    return [*program, "-q", *devices, "--master_port", str(free_port())]


def device_type() -> str:
    """Return `cuda` or `cpu`. DS_ACCELERATOR=cpu, the variable of DeepSpeed, selects the CPU on a machine with GPUs."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"


def select_device(name: str | None) -> torch.device:
    """Return the device `name` of a command, or by default that of `device_type`.

    Raises:
        InputError: `name` is `cuda` on a machine without GPUs.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device=cuda is invalid: PyTorch finds no GPU on this machine. Leave it out.")
    return torch.device(name or device_type())


def local_device() -> torch.device:
    """Return the device of this process, without using it: no CUDA context is created.

    Raises:
        OSError: LOCAL_RANK is not below the number of visible GPUs.
    """
    if device_type() == "cpu":
        return torch.device("cpu")
    local_rank, n_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= n_gpus:
        raise OSError(
            f"LOCAL_RANK={local_rank} is invalid: it must be less than the number of GPUs, and process {rank()} sees "
            f"{counted(n_gpus, 'GPU')}. Start one process per GPU, or set LOCAL_RANK=0 if each process sees one GPU only."
        )
    return torch.device("cuda", local_rank)


def use_device() -> torch.device:
    """Select and return the device of this process.

    On a CPU, the cores are divided among the processes of this machine. OMP_NUM_THREADS is the upper limit of threads per process.

    Raises:
        OSError: see `local_device`.
    """
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # cuDNN's attention refuses masks that need a gradient, so only evaluation would use it; its masks have had bugs
        torch.backends.cuda.enable_cudnn_sdp(False)
        return device
    _set_num_threads(int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size()))
    return device


def _set_num_threads(n_sharing: int) -> None:
    """Use an equal part of the cores that this process may use, if `n_sharing` processes may use them. OMP_NUM_THREADS is the limit."""
    cores, limit = len(os.sched_getaffinity(0)) // n_sharing, os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(max(1, min(cores, int(limit)) if limit.isdecimal() else cores))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout for one step of one process.

    The seed is a function of step and rank, so a resumed run needs no state of a random generator.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1)))


def check_shared_filesystem(folder: Path, comm: Comm, timeout_seconds: float = 60.0) -> None:
    """Raise InputError, on every process, if a machine does not see the files that rank 0 writes to `folder`."""
    # a new name: a network file system caches the absence of a name that was looked up before
    marker = folder / f".seen_{comm.broadcast(secrets.token_hex(8))}"
    if is_rank_zero():
        for stale in folder.glob(".seen_*"):  # left by a run that was killed here
            stale.unlink()
        marker.touch()
    comm.barrier()
    deadline = time.monotonic() + timeout_seconds
    while not (is_seen := marker.name in _list_dir(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    failed = sorted(
        {host for host, host_sees_it in comm.all_gather((socket.gethostname(), is_seen)) if not host_sees_it}
    )
    if is_rank_zero():
        marker.unlink(missing_ok=True)
    if failed:
        raise InputError(
            f"run_dir={folder} is invalid: {', '.join(failed)} cannot see the files that rank 0 writes there. Set run_dir to a folder "
            "on a file system that all machines share (docs/distributed.md)."
        )


def _list_dir(folder: Path) -> list[str]:
    """List the names in a folder. Opening the folder makes a network file system refresh its cache."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


class Comm:
    """Collectives for small values over the CPU (gloo), so that no GPU is synchronized. Every process must call each method."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the maximum of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def start_all_reduce_max(self, *values: float) -> Callable[[], list[float]]:
        """Start `all_reduce_max` in the background. The function that it returns waits for the result."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self._group is None:
            return tensor.tolist
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return tensor.tolist()

        return wait

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def broadcast(self, value: T) -> T:
        """Return the `value` of rank 0 on every process."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def call_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every process.

        Raises:
            InputError: `function` raised it; so every process ends with the same exit status.
            OSError: `function` raised it.
        """
        result, error = None, None
        if is_rank_zero():
            try:
                result = function()
            except (ValueError, OSError) as raised:
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return cast(T, result)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * world_size()
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def divide_cores(self) -> None:
        """Divide the cores among the processes that may use the same ones. A launcher may have given each process cores of its own."""
        mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
        _set_num_threads(self.all_gather(mine).count(mine))

    def barrier(self) -> None:
        """Wait until every process calls it."""
        if self._group is not None:
            dist.barrier(self._group)

    def _reduce(self, values: tuple[float, ...], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self._group)
        return tensor.tolist()
