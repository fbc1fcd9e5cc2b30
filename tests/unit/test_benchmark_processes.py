import subprocess
import sys

import psutil

from benchmarks.common.processes import kill_tree

SLEEP = "import time; time.sleep(60)"
START_CHILD = (
    f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); {SLEEP}"
)


def test_a_process_is_killed_with_its_children_even_if_one_of_them_has_ended(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended_child = psutil.Process(ended.pid)
    ended.wait()
    children = psutil.Process.children
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [ended_child, *children(self, recursive)])
    command = [sys.executable, "-c", START_CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        kill_tree(process)
        assert process.wait(10) == -9
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive or child.status() == psutil.STATUS_ZOMBIE  # a zombie if no process reads its status
