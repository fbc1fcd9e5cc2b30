"""Several machines, and launchers that start again by themselves; on one machine, with agents."""

import sys
import time
from pathlib import Path

import pytest

from tests.integration.clusters import LONGER, SCRIPT, end, losses, read_until, start, training_processes
from tests.integration.conftest import deepspeed_launcher, launch, run_together
from xlpre.training.distributed import free_port

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TWO = (TORCHRUN, "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
def test_torchrun_goes_on_by_itself_after_one_of_its_processes_was_killed(make_args, tmp_path, uninterrupted_losses):
    run_words = make_args("killed", train__save_every=4, **LONGER)
    command = [*TWO, "--max-restarts", 3, SCRIPT, *run_words]
    job = start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        said = read_until(job, "step 6:")
        training_processes(job)[1].kill()
        said += job.communicate(timeout=90)[0]
    finally:
        end(job)
    assert job.returncode == 0 and "goes on from" in said and "warning: torchrun" not in said, said
    assert losses(tmp_path / "killed") == pytest.approx(uninterrupted_losses, rel=1e-5)


@pytest.mark.long
def test_two_agents_of_one_process_each_train_as_one_machine_with_two(make_args, tmp_path):
    port = free_port()
    nodes = []
    for rank in (0, 1):
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
        command = [TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, *meeting, SCRIPT, *make_args("two", train__steps=6)]
        nodes.append(start(command))
    try:
        said = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        end(*nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert run_together(2, SCRIPT, *make_args("one", train__steps=6)).returncode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.long
def test_deepspeed_reads_a_file_of_hosts(make_args, tmp_path):
    (tmp_path / "machines").write_text("localhost slots=2\n")
    deepspeed, address = deepspeed_launcher(2)[0], ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    launcher = (deepspeed, "-q", "--hostfile", str(tmp_path / "machines"), "--no_ssh_check", *address)
    done = launch(SCRIPT, *make_args("hosts", train__steps=6), launcher=launcher)
    assert done.returncode == 0 and "2 process(es)" in done.stdout, done.stdout + done.stderr
    assert len(losses(tmp_path / "hosts")) == 6


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_signal_to_one_training_process_stops_all_of_them_saved_and_its_launcher_ends_well(make_args, launcher):
    launchers = {
        "deepspeed": deepspeed_launcher(2),
        "torchrun": (*TWO, "--max-restarts", 3),
    }
    job = start([*launchers[launcher], SCRIPT, *make_args("one", train__steps=100000)])
    try:
        said = read_until(job, "step 5:")
        training_processes(job)[1].terminate()
        said += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert job.returncode == 0 and said.count("and saved") == 1, said
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said) == (launcher == "torchrun")


@pytest.mark.long
def test_torchrun_asked_to_stop_lets_its_processes_save_and_ends_with_status_1(make_args):
    command = [*TWO, "--max-restarts", 3, "--shutdown-timeout", 600]
    job = start([*command, SCRIPT, *make_args("asked", train__steps=100000)])
    try:
        said = read_until(job, "step 5:")
        asked = time.monotonic()
        job.terminate()
        said += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert time.monotonic() - asked < 60
    assert job.returncode == 1 and said.count("and saved") == 1 and said.count("parameters (") == 1, said
