"""Environment variables for OpenMP are set before torch is imported, and the user's values are kept."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.unit.test_help import COMMANDS
from xlpre.training.distributed import Comm, use_device

PRINT_AT_TORCH_IMPORT = """
import os, sys
class Printer:
    def find_spec(name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Printer)
"""


INTERRUPTED = """
import runpy, sys
class Interrupt:
    def find_spec(name, *_):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
runpy.run_path("pretrain/run.py", run_name="__main__")
"""


def spin_count(module, **environment):
    """Return GOMP_SPINCOUNT at the time when `module` imports torch."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_AT_TORCH_IMPORT + f"import {module}"],
        env=inherited | environment, cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


TRAINERS = ["pretrain.trainer.trainer", "finetune.trainer.trainer", "xlpre.training.deepspeed_engine"]


@pytest.mark.parametrize("module", TRAINERS)
def test_the_spin_count_is_set_before_torch_is_imported(module):
    assert spin_count(module) == "10000"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_set_the_spin_count_and_import_torch_after_the_arguments_are_parsed(command):
    code = f"import os, runpy, sys; runpy.run_path({command!r}); print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=inherited, capture_output=True, text=True, check=True
    )
    assert done.stdout == "10000 False\n"


def test_ctrl_c_during_imports_prints_one_line():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr == "Interrupted before the command started.\n" and done.returncode == -signal.SIGINT


def test_values_of_the_user_are_kept():
    assert spin_count(TRAINERS[0], GOMP_SPINCOUNT="5") == "5"
    assert spin_count(TRAINERS[0], OMP_WAIT_POLICY="ACTIVE") == "None"


@pytest.mark.parametrize(
    "cores, processes, omp_num_threads, threads",
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
def test_processes_share_the_cores_up_to_omp_num_threads(cores, processes, omp_num_threads, threads, monkeypatch):
    set_to = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp_num_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    assert use_device().type == "cpu" and set_to == [threads]


def test_processes_with_cores_of_their_own_do_not_divide_them(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores_of_ranks, expected in (([{0, 1}, {2, 3}], 2), ([{0, 1, 2, 3}] * 2, 2), ([{0, 1}, {0, 1}, {2, 3}], 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores_of_ranks[0]: cores)
        monkeypatch.setattr(
            Comm, "all_gather", lambda self, mine, all_cores=cores_of_ranks: [(mine[0], sorted(x)) for x in all_cores]
        )
        Comm().divide_cores()
        assert set_to.pop() == expected
