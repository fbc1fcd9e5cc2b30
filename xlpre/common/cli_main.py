"""Error handling of commands: a user error prints one line and exits with status 2, without a traceback."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from xlpre.common.errors import InputError
from xlpre.common.os_errors import error_number, is_out_of_memory, is_transient, remedy

# messages of gloo and NCCL when another process died or does not respond
LOST_PEER = (
    "Timed out waiting",
    "Connection closed by peer",
    "Connection reset by peer",
    "timed out after",
    "Watchdog caught",
    "connectFullMesh failed",
    "wait timeout after",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
    "closed by remote peer",
    "communicator was aborted",
    "failed to connect",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
)
BYTE_UNITS = ("bytes", "K", "M", "G", "T", "P")  # powers of 1024
PORT_IN_USE = "EADDRINUSE"


def run_main(main: Callable[[], None]) -> None:
    """Call `main` and turn expected errors into one line on stderr and an exit status.

    | error | exit status | printed by |
    | --- | --- | --- |
    | InputError | 2 | local rank 0 |
    | out of memory; permanent OSError, such as a full disk | 2 | each process that fails |
    | temporary OSError, port in use, lost connection to another process | 3 | each process that fails |
    | Ctrl-C | 130 | each process |

    All other errors propagate. Characters that stdout cannot encode are printed as escape sequences. The folder of the command is removed
    from the search path of modules, so that commands do not hide libraries of the same name, such as `evaluate`.
    """
    _remove_command_folder()
    warnings.formatwarning = _format_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except BrokenPipeError:  # the reader of stdout, `head` for instance, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError) as error:
        # an InputError is the same in all processes of a machine
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            advice = remedy(error_number(error)) if isinstance(error, OSError) else ""
            _print_error(f"{error}. {advice}" if advice else str(error))
        _exit(3 if is_transient(error) else 2)
    except (RuntimeError, MemoryError) as error:
        if (failure := _environment_failure(error)) is None:
            raise
        status, message = failure
        _print_error(message)
        _exit(status)
    except KeyboardInterrupt:
        print("Interrupted. Run the same command again.", file=sys.stderr)
        sys.exit(130)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of this project without its place in the code, and others as Python does."""
    packages = [Path(__file__).parents[2] / name for name in ("xlpre", "pretrain", "finetune")]
    if issubclass(category, UserWarning) and any(map(Path(filename).is_relative_to, packages)):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _remove_command_folder() -> None:
    """Remove the folder of the script from `sys.path`, where `python FOLDER/COMMAND.py` puts it first, if the folder is a package."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(program).resolve().parent if program else None
    if folder and (folder / "__init__.py").exists() and sys.path and Path(sys.path[0]).resolve() == folder:
        del sys.path[0]


def install_interrupt_handler(commands: Path) -> None:
    """Print one sentence instead of a traceback on Ctrl-C while a command in the folder `commands` imports its libraries.

    `run_main` handles Ctrl-C after the imports.
    """
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program and Path(program).resolve().parent == commands.resolve():
        sys.excepthook = _print_uncaught


@contextmanager
def immediate_interrupts() -> Iterator[None]:
    """Make Ctrl-C end the process even during a library call.

    Does nothing outside the main thread, or if another SIGINT handler is installed.
    """
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not has_default_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_error(message: str) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)


def _exit(status: int) -> NoReturn:
    if status == 3 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(status)  # gloo's threads can abort a normal exit (status -6)
    sys.exit(status)


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Interrupted before the command started.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _environment_failure(error: RuntimeError | MemoryError) -> tuple[int, str] | None:
    """Return the exit status and message of an error from lack of memory, a port in use or a lost process. None: another error."""
    text, rank = str(error), os.environ.get("RANK", "0")
    if is_out_of_memory(error):
        return 2, _out_of_memory(text)
    if PORT_IN_USE in text:
        port = os.environ.get("MASTER_PORT", "")
        return 3, (
            f"port {port} is in use on this machine, perhaps by another training run. Run the same command again, or pass another "
            "--master_port to the launcher."
        )
    if any(sign in text for sign in LOST_PEER):
        return 3, (
            f"process {rank} lost the connection to another process, which died or hangs: "
            f"{text.splitlines()[0][:120]}. Run the same command again to resume from the last checkpoint."
        )
    return None


def _out_of_memory(text: str) -> str:
    requested = ""
    if amount := re.search(r"allocate ([\d.]+) ([KMGTP]|bytes)", text):
        n_bytes = float(amount[1]) * 1024 ** BYTE_UNITS.index(amount[2])
        requested = f" when it requested {n_bytes / 1e9:,.2f} GB more"
    return (
        f"process {os.environ.get('RANK', '0')} ran out of memory{requested}. "
        "In training, lower train.micro_batch_size, eval.batch_size or mem_len (of model in pretraining, of data in fine-tuning), or set "
        "train.cuda_graphs=false (pretraining) or train.activation_checkpointing=true; in other commands, lower --batch-size. "
        "pretrain/plan.py predicts the memory of pretraining."
    )
