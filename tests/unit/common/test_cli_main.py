import errno
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY
from xlpre.common.cli_main import run_main
from xlpre.training.distributed import use_device


def exit_of(main, capsys):
    """Return the exit status and stderr of a command."""
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
        (lambda: torch.empty(10**15), " when it requested 4,000,000.00 GB more"),
        (lambda: torch.empty(10**18, 10**18), ""),
        (lambda: np.empty(10**15), " when it requested 8,0"),
        (
            raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")),
            " when it requested 2.68 GB more",
        ),
    ],
)
def test_out_of_memory_is_one_line_with_the_amount_and_remedies(main, amount, capsys):
    status, message = exit_of(main, capsys)
    assert status == 2 and message.count("\n") == 1
    assert message.startswith(f"error: process 0 ran out of memory{amount}")
    assert "train.micro_batch_size" in message and "train.activation_checkpointing=true" in message


@pytest.mark.parametrize(("number", "remedy"), [(28, "Free disk space"), (13, "permission"), (30, "another path")])
def test_an_error_of_the_system_has_a_remedy(number, remedy, capsys):
    status, message = exit_of(raising(OSError(number, "refused", "somewhere")), capsys)
    assert status == 2 and message.startswith(f"error: [Errno {number}] refused: 'somewhere'. ") and remedy in message


PERMANENT = ("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "EFBIG")
TRANSIENT = ("EIO", "ESTALE", "ETIMEDOUT", "ENETUNREACH", "EHOSTUNREACH", "EMFILE", "ECONNRESET", "EADDRINUSE")


@pytest.mark.parametrize(("names", "expected"), [(PERMANENT, 2), (TRANSIENT, 3)])
def test_only_an_error_that_may_pass_has_the_status_that_scripts_retry(names, expected, capsys):
    for name in names:
        number = getattr(errno, name)
        status, message = exit_of(raising(OSError(number, os.strerror(number), "somewhere")), capsys)
        assert (status, message.count("\n")) == (expected, 1), name
        assert ("This error may be temporary: run the same command again." in message) == (expected == 3), name


def test_the_error_number_of_a_library_written_in_rust_is_recognized(capsys):
    assert exit_of(raising(OSError("Stale file handle (os error 116)")), capsys)[0] == 3
    assert exit_of(raising(OSError("No space left on device (os error 28)")), capsys)[0] == 2


def test_a_port_in_use_is_one_line_with_a_remedy(capsys, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        status, message = exit_of(lambda: torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True), capsys)
    assert status == 3 and message.splitlines()[-1].startswith(f"error: port {port} is in use")


@pytest.mark.parametrize(
    "message",
    [
        "[gloo] Connection closed by peer",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed",
        "socketProgress: Connection closed by remote peer node2<41234>",
        "NCCL communicator was aborted on rank 0.",
        "The client socket has failed to connect to any network address of (node1, 29500).",
        "Gloo connectFullMesh: Connect error, remote=[10.0.0.2]:1234: Connection refused",
    ],
)
def test_a_lost_process_is_exit_status_3(capsys, message):
    status, printed = exit_of(raising(torch.distributed.DistBackendError(message)), capsys)
    assert status == 3 and "lost the connection to another process" in printed


def test_a_process_without_a_gpu_reports_it_itself(capsys, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, message = exit_of(use_device, capsys)
    assert status == 2 and message.startswith("error: LOCAL_RANK")


def test_an_unexpected_error_is_raised_with_its_traceback():
    with pytest.raises(RuntimeError):
        run_main(raising(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: int("1_backup"),
        lambda: np.asarray(["a"]).astype(int),
        lambda: np.concatenate([]),
        lambda: list(zip([1], [], strict=True)),
        lambda: json.loads("{"),
    ],
)
def test_an_error_of_a_built_in_function_or_library_is_raised_with_its_traceback(mistake, monkeypatch):
    monkeypatch.setitem(mistake.__globals__, "__name__", "pretrain.run")
    with pytest.raises(ValueError):
        run_main(mistake)


@pytest.mark.parametrize(
    "command", ["pretrain/evaluate.py MODEL TEXT", "pretrain/fill.py MODEL TEXT", "finetune/predict.py MODEL"]
)
def test_a_command_does_not_hide_a_library_of_the_same_name(command, tmp_path):
    """`python pretrain/COMMAND.py` puts pretrain/ first on the search path, where evaluate.py would hide the library `evaluate`."""
    (tmp_path / "evaluate.py").write_text("")
    stub = "import evaluate, sys\nprint(evaluate.__file__, *sys.path[:2], sep='\\n')\nsys.exit(0)"
    (tmp_path / "torch.py").write_text(stub)  # every command imports torch in `main`
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    program, *arguments = command.split()
    argv = [sys.executable, str(REPOSITORY / program), *arguments]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.stdout.splitlines() == [str(tmp_path / "evaluate.py"), str(tmp_path), str(REPOSITORY)], result.stderr


def test_a_folder_that_is_no_package_stays_on_the_search_path(tmp_path):
    (tmp_path / "helper.py").write_text("print('found')")
    script = tmp_path / "script.py"
    script.write_text("from xlpre.common.cli_main import run_main\ndef main():\n    import helper\nrun_main(main)\n")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "found\n", result.stderr
