import os
import signal
import subprocess
import sys
import time

import pytest

from xlpre.training.shutdown import PARENT_PID_VARIABLE, ShutdownHandler

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def restore_handlers():
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("handler", "is_requested"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_requests_a_stop_but_not_under_nohup(handler, is_requested):
    signal.signal(signal.SIGHUP, handler)
    shutdown = ShutdownHandler()
    os.kill(os.getpid(), signal.SIGHUP)
    assert shutdown.is_requested == is_requested


@pytest.mark.parametrize("reaped", [True, False])
def test_the_end_of_the_parent_process_requests_a_stop(monkeypatch, reaped):
    with subprocess.Popen(["sleep", "600"]) as parent:
        try:
            monkeypatch.setenv(PARENT_PID_VARIABLE, str(parent.pid))
            shutdown = ShutdownHandler()
            time.sleep(0.2)
            assert not shutdown.is_requested
        finally:
            parent.kill()
        if reaped:
            parent.wait()
        deadline = time.monotonic() + 30
        while not shutdown.is_requested and time.monotonic() < deadline:
            time.sleep(0.1)
        assert shutdown.is_requested


WAITS_FOR_ANOTHER_PROCESS = """
import sys, threading, time
from xlpre.training import shutdown
shutdown.SAME_INTERRUPT_SECONDS = float(sys.argv[1])
handler = shutdown.ShutdownHandler()
print("ready", flush=True)
if sys.argv[2] == "collective":  # no signal handler is called in it
    import ctypes
    ctypes.CDLL(None).sleep(600)
    while True: ctypes.CDLL(None).pause()
deadline = time.monotonic() + 600
while not handler.is_requested: time.sleep(0.01)
time.sleep(0.5)
print("saved", flush=True)
"""


def interrupt(seconds, activity):
    """Start a process, send two interrupts, and return its exit status and output."""
    command = [sys.executable, "-c", WAITS_FOR_ANOTHER_PROCESS, str(seconds), activity]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            warning = "Stopping after this step. Press Ctrl-C again to abort without saving.\n"
            assert process.stderr.readline() == warning
            process.send_signal(signal.SIGINT)
            output, message = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, output + message


def test_a_second_interrupt_ends_a_process_that_waits_for_another_one():
    status, output = interrupt(0, "collective")
    assert status == 130 and output == "Aborted. The same command resumes from the last checkpoint.\n"


def test_an_interrupt_that_a_launcher_passes_on_does_not_count_as_a_second_one():
    assert interrupt(60, "training") == (0, "saved\n")
