"""How the threads of a process wait."""

import subprocess
import sys

import pytest

from tests.integration.conftest import REPOSITORY, environment


@pytest.mark.parametrize("command", ["pretrain/run.py", "finetune/run.py"])
@pytest.mark.parametrize(("said", "spins"), [({}, False), ({"OMP_WAIT_POLICY": "ACTIVE"}, True)])
def test_threads_sleep_while_they_wait_unless_told_to_spin(command, said, spins):
    told = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"} | said
    done = subprocess.run(
        [sys.executable, REPOSITORY / command, "--help"],
        env={**told, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    counts = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not counts:
        pytest.skip("torch of this machine is not built with GNU's OpenMP")
    assert [int(count) > 0 for count in counts] == [spins] * len(counts)
