"""A script of the repository whose own Python processes are forked from it instead of started anew: `forks.py SCRIPT WORDS...`.

They have loaded what it has. For scripts that run others side by side (xlpre/common/job_pool.py) or by DeepSpeed's launcher, in tests that
are about neither.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.forking import become
from xlpre.training.distributed import free_port

CONTEXT = multiprocessing.get_context("fork")
START = subprocess.Popen


class Fork:
    """Of subprocess.Popen, what the scripts use."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], outputs: Sequence[Any]) -> None:
        self._process = CONTEXT.Process(target=_run, args=(words, variables, outputs))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its status, once it has ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode


def start(command: Sequence[Any], **settings: Any) -> Any:
    """In place of subprocess.Popen, which is left what is no script of Python's, by itself or by DeepSpeed's launcher."""
    program, *words = map(str, command)
    launched = Path(program).name == "deepspeed"
    if Path(program).parent != Path(sys.executable).parent or not (launched or words[0].endswith(".py")):
        return START(command, **settings)
    outputs = [settings.get(name) for name in ("stdout", "stderr")]
    return Fork(["deepspeed"] * launched + words, settings.get("env") or os.environ.copy(), outputs)


def _run(words: Sequence[str], variables: Mapping[str, str], outputs: Sequence[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, output in enumerate(outputs, 1):
        if output is not None:
            os.dup2(output.fileno(), descriptor)
    if words[0] != "deepspeed":
        become(words, Path.cwd(), variables)
        return
    world_size = words[words.index("--num_gpus") + 1]
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    job = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = []
    for rank in map(str, range(int(world_size))):
        each = {**variables, **job, "RANK": rank, "LOCAL_RANK": rank}
        started.append(CONTEXT.Process(target=become, args=(words[script:], Path.cwd(), each)))
        started[-1].start()
    for process in started:
        process.join()
    sys.exit(next((process.exitcode for process in started if process.exitcode), 0))


if __name__ == "__main__":
    subprocess.Popen = start
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
