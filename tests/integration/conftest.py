"""Helpers that run the commands of the repository on a tiny store, in one process or several."""

import contextlib
import importlib
import io
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import REPOSITORY
from tests.integration.forking import ForkedCommand
from xlpre.common.cli_main import run_main
from xlpre.common.launcher import LAUNCHER_VARIABLES
from xlpre.training.distributed import free_port
from xlpre.training.metrics_writer import read_metrics

SETTINGS = {
    "data.seq_len": 32,
    "data.reuse_len": 16,
    "data.windows_per_run": 4,
    "model.n_layer": 2,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_inner": 32,
    "model.mem_len": 16,
    "model.dropout": 0.0,
    "model.dropatt": 0.0,
    "optim.lr": 0.01,
    "train.steps": 20,
    "train.global_batch_size": 4,
    "train.log_every": 1,
    "eval.every": 10,
    "eval.batch_size": 2,
    "eval.num_windows": 3,
}
PYTORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """Return environment variables for a process with one thread on the CPU. Variables of a launcher that runs the tests are removed."""
    launchers = {*PYTORCH_VARIABLES, *itertools.chain.from_iterable(LAUNCHER_VARIABLES)}
    inherited = {name: value for name, value in os.environ.items() if name not in launchers}
    binaries = str(Path(sys.executable).parent)
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads slow each other down many times on busy cores
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": binaries + os.pathsep + inherited["PATH"],
    }


def run(
    *args: object, cwd: Path = REPOSITORY, timeout: int = 300, fault: dict | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository to its end in one process. faulty.py injects the `fault`."""
    script, *rest = map(str, args)
    variables = environment() | {"FAULT": json.dumps(fault or {})}
    return ForkedCommand([str(REPOSITORY / script), *rest], cwd, [variables], stdin).wait(timeout)


def call(*args: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which is faster than starting one. It must not train."""
    script, *rest = map(str, args)
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    status, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *rest]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            run_main(module.main)
        except SystemExit as end:
            status = end.code or 0
    return subprocess.CompletedProcess([script, *rest], status, stdout.getvalue(), stderr.getvalue())


def start(*args: object) -> ForkedCommand:
    """Start a script of the repository in one process and return without waiting for it."""
    script, *rest = map(str, args)
    return ForkedCommand([str(REPOSITORY / script), *rest], REPOSITORY, [environment()])


def run_together(
    processes: int, *args: object, timeout: int = 600, fault: dict | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository to its end in processes that train together, as a launcher starts them."""
    script, *rest = map(str, args)
    shared = environment() | {
        "FAULT": json.dumps(fault or {}),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    environments = ranks if processes > 1 else [environment() | {"FAULT": shared["FAULT"]}]
    return ForkedCommand([str(REPOSITORY / script), *rest], REPOSITORY, environments).wait(timeout)


def launch(
    *args: object, launcher: tuple[str, ...], cwd: Path = REPOSITORY, timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository to its end under a launcher, in fresh processes."""
    script, *rest = map(str, args)
    command = [*launcher, str(REPOSITORY / script), *rest]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def damage(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # the file may be read-only
    file.write_bytes(content)


def read_steps(run_dir: Path) -> dict[int, tuple[float | None, ...]]:
    """Return loss, gradient norm, learning rate and next-sentence loss by step."""
    lines = [line for line in read_metrics(run_dir) if "loss" in line]
    return {x["step"]: (x["loss"], x["grad_norm"], x["lr"], x.get("next_sentence_loss")) for x in lines}


def largest_difference(steps: dict[int, tuple], expected: dict[int, tuple]) -> float:
    """Return the largest difference of the losses of two runs, as `read_steps` returns them."""
    assert steps.keys() == expected.keys()
    return max(abs(steps[step][0] - expected[step][0]) for step in expected)


def predictions_for(folder: Path, lines: list[str]) -> list[dict]:
    """Return the predictions of `finetune/predict.py` for lines of text."""
    result = run("finetune/predict.py", folder, stdin="\n".join(lines))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def deepspeed_launcher(processes: int) -> tuple[str, ...]:
    """Return the command line of `deepspeed` for a number of CPU processes, with a free port."""
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    return (deepspeed, "-q", "--num_gpus", str(processes), "--master_port", str(free_port()))


def tiny_args(store, folder: Path, name: str = "tiny", **changes: object) -> list[str]:
    """Return the `key=value` arguments of a tiny run in `folder`; `changes` override them (`__` stands for the dot)."""
    settings = {
        **SETTINGS,
        "name": name,
        "run_dir": folder / name,
        "data.store_dir": store.path,
        "tokenizer.path": store.path / "vocabulary.model",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def make_args(store, tmp_path):
    """A function that returns the arguments of a tiny run in `tmp_path`; see `tiny_args`."""
    return partial(tiny_args, store, tmp_path)


@pytest.fixture(scope="session")
def uninterrupted_losses(store, tmp_path_factory) -> dict[int, float]:
    """Losses by step of an uninterrupted run with the settings LONGER of clusters.py."""
    from tests.integration.clusters import LONGER, SCRIPT, losses  # not at the top, because that file imports this one

    folder = tmp_path_factory.mktemp("uninterrupted")
    result = run_together(2, SCRIPT, *tiny_args(store, folder, "uninterrupted", **LONGER))
    assert result.returncode == 0, result.stderr
    return losses(folder / "uninterrupted")
