"""A folder that one of the machines cannot see is refused on all of them."""

import os
import socket

import pytest

from tests.conftest import refused
from xlpre.training.distributed import check_shared_filesystem


class TwoMachines:
    """Collectives of a process, whose peer is on the machine `other` and sees the file of rank 0 or not."""

    def __init__(self, other, other_sees_it):
        self._other = (other, other_sees_it)

    def broadcast(self, value):
        return value

    def barrier(self):
        pass

    def all_gather(self, value):
        return [value, self._other]


def test_rank_0_removes_its_file_and_those_of_killed_runs(tmp_path):
    for name in (".seen_of_a_killed_run", "config.yaml"):
        (tmp_path / name).touch()
    check_shared_filesystem(tmp_path, TwoMachines("other", True))
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_machine_that_does_not_see_the_files_is_named_and_the_file_removed(tmp_path):
    with pytest.raises(ValueError, match="invalid: machine-7 cannot see the files that rank 0 writes there") as error:
        check_shared_filesystem(tmp_path, TwoMachines("machine-7", False))
    refused(error, "run_dir", tmp_path, "Set run_dir to a folder on a file system that all machines share")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("exists", [True, False])
def test_a_process_that_does_not_see_the_files_names_its_machine(tmp_path, monkeypatch, exists):
    monkeypatch.setenv("RANK", "1")
    folder = tmp_path if exists else tmp_path / "missing"
    with pytest.raises(ValueError, match=f"invalid: {socket.gethostname()} cannot see the files"):
        check_shared_filesystem(folder, TwoMachines("other", True), timeout_seconds=0)
