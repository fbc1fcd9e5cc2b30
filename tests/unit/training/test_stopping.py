import os
import signal
import subprocess
import time

import pytest

from xlpre.training.shutdown import PARENT_PID_VARIABLE, ShutdownHandler

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers():
    """What heard signals before is put back."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("before", "heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_is_heard_but_not_under_nohup(before, heard):
    signal.signal(signal.SIGHUP, before)
    stopping = ShutdownHandler()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stopping.asked == heard


@pytest.mark.parametrize("reaped", [True, False])
def test_the_end_of_the_process_that_had_it_started_is_heard(monkeypatch, reaped):
    starter = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(starter.pid))
    stopping = ShutdownHandler()
    time.sleep(0.2)
    assert not stopping.asked
    starter.kill()
    if reaped:
        starter.wait()
    until = time.monotonic() + 30
    while not stopping.asked and time.monotonic() < until:
        time.sleep(0.1)
    starter.wait()
    assert stopping.asked
