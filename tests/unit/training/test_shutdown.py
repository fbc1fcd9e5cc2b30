import os
import signal
import subprocess
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
    parent = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(parent.pid))
    shutdown = ShutdownHandler()
    time.sleep(0.2)
    assert not shutdown.is_requested
    parent.kill()
    if reaped:
        parent.wait()
    deadline = time.monotonic() + 30
    while not shutdown.is_requested and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.wait()
    assert shutdown.is_requested
