"""Run Python scripts in processes forked from a server that has already imported torch and DeepSpeed.

Importing them takes every fresh process several seconds. A forked process does not read variables that its libraries
read at import, and it does not show circular imports or faults at start-up: tests of these start a fresh process.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
# Imported once by the server; none of them starts a thread.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "omegaconf",
    "sentencepiece",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
    "pretrain.run",
    "pretrain.trainer.trainer",
    "finetune.run",
    "finetune.trainer.trainer",
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(PRELOADED))


class ForkedCommand:
    """A running script, in one process for each environment.

    Args:
        command: script and arguments.
        cwd: working directory.
        environments: environment variables of each process. Those of the first decide what libraries read at import.
        stdin: text that each process reads from its standard input.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, environments: Sequence[Mapping[str, str]], stdin: str = ""
    ) -> None:
        self._command, self._temporary = command, tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        (self._folder / "stdin").write_text(stdin)
        self._processes = [
            CONTEXT.Process(target=_run, args=(command, cwd, environment, self._folder)) for environment in environments
        ]
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        server_environment = {**environments[0], "PYTHONPATH": path}
        with mock.patch.dict(os.environ, server_environment, clear=True):
            for process in self._processes:
                process.start()

    def stdout(self) -> str:
        """Return the output of all processes so far."""
        file = self._folder / "stdout"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Wait until the condition holds. Fail if all processes end, or `timeout` seconds pass before."""
        deadline = time.monotonic() + timeout
        while (
            not condition()
            and time.monotonic() < deadline
            and any(process.exitcode is None for process in self._processes)
        ):
            time.sleep(0.01)
        assert condition(), self.stdout()[-2000:]

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process."""
        os.kill(self._processes[0].pid, number)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for all processes; kill those that are still running after `timeout` seconds.

        Raises:
            subprocess.TimeoutExpired: a process had to be killed.
        """
        for process in self._processes:
            process.join(timeout)
        late = [process for process in self._processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        stdout, stderr = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        self._temporary.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self._command, timeout, stdout, stderr)
        status = next((process.exitcode for process in self._processes if process.exitcode), 0)
        return subprocess.CompletedProcess(self._command, status, stdout, stderr)


def _run(command: Sequence[str], cwd: Path, environment: Mapping[str, str], folder: Path) -> None:
    """Become `python *command` in the new process, with its standard streams in `folder`."""
    missing = [name for name in PRELOADED if name not in sys.modules]
    assert not missing, f"the fork server did not import {missing}: {_import_error(missing[0])}"
    assert threading.active_count() == 1, f"forked with threads: {threading.enumerate()}"
    for descriptor, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        opened = os.open(folder / name, mode | (os.O_APPEND | os.O_CREAT if descriptor else 0))
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return "no error now"
