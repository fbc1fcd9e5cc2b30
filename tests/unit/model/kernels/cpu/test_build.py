"""Build of the CPU kernels: it survives damage, and without it torch's operators are used."""

import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.model.dropout import Dropout
from xlpre.model.kernels.backend import fastest_backend, load_backend
from xlpre.model.kernels.cpu import build
from xlpre.model.kernels.cpu.attention import CpuBackend
from xlpre.model.kernels.selfcheck.fixtures import (
    attention_case,
    random_attention_meta,
    random_attention_tensors,
    relative_error,
)

CPU = torch.device("cpu")
FAST_FLAGS = [*build.FLAGS, "-O0"]  # without optimization, compilation is fast
pytestmark = pytest.mark.xdist_group("build")  # on one worker, which compiles the library once


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache folder of the test, with nothing compiled or loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", FAST_FLAGS)
    forget()
    yield tmp_path / "xlpre"
    forget()


def forget():
    build.load_library.cache_clear()
    build.is_available.cache_clear()


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory):
    """A cache folder with the compiled library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(build, "FLAGS", FAST_FLAGS)
        forget()
        build.load_library()
        forget()
        return build.cache_dir()


@pytest.fixture
def full_cache(empty_cache, compiled_cache):
    """A cache folder of the test with the compiled library."""
    shutil.copytree(compiled_cache, empty_cache, dirs_exist_ok=True)
    return empty_cache


def fake_compiler(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiled_library_needs_no_compiler(full_cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    build.load_library()


@pytest.mark.parametrize("size", [100, 0.5])
def test_a_truncated_library_is_compiled_again(full_cache, size):
    (file,) = full_cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: int(size * len(content)) if isinstance(size, float) else size])
    build.load_library()
    assert file.read_bytes() == content


def test_without_a_writable_cache_a_temporary_folder_is_used(empty_cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fastest_backend(CPU, torch.float32, 8) == "cpu"


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_not_needed(empty_cache, monkeypatch, error):
    def fail(source, target):
        raise OSError(error, os.strerror(error), target)

    monkeypatch.setattr(build.shutil, "copyfile", fail)
    assert fastest_backend(CPU, torch.float32, 8) == "cpu"
    assert not list(empty_cache.iterdir())


def test_a_library_in_a_cache_that_allows_no_execution_is_loaded_from_a_temporary_folder(full_cache, monkeypatch):
    load = ctypes.CDLL

    def load_elsewhere(name):
        if name.startswith(str(full_cache)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(build.ctypes, "CDLL", load_elsewhere)
    assert fastest_backend(CPU, torch.float32, 8) == "cpu"


def test_if_the_first_compiler_fails_the_next_is_used(empty_cache, tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    fake_compiler(folder / "g++", "echo 'ld: cannot find -lgomp' >&2; exit 1")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CXX", raising=False)
    assert fastest_backend(CPU, torch.float32, 8) == "cpu"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/c++", "cannot be run (No such file or directory)"),
        (
            "echo 'kernels.cpp:1: error: no such header' >&2; exit 1",
            "cannot compile kernels.cpp (kernels.cpp:1: error: no such header)",
        ),
        (
            "echo 'ld: cannot find -lomp' >&2; echo 'collect2: error: ld returned 1 exit status' >&2; exit 1",
            "cannot compile kernels.cpp (ld: cannot find -lomp)",
        ),
        ("exit 1", "cannot compile kernels.cpp (no error message)"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "kernels.cpp cannot be written or loaded"),
    ],
    ids=["missing", "error", "linker error", "silent error", "no library"],
)
def test_without_a_working_compiler_torchs_operators_are_used_and_the_reason_is_logged_once(
    empty_cache, tmp_path, monkeypatch, caplog, compiler, reason
):
    monkeypatch.setenv("CXX", compiler if compiler.startswith("/") else fake_compiler(tmp_path / "c++", compiler))
    with caplog.at_level(logging.WARNING):
        model = make_model(attention_backend="auto", dropout=0.1, dropatt=0.1)
        model(random_batch(), random_memory(model.config, 2, 4))[0].backward()
    assert fastest_backend(CPU, torch.float32, 8) == "sdpa"
    assert (Dropout(0.5)(torch.ones(999)) == 0).any()
    (note,) = caplog.messages
    assert reason in note and "slower" in note
    with pytest.raises(ValueError, match=r"attention_backend=cpu .*compile.*model.attention_backend=auto"):
        load_backend("cpu")
    assert not list((empty_cache).glob("*.partial*"))


def bf16_attention():
    """Output and gradients of attention in bf16, by the CPU kernels."""
    torch.manual_seed(1)
    meta = random_attention_meta(2, 50, 11, 7, "cpu")
    case = attention_case(CpuBackend, meta, random_attention_tensors(meta, 3, 24, torch.bfloat16))
    return case.run(torch.randn_like(case.tensors["query"]))


@pytest.mark.parametrize("refused", ["amx", "avx512bf16"])
def test_with_a_compiler_that_refuses_instructions_for_bf16_others_are_used_and_agree(
    empty_cache, tmp_path, monkeypatch, refused
):
    if not any(refused in flag for flag in build._flag_choices()[0]):
        pytest.skip(f"this processor has no {refused}")
    expected = bf16_attention()
    refuse = f'case "$*" in *{refused}*) exit 1;; esac; exec {shutil.which("c++")} "$@"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "c++", refuse))
    forget()
    shutil.rmtree(empty_cache)
    assert fastest_backend(CPU, torch.bfloat16, 8) == "cpu"
    errors = relative_error(bf16_attention(), expected)
    assert max(errors.values()) < 0.02, errors
    assert len(list(empty_cache.glob("cpu-*.so"))) == 1


def test_without_any_compiler_the_error_names_what_was_searched(empty_cache, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.MissingLibraryError, match=r"g\+\+, c\+\+, clang\+\+.*CXX"):
        build.load_library()


COMPILE = """
import sys
from xlpre.model.kernels.cpu import build
build.FLAGS.append("-O0")
print("ready", flush=True)
sys.stdin.readline()
build.load_library()
"""


@pytest.mark.long
def test_two_processes_that_compile_at_once_leave_one_intact_library(empty_cache):
    command = [sys.executable, "-c", COMPILE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=REPOSITORY, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("start\n")
        process.stdin.flush()
    for process in processes:
        assert process.wait(120) == 0, process.stderr.read()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    (file,) = empty_cache.iterdir()
    build.Library(file)
