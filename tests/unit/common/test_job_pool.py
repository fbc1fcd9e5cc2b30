import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.conftest import REPOSITORY
from xlpre.common.job_pool import Command, run_all

CODE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
def visible_gpus(tmp_path, monkeypatch):
    """Return CUDA_VISIBLE_DEVICES of each command on a machine where it is `listed`."""

    def run(listed, n_gpus, jobs, processes):
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        commands = [Command(tmp_path / str(job), ["python", "-c", CODE], lambda: False) for job in range(2)]
        run_all(commands, jobs, processes)
        return {(command.folder / "log.txt").read_text().strip() for command in commands}

    return run


@pytest.mark.parametrize(
    ("listed", "n_gpus", "processes", "expected"),
    [
        ("", 2, 1, {"0", "1"}),
        ("4,5,6,7", 4, 2, {"4,5", "6,7"}),
        ("GPU-8f1c,MIG-77ab,GPU-9", 3, 1, {"GPU-8f1c", "MIG-77ab"}),
        ("3,2,-1,5", 2, 1, {"3", "2"}),  # CUDA ignores all entries after an invalid one
    ],
)
def test_each_command_gets_its_own_visible_gpus(visible_gpus, listed, n_gpus, processes, expected):
    assert visible_gpus(listed, n_gpus, 2, processes) == expected


def test_more_processes_than_gpus_are_refused(visible_gpus):
    with pytest.raises(
        ValueError, match=r"--jobs=2 is invalid: 2 runs of 2 processes need 4 GPUs, .* has 3. Set --jobs=1"
    ):
        visible_gpus("0,1,2", 3, 2, 2)
    with pytest.raises(ValueError, match=r"--processes=8 is invalid: .* this machine has 3. Set --processes=3 or less"):
        visible_gpus("0,1,2", 3, None, 8)


def test_a_command_that_a_stop_signal_kills_during_start_has_not_failed(tmp_path, capsys):
    code = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    run_all([Command(tmp_path / "one", ["python", "-c", code], lambda: False)], 1)
    assert "one: stopped" in capsys.readouterr().out


def test_processes_that_save_and_stop_under_torchrun_have_not_failed(tmp_path, capsys):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        f"if os.environ['RANK'] == '0': os.kill({os.getpid()}, signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", str(worker)]
    run_all([Command(tmp_path / "two", command, lambda: False)], 1, 1)
    assert "two: stopped" in capsys.readouterr().out and "saved" in (tmp_path / "two" / "log.txt").read_text()


def test_a_command_that_another_process_has_finished_is_not_started(tmp_path, capsys):
    result = tmp_path / "second" / "result"
    write = f"from pathlib import Path; Path({str(result.parent)!r}).mkdir(); Path({str(result)!r}).touch()"
    commands = [
        Command(tmp_path / "first", ["python", "-c", write], lambda: (tmp_path / "second").exists()),
        Command(tmp_path / "second", ["python", "-c", "raise SystemExit(1)"], result.exists),
        Command(tmp_path / "third", ["python", "-c", ""], lambda: False, needs=[tmp_path / "second"]),
    ]
    run_all(commands, 1)
    output = capsys.readouterr().out
    assert (
        "second: finished already" in output
        and "third: started" in output
        and not (tmp_path / "second/log.txt").exists()
    )


SLEEPERS = """
import sys
from pathlib import Path
from xlpre.common.job_pool import Command, run_all
code = "import time; print('here', flush=True); time.sleep(60)"
folder = Path(sys.argv[1])
short = Command(folder / "short", ["python", "-c", "import time; time.sleep(1)"], lambda: False)
run_all([short, *(Command(folder / str(n), ["python", "-c", code], lambda: False) for n in range(2))], 3)
"""


@pytest.mark.parametrize("fault", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, "closed output"])
def test_no_command_survives_the_job_pool(tmp_path, fault):
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS, str(tmp_path)], cwd=REPOSITORY,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    logs, deadline = [tmp_path / str(n) / "log.txt" for n in range(2)], time.monotonic() + 60
    assert b"3 runs" in parent.stdout.readline()
    assert all(b": started (" in parent.stdout.readline() for _ in range(3))
    if fault == "closed output":
        parent.stdout.close()
    while not all(log.exists() and log.stat().st_size for log in logs) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children()
    if fault != "closed output":
        parent.send_signal(fault)
    parent.wait(30)
    _, alive = psutil.wait_procs(children, 10)
    for child in alive:
        child.kill()
    assert children and not alive
