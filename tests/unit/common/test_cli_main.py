import socket

import numpy as np
import pytest
import torch

from xlpre.common.cli_main import run_main
from xlpre.training.distributed import use_device


def ended(main, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(main)
    return end.value.code, capsys.readouterr().err


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "amount"),
    [
        (lambda: torch.empty(10**15), ", 4,000,000.00 GB more were asked for"),
        (lambda: torch.empty(10**18, 10**18), ""),
        (lambda: np.empty(10**15), ", 8,0"),
        (
            raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")),
            ", 2.68 GB more",
        ),
    ],
)
def test_too_little_memory_is_said_in_a_sentence(main, amount, capsys):
    status, said = ended(main, capsys)
    assert status == 2 and said.count("\n") == 1
    assert (
        said.startswith(f"error: process 0 has too little memory{amount}")
        and "train.activation_checkpointing=true" in said
    )


@pytest.mark.parametrize(("number", "way_out"), [(28, "make room there"), (13, "get the right"), (30, "another place")])
def test_what_the_system_refuses_is_said_with_a_way_out(number, way_out, capsys):
    status, said = ended(raising(OSError(number, "refused", "somewhere")), capsys)
    assert status == 2 and said.startswith(f"error: [Errno {number}] refused: 'somewhere'; ") and way_out in said


def test_a_port_that_is_taken_is_said_with_the_way_out(capsys, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        status, said = ended(lambda: torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True), capsys)
    assert status == 2 and said.splitlines()[-1].startswith(f"error: port {port} of this machine is taken")


@pytest.mark.parametrize(
    "message",
    [
        "[gloo] Connection closed by peer",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed",
        "socketProgress: Connection closed by remote peer node2<41234>",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_another_process_that_is_gone_is_status_3(capsys, message):
    status, said = ended(raising(torch.distributed.DistBackendError(message)), capsys)
    assert status == 3 and "lost another" in said


def test_a_process_without_a_gpu_says_so_itself(capsys, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, said = ended(use_device, capsys)
    assert status == 2 and said.startswith("error: LOCAL_RANK (1) must be below the number of GPUs that process")


def test_a_mistake_of_the_program_is_a_traceback():
    with pytest.raises(RuntimeError):
        run_main(raising(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(ValueError, match="invalid literal"):
        run_main(lambda: np.asarray(["a"]).astype(int))
