"""How threads wait is said before torch, which reads it once, is loaded; how many there are is the user's word, if there is one."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPOSITORY
from xlpre.training.distributed import use_device

WATCH = """
import os, sys
class Watch:
    def find_spec(name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Watch)
"""


COMMANDS = [str(file.relative_to(REPOSITORY)) for folder in ("pretrain", "finetune")
            for file in sorted((REPOSITORY / folder).glob("*.py")) if "run_main(main)" in file.read_text()]  # fmt: skip
INTERRUPTED = """
import runpy, sys
class Interrupt:
    def find_spec(name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
runpy.run_path("pretrain/fill.py", run_name="__main__")
"""


def said(module, **environment):
    """What is said when `module` loads torch; a path is run as a command."""
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    load = f"import runpy; runpy.run_path({module!r}, run_name='__main__')" if "/" in module else f"import {module}"
    done = subprocess.run(
        [sys.executable, "-c", WATCH + load],
        env=kept | environment, cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["pretrain.run", "finetune.run", "xlpre.training.deepspeed_engine", *COMMANDS])
def test_commands_say_how_often_a_thread_looks_before_it_sleeps(module):
    assert said(module) == "10000"


def test_an_interrupt_while_a_command_loads_torch_is_a_sentence():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr == "interrupted before it began\n" and done.returncode == -signal.SIGINT


def test_the_users_word_wins():
    assert said("pretrain.run", GOMP_SPINCOUNT="5") == "5"
    assert said("pretrain.run", OMP_WAIT_POLICY="ACTIVE") == "None"


@pytest.mark.parametrize(
    "cores, processes, said, threads",
    [
        (8, 1, None, 8),
        (8, 2, None, 4),
        (2, 4, None, 1),
        (8, 2, "3", 3),
        (8, 2, "64", 4),
        (8, 1, "0", 1),
        (8, 1, "many", 8),
    ],
)
def test_processes_share_the_cores_and_have_no_more_threads_than_the_user_says(
    cores, processes, said, threads, monkeypatch
):
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert use_device().type == "cpu" and found == [threads]
