import os
import signal

import pytest

from xlpre.training.stopping import Stopping


@pytest.mark.parametrize(("before", "heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_is_heard_but_not_under_nohup(before, heard):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, before)
        stopping = Stopping()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopping.asked == heard
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
