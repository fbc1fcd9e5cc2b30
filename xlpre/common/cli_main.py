"""How a command ends: what its user got wrong is one sentence and exit status 2, not a traceback."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

OURS = ("xlpre", "pretrain", "finetune", "__main__")
# what gloo and NCCL say of a process that is gone or silent
LOST = (
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
)
UNITS = ("bytes", "K", "M", "G", "T", "P")  # powers of 1024
# what torch says where there is too little memory, on a processor and on a GPU, or a tensor is larger than any
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
# what to do where the operating system refuses
WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room there, and give the same command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; name another place, or get the right to this one"),
}
PORT_TAKEN = "EADDRINUSE"


def run_main(main: Callable[[], None]) -> None:
    """Call `main`; a ValueError of ours, or a lack of disk or rights, is printed as one line by one process of each machine.

    What a process lacks, memory or a device or a port or another process, is said by that one. A character that the terminal's encoding
    lacks is printed by its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except BrokenPipeError:  # who reads what is printed has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and frame.f_globals["__name__"].partition(".")[0] not in OURS:
            raise  # a library's: not a message for the user
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(
            error, OSError
        ):  # what a user wrote is the same for all
            sys.stdout.flush()
            way_out = WAYS_OUT.get(error.errno or 0, "") if isinstance(error, OSError) else ""
            print(f"error: {error}{way_out}", file=sys.stderr, flush=True)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if (lack := _lack(error)) is None:
            raise
        status, sentence = lack
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        sys.exit(status)
    except KeyboardInterrupt:
        print("interrupted; the same command begins again with what is not done", file=sys.stderr)
        sys.exit(130)


def install_interrupt_handler(commands: Path) -> None:
    """Say Ctrl-C in a sentence while a command, a file in the folder `commands`, loads its libraries; `run_main` hears it later."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program and Path(program).resolve().parent == commands.resolve():
        sys.excepthook = _uncaught


@contextmanager
def immediate_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process in the middle of a library's work; Python would hear of it when that is done, and throw it away."""
    as_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not as_usual or threading.current_thread() is not threading.main_thread():  # others decide, or may
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted before it began", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _lack(error: RuntimeError | MemoryError) -> tuple[int, str] | None:
    """Exit status and sentence, if what is wrong is not the program but what there is to run it."""
    said, process = str(error), os.environ.get("RANK", "0")
    if isinstance(error, MemoryError) or any(sign in said for sign in OUT_OF_MEMORY):
        return 2, _out_of_memory(said)
    if PORT_TAKEN in said:
        port = os.environ.get("MASTER_PORT", "")
        return (
            2,
            f"port {port} of this machine is taken, by another training perhaps; give the launcher another --master_port",
        )
    if any(sign in said for sign in LOST):
        return 3, (
            f"process {process} lost another ({said.splitlines()[0][:120]}); it died or hangs. "
            "The same command goes on from the last checkpoint"
        )
    return None


def _out_of_memory(said: str) -> str:
    """A sentence that has the amount, if it was said."""
    asked = ""
    if amount := re.search(r"allocate ([\d.]+) ([KMGTP]|bytes)", said):
        n_bytes = float(amount[1]) * 1024 ** UNITS.index(amount[2])
        asked = f", {n_bytes / 1e9:,.2f} GB more were asked for"
    return (
        f"process {os.environ.get('RANK', '0')} has too little memory{asked}; lower train.batch_size or model.mem_len, raise "
        "train.accumulation, or set train.activation_checkpointing=true (pretrain/plan.py says what a pretraining takes)"
    )
