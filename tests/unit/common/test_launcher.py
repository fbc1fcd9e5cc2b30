import os
import sys

import pytest
import torch

from xlpre.common.launcher import LAUNCHER_VARIABLES, read_launcher
from xlpre.training.distributed import init_env

RESULT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[03-05],gpu1",
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
INTEL_MPI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29411"}


@pytest.fixture
def read(monkeypatch):
    """Call `read_launcher` with some variables, and return what it set."""

    def call(**variables):
        for name in [*RESULT, *sum(LAUNCHER_VARIABLES, ()), "CUDA_VISIBLE_DEVICES"]:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            read_launcher()
            return tuple(os.environ.get(name) for name in RESULT)
        finally:
            for name in RESULT:
                os.environ.pop(name, None)

    return call


def test_tasks_of_srun_number_themselves_and_meet_at_the_first_node_and_a_port_of_the_job(read):
    assert read(**SLURM) == ("5", "7", "1", "2", "node03", str(20000 + (12345 * 7 + 2) % 10000))
    assert read(**SLURM, **MASTER)[4:] == ("node1", "29411")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a,b", "a"),
        ("node1", "node1"),
        ("n[3,7-9]-ib,x", "n3-ib"),
        ("r[1-2]n[05-06]", "r1n05"),
        ("h-[010-020]", "h-010"),
    ],
)
def test_the_first_host_of_a_slurm_list(read, hosts, first):
    assert read(**{**SLURM, "SLURM_STEP_NODELIST": hosts})[4] == first


def test_a_batch_script_and_a_step_of_one_task_are_jobs_of_one_process(read):
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    assert read(**batch) == read(**{**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) == (None,) * 6


def test_processes_of_mpirun_number_themselves(read):
    assert read(**OPEN_MPI) == ("3", "4", "3", "4", "127.0.0.1", "29500")
    assert read(**OPEN_MPI, **SLURM)[:2] == ("3", "4"), "mpirun in a SLURM job starts the processes"
    assert read(**INTEL_MPI, **MASTER) == ("1", "4", "1", "2", "node1", "29411")


def test_the_variables_of_pytorch_take_precedence(read):
    assert read(**SLURM, RANK="0", WORLD_SIZE="1")[:3] == ("0", "1", None)


@pytest.mark.parametrize(("devices", "local_rank"), [("2", "0"), ("0,1", "1"), ("", "1")])
def test_a_process_that_sees_one_gpu_uses_it(read, devices, local_rank):
    assert read(**SLURM, CUDA_VISIBLE_DEVICES=devices)[2] == local_rank


def test_a_launcher_that_leaves_out_what_is_needed_is_refused(read):
    with pytest.raises(ValueError, match=r"MASTER_ADDR is missing: PMI_SIZE=4 .* several machines"):
        read(**INTEL_MPI)
    with pytest.raises(ValueError, match=r"PMI_SIZE=4 is invalid: .* Use torchrun or deepspeed"):
        read(PMI_RANK="1", PMI_SIZE="4")


@pytest.mark.parametrize(("n_gpus", "launched"), [(8, False), (1, False), (8, True)])
def test_a_process_without_a_launcher_says_how_to_use_all_gpus(monkeypatch, capsys, n_gpus, launched):
    environment = {name: value for name, value in os.environ.items() if name not in (*RESULT, "DS_ACCELERATOR")}
    monkeypatch.setattr(os, "environ", environment | ({"RANK": "0"} if launched else {}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(sys, "argv", ["pretrain/run.py"])
    init_env()
    hint = "1 of 8 GPUs is used. To use all: deepspeed pretrain/run.py ... (docs/distributed.md)\n"
    assert capsys.readouterr().out == (hint if n_gpus == 8 and not launched else "")
