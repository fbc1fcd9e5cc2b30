"""Python scripts in processes forked from one that has loaded torch and DeepSpeed, which takes each fresh process seconds."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
# what the commands load sooner or later, which takes half a second of each; none of it starts a thread
LOADED = (
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
    "finetune.run",
)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(list(LOADED))


class Forked:
    """A script and its words, once for each environment, at the same time; what all print and read is text.

    Args:
        command: the script and its words.
        cwd: where.
        variables: the environment of each process. The first one's decides what libraries read while they are loaded.
        given: what each reads from its standard input.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, variables: Sequence[Mapping[str, str]], given: str = ""
    ) -> None:
        self._command, self._made = command, tempfile.TemporaryDirectory()
        self._folder = Path(self._made.name)
        (self._folder / "given").write_text(given)
        self._processes = [SERVER.Process(target=_run, args=(command, cwd, each, self._folder)) for each in variables]
        of_server = {**variables[0], "PYTHONPATH": str(REPOSITORY)}  # so that it loads these commands, and no others
        with mock.patch.dict(os.environ, of_server, clear=True):
            for process in self._processes:
                process.start()

    def said(self) -> str:
        """What they have printed so far."""
        file = self._folder / "said"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, sign: Callable[[], bool], timeout: float = 120) -> None:
        """Until there is a sign, or they have ended."""
        late = time.monotonic() + timeout
        while not sign() and time.monotonic() < late and any(process.exitcode is None for process in self._processes):
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """To the first of them."""
        os.kill(self._processes[0].pid, number)

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for all, so many seconds at most, after which they are killed.

        Raises:
            subprocess.TimeoutExpired: not all ended in time.
        """
        for process in self._processes:
            process.join(timeout)
        late = [process for process in self._processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        said, complained = ((self._folder / name).read_text(errors="replace") for name in ("said", "complained"))
        self._made.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self._command, timeout, said, complained)
        status = next((process.exitcode for process in self._processes if process.exitcode), 0)
        return subprocess.CompletedProcess(self._command, status, said, complained)


def _run(command: Sequence[str], cwd: Path, variables: Mapping[str, str], folder: Path) -> None:
    """In the new process: read and print in the folder."""
    for descriptor, name, mode in ((0, "given", os.O_RDONLY), (1, "said", os.O_WRONLY), (2, "complained", os.O_WRONLY)):
        opened = os.open(folder / name, mode | (os.O_APPEND | os.O_CREAT if descriptor else 0))
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    become(command, cwd, variables)


def become(command: Sequence[str], cwd: Path, variables: Mapping[str, str]) -> None:
    """In a new process: become `python *command`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
