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
def seen(tmp_path, monkeypatch):
    """What each of so many commands sees, on a machine whose CUDA_VISIBLE_DEVICES is `listed`."""

    def run(listed, n_gpus, jobs, processes):
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        errands = [Command(tmp_path / str(job), ["python", "-c", CODE], lambda: False) for job in range(2)]
        run_all(errands, jobs, processes)
        return {(errand.folder / "log.txt").read_text().strip() for errand in errands}

    return run


@pytest.mark.parametrize(
    ("listed", "n_gpus", "processes", "expected"),
    [
        ("", 2, 1, {"0", "1"}),
        ("4,5,6,7", 4, 2, {"4,5", "6,7"}),
        ("GPU-8f1c,MIG-77ab,GPU-9", 3, 1, {"GPU-8f1c", "MIG-77ab"}),
        ("3,2,-1,5", 2, 1, {"3", "2"}),  # CUDA sees what stands before what there is not
    ],
)
def test_each_command_has_its_own_of_the_gpus_that_this_process_may_use(seen, listed, n_gpus, processes, expected):
    assert seen(listed, n_gpus, 2, processes) == expected


def test_more_processes_than_gpus_are_refused(seen):
    with pytest.raises(ValueError, match=r"--jobs \(2\) times 2 process\(es\) each .* number of GPUs \(3\)"):
        seen("0,1,2", 3, 2, 2)


def test_a_command_that_had_not_begun_when_it_was_asked_to_stop_did_not_fail(tmp_path, capsys):
    code = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    run_all([Command(tmp_path / "one", ["python", "-c", code], lambda: False)], 1)
    assert "one: stopped" in capsys.readouterr().out


SLEEPERS = """
import sys
from pathlib import Path
from xlpre.common.job_pool import Command, run_all
code = "import time; print('here', flush=True); time.sleep(60)"
folder = Path(sys.argv[1])
short = Command(folder / "short", ["python", "-c", "import time; time.sleep(1)"], lambda: False)
run_all([short, *(Command(folder / str(n), ["python", "-c", code], lambda: False) for n in range(2))], 3)
"""


@pytest.mark.parametrize("fault", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, "nobody reads"])
def test_however_it_ends_it_leaves_no_command_behind(tmp_path, fault):
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS, str(tmp_path)], cwd=REPOSITORY,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    logs, deadline = [tmp_path / str(n) / "log.txt" for n in range(2)], time.monotonic() + 60
    assert b"3 runs" in parent.stdout.readline()
    if fault == "nobody reads":
        parent.stdout.close()
    while not all(log.exists() and log.stat().st_size for log in logs) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children()
    if fault != "nobody reads":
        parent.send_signal(fault)
    parent.wait(30)
    _, left = psutil.wait_procs(children, 10)
    for child in left:
        child.kill()
    assert children and not left
