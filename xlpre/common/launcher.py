"""Environment variables of launchers that do not set the variables of PyTorch: `srun` and `mpirun`."""

from __future__ import annotations

import os
import re

from xlpre.common.errors import InputError

# rank, number of processes, rank on the machine
SLURM_VARIABLES = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
)  # set for the tasks of `srun`, not for the batch script
# rank, number of processes, rank on the machine and (except SLURM) number of processes on the machine. The first launcher whose variables
# are all set is used: SLURM comes last, because an mpirun that srun started also passes on SLURM's variables
LAUNCHER_VARIABLES: tuple[tuple[str, ...], ...] = (
    *(
        tuple(f"{prefix}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        for prefix in ("OMPI", "MV2")  # Open MPI, MVAPICH
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray MPICH
    SLURM_VARIABLES,
)
OTHER_LAUNCHERS = (
    "Use torchrun or deepspeed, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process."
)


def read_launcher() -> None:
    """Set the environment variables of PyTorch in a process that `srun` or `mpirun` started.

    Does nothing if they are set already, as by `deepspeed` and `torchrun`, or if the job has one process.

    Raises:
        InputError: the launcher started several processes, but did not set the local rank, or the address of the first machine is unknown.
    """
    get = os.environ.get
    if "RANK" in os.environ:
        return
    complete = [names for names in LAUNCHER_VARIABLES if all(name in os.environ for name in names)]
    if not complete:
        for _, size_name, *_ in LAUNCHER_VARIABLES:
            if int(get(size_name, "1")) > 1:
                raise InputError(
                    f"{size_name}={get(size_name)} is invalid: the launcher started several processes, but set no local rank. "
                    f"{OTHER_LAUNCHERS}"
                )
        return
    rank, size, local_rank, *_ = (int(os.environ[name]) for name in complete[0])
    if size == 1:
        return
    is_slurm = complete[0] == SLURM_VARIABLES
    local_size = _slurm_local_size() if is_slurm else int(os.environ[complete[0][3]])
    address = "127.0.0.1" if local_size == size else _first_host(get("SLURM_STEP_NODELIST", "")) if is_slurm else ""
    if not get("MASTER_ADDR", address):
        raise InputError(
            f"MASTER_ADDR is missing: {complete[0][1]}={size} processes run on several machines. Set MASTER_ADDR to the machine of process "
            "0, for example with `mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29411`."
        )
    # each SLURM job has its own port, because other jobs on a shared machine may use the default
    port = 20000 + (int(get("SLURM_JOB_ID", "0")) * 7 + int(get("SLURM_STEP_ID", "0"))) % 10000 if is_slurm else 29500
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    if get("CUDA_VISIBLE_DEVICES", "").isdecimal():  # the site binds GPUs to processes: each sees one GPU, with index 0
        local_rank = 0
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size)
    )


def _slurm_local_size() -> int:
    """Return the number of tasks of this SLURM step on this machine, from SLURM_STEP_TASKS_PER_NODE, such as `4(x3),2`."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
    return [int(n_tasks) for n_tasks, n_nodes in groups for _ in range(int(n_nodes or 1))][
        int(os.environ["SLURM_NODEID"])
    ]


def _first_host(hosts: str) -> str:
    """Return the first host of a SLURM list such as `node[03-07,9],gpu1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")
