import subprocess
import sys

import psutil

from benchmarks.processes import kill

SLEEPING = "import time; time.sleep(60)"
STARTING = (
    f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEPING!r}]).pid, flush=True); {SLEEPING}"
)


def test_what_a_process_started_ends_with_it_though_some_of_it_is_gone_already(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    before = psutil.Process(gone.pid)
    gone.wait()
    listed = psutil.Process.children
    monkeypatch.setattr(psutil.Process, "children", lambda one, recursive: [before, *listed(one, recursive)])
    words = [sys.executable, "-c", STARTING]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        kill(process)
        assert process.wait(10) == -9
    _, living = psutil.wait_procs([child], timeout=10)
    assert not living or child.status() == psutil.STATUS_ZOMBIE  # one that nobody asks for its status stays as that
