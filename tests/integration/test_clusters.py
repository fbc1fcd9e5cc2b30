"""Launchers for several machines and automatic restarts, tested on one machine."""

import sys
import time
from pathlib import Path

import pytest

from tests.integration.clusters import LONGER, SCRIPT, end, losses, read_until, start, training_processes
from tests.integration.conftest import REPOSITORY, deepspeed_launcher, environment, launch, run_together
from tests.integration.forking import ForkedCommand
from xlpre.common.files import lock_dir
from xlpre.training import checkpoint
from xlpre.training.distributed import free_port

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TORCHRUN_2 = (TORCHRUN, "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("variables", [SLURM, pytest.param(OPEN_MPI, marks=pytest.mark.long)], ids=["srun", "mpirun"])
def test_processes_of_srun_and_mpirun_train_together(make_args, tmp_path, variables):
    port = {"MASTER_PORT": str(free_port())}
    ranks = [{name: value.format(rank=rank) for name, value in variables.items()} for rank in (0, 1)]
    environments = [environment() | port | rank for rank in ranks]
    wrong = ForkedCommand([SCRIPT, *make_args("wrong", train__stesp=6)], REPOSITORY, environments).wait(60)
    assert wrong.returncode == 2 and wrong.stderr.count("error: ") == 1, wrong.stderr
    done = ForkedCommand([SCRIPT, *make_args("two", train__steps=6)], REPOSITORY, environments).wait(120)
    assert done.returncode == 0 and len(losses(tmp_path / "two")) == 6, done.stderr
    assert checkpoint.read_manifest(tmp_path / "two" / "checkpoints" / "step_00000006")["world_size"] == 2


@pytest.mark.long
def test_an_error_of_rank_0_ends_all_processes_with_its_status(make_args, tmp_path):
    port = {"MASTER_PORT": str(free_port())}
    ranks = [{name: value.format(rank=rank) for name, value in SLURM.items()} for rank in (0, 1)]
    environments = [environment() | port | rank for rank in ranks]
    with lock_dir(tmp_path / "busy", ""):  # held by this process
        job = ForkedCommand([SCRIPT, *make_args("busy", train__steps=6)], REPOSITORY, environments).wait(120)
    assert job.returncode == 2 and job.stderr.count("error: ") == 1, job.stderr  # the highest status
    assert "another training process uses this folder" in job.stderr


@pytest.mark.long
@pytest.mark.xdist_group("uninterrupted")  # on one worker, which trains the uninterrupted run once
def test_torchrun_resumes_by_itself_after_a_process_was_killed(make_args, tmp_path, uninterrupted_losses):
    args = make_args("killed", train__save_every=4, **LONGER)
    command = [*TORCHRUN_2, "--max-restarts", 3, SCRIPT, *args]
    job = start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        output = read_until(job, "step 6:")
        deadline = time.monotonic() + 30
        while not checkpoint.list_complete(tmp_path / "killed" / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.02)  # written in the background
        training_processes(job)[1].kill()
        output += job.communicate(timeout=90)[0]
    finally:
        end(job)
    assert job.returncode == 0 and "resumes from" in output and "warning: torchrun" not in output, output
    assert losses(tmp_path / "killed") == pytest.approx(uninterrupted_losses, rel=1e-5)


@pytest.mark.long
def test_two_nodes_with_one_process_each_train_like_one_node_with_two(make_args, tmp_path):
    port = free_port()
    nodes = []
    for rank in (0, 1):
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
        command = [
            TORCHRUN,
            "--nnodes",
            2,
            "--nproc-per-node",
            1,
            *rendezvous,
            SCRIPT,
            *make_args("two", train__steps=6),
        ]
        nodes.append(start(command))
    try:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        end(*nodes)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert run_together(2, SCRIPT, *make_args("one", train__steps=6)).returncode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.long
def test_deepspeed_starts_from_a_hostfile(make_args, tmp_path):
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    deepspeed, address = deepspeed_launcher(2)[0], ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    launcher = (deepspeed, "-q", "--hostfile", str(tmp_path / "hostfile"), "--no_ssh_check", *address)
    result = launch(SCRIPT, *make_args("hosts", train__steps=6), launcher=launcher)
    assert result.returncode == 0 and "2 processes" in result.stdout, result.stdout + result.stderr
    assert len(losses(tmp_path / "hosts")) == 6


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_signal_to_one_process_makes_all_save_and_the_launcher_succeed(make_args, launcher):
    launchers = {
        "deepspeed": deepspeed_launcher(2),
        "torchrun": (*TORCHRUN_2, "--max-restarts", 3),
    }
    job = start([*launchers[launcher], SCRIPT, *make_args("one", train__steps=100000)])
    try:
        output = read_until(job, "step 5:")
        training_processes(job)[1].terminate()
        output += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert job.returncode == 0 and output.count("and saved") == 1, output
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in output) == (launcher == "torchrun")


@pytest.mark.long
def test_a_terminated_torchrun_lets_its_processes_save_and_ends_with_status_1(make_args):
    command = [*TORCHRUN_2, "--max-restarts", 3, "--shutdown-timeout", 600]
    job = start([*command, SCRIPT, *make_args("terminated", train__steps=100000)])
    try:
        output = read_until(job, "step 5:")
        job.terminate()
        output += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert job.returncode == 1 and output.count("and saved") == 1 and output.count("parameters (") == 1, output
