"""Python scripts in processes forked from one that has loaded torch and DeepSpeed, which takes each fresh process many seconds."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

# what the commands load sooner or later; none of it starts a thread
LOADED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "omegaconf",
    "sentencepiece",
)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(list(LOADED))


def run_forked(
    command: Sequence[str],
    cwd: Path,
    variables: Sequence[Mapping[str, str]],
    timeout: float,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a script and its words once for each environment, at the same time; what all print and read is text.

    Args:
        command: the script and its words.
        cwd: where.
        variables: the environment of each process. The first one's decides what libraries read while they are loaded.
        timeout: in seconds, after which all are killed.
        given: what each reads from its standard input.

    Raises:
        subprocess.TimeoutExpired: not all ended in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "given").write_text(given)
        started = [SERVER.Process(target=_run, args=(command, cwd, each, folder)) for each in variables]
        with mock.patch.dict(os.environ, variables[0], clear=True):
            for process in started:
                process.start()
        for process in started:
            process.join(timeout)
        late = [process for process in started if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        said, complained = ((folder / name).read_text(errors="replace") for name in ("said", "complained"))
    if late:
        raise subprocess.TimeoutExpired(command, timeout, said, complained)
    status = next((process.exitcode for process in started if process.exitcode), 0)
    return subprocess.CompletedProcess(command, status, said, complained)


def _run(command: Sequence[str], cwd: Path, variables: Mapping[str, str], folder: Path) -> None:
    """In the new process: become `python *command`."""
    os.setsid()
    for descriptor, name, mode in ((0, "given", os.O_RDONLY), (1, "said", os.O_WRONLY), (2, "complained", os.O_WRONLY)):
        opened = os.open(folder / name, mode | (os.O_APPEND | os.O_CREAT if descriptor else 0))
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
