"""Real commands on a tiny store, each in a process of its own, or several."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.integration.forking import Forked
from xlpre.training.distributed import free_port

SHAPE = {
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


def environment() -> dict[str, str]:
    """One thread a process, and no job of a surrounding launcher."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    binaries = str(Path(sys.executable).parent)
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait slow each other down many times on busy cores
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": binaries + os.pathsep + kept["PATH"],
    }


def run(*words: object, cwd: Path = REPOSITORY, timeout: int = 300, fault: dict | None = None, given: str = ""):
    """Run a script of the repository to its end; `tests/integration/faulty.py` with a `fault`. It reads what is `given`."""
    script, *rest = map(str, words)
    variables = environment() | {"FAULT": json.dumps(fault or {})}
    return Forked([str(REPOSITORY / script), *rest], cwd, [variables], given).end(timeout)


def begin(*words: object) -> Forked:
    """A script of the repository that goes on."""
    script, *rest = map(str, words)
    return Forked([str(REPOSITORY / script), *rest], REPOSITORY, [environment()])


def run_with_forks(*words: object, cwd: Path = REPOSITORY):
    """Run a script of the repository to its end, whose own Python processes are forked too."""
    script, *rest = words
    return run("tests/integration/forks.py", REPOSITORY / str(script), *rest, cwd=cwd)


def run_together(processes: int, *words: object, timeout: int = 600, fault: dict | None = None):
    """Run a script of the repository in processes that train together, as a launcher starts them."""
    script, *rest = map(str, words)
    shared = environment() | {
        "FAULT": json.dumps(fault or {}),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return Forked([str(REPOSITORY / script), *rest], REPOSITORY, each if processes > 1 else [environment()]).end(
        timeout
    )


def launch(*words: object, launcher: tuple[str, ...], cwd: Path = REPOSITORY, timeout: int = 300):
    """Run a script of the repository to its end by a launcher."""
    script, *rest = map(str, words)
    command = [*launcher, str(REPOSITORY / script), *rest]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def damage(file: Path) -> None:
    """Change a bit."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # it is read-only
    file.write_bytes(content)


def answers_of(folder: Path, lines: list[str]) -> list[dict]:
    """What `finetune/predict.py` answers to lines, with the model of a run."""
    asked = run("finetune/predict.py", folder, given="\n".join(lines))
    assert asked.returncode == 0, asked.stderr
    return [json.loads(line) for line in asked.stdout.splitlines()]


def deepspeed_launcher(processes: int) -> tuple[str, ...]:
    """`deepspeed` for so many CPU processes, on a free port."""
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    return (deepspeed, "-q", "--num_gpus", str(processes), "--master_port", str(free_port()))


def tiny_words(store, folder: Path, name: str = "tiny", **changes: object) -> list[str]:
    """`key=value` words of a tiny run in `folder`; keyword arguments change them (with __ for the dot)."""
    settings = {
        **SHAPE,
        "name": name,
        "run_dir": folder / name,
        "data.store_dir": store.path,
        "tokenizer.path": store.path / "vocabulary.model",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def words(store, tmp_path):
    """`tiny_words` of a run in `tmp_path`."""
    return partial(tiny_words, store, tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(store, tmp_path_factory) -> dict[int, float]:
    """The losses of a run of clusters.LONGER that nothing happens to."""
    from tests.integration.clusters import LONGER, SCRIPT, losses  # which is made of this file

    folder = tmp_path_factory.mktemp("whole")
    done = run_together(2, SCRIPT, *tiny_words(store, folder, "whole", **LONGER))
    assert done.returncode == 0, done.stderr
    return losses(folder / "whole")
