"""Compiled code: there whatever happens to it, and where it cannot be had, torch's takes its place."""

import logging
import os

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.model.dropout import Dropout
from xlpre.model.kernels.backend import backend_named, fastest
from xlpre.model.kernels.cpu import build
from xlpre.model.kernels.cpu.attention import Cpu
from xlpre.model.kernels.sdpa import Sdpa
from xlpre.model.memory import initial_memory


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A home of its own, where nothing has been compiled or loaded; compiled code is slow, but soon there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-O0"])
    forget()
    yield tmp_path / "xlpre"
    forget()


def forget():
    build.library.cache_clear()
    build.is_there.cache_clear()


def fake_compiler(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once_and_then_needs_no_compiler(empty_cache, monkeypatch):
    build.library()
    forget()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    build.library()


@pytest.mark.parametrize("kept", [100, 0.5])
def test_a_damaged_file_is_compiled_anew(empty_cache, kept):
    build.library()
    (file,) = empty_cache.iterdir()
    whole = file.read_bytes()
    file.unlink()  # what is loaded stays as it is
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    build.library.cache_clear()
    build.library()
    assert file.read_bytes() == whole


def test_where_nothing_can_be_written_it_is_compiled_elsewhere(empty_cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(fastest(torch.device("cpu"), torch.float32, 8), Cpu)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/nowhere/c++", "cannot be run (No such file or directory)"),
        (
            "echo 'cpu.cpp:1: error: no such header' >&2; exit 1",
            "cannot compile cpu.cpp (cpu.cpp:1: error: no such header)",
        ),
        ("exit 1", "cannot compile cpu.cpp (it says nothing)"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "cpu.cpp, compiled, cannot be loaded"),
    ],
)
def test_without_a_compiler_that_can_torch_takes_over_and_why_is_said_once(
    empty_cache, tmp_path, monkeypatch, caplog, compiler, said
):
    monkeypatch.setenv("CXX", compiler if compiler.startswith("/") else fake_compiler(tmp_path / "c++", compiler))
    batch = random_batch()
    with caplog.at_level(logging.WARNING):
        model = make_model(attention_backend="auto", dropout=0.1, dropatt=0.1)
        model(batch, random_memory(model.config, 2, 4))[0].backward()
    assert isinstance(fastest(torch.device("cpu"), torch.float32, 8), Sdpa)
    assert (Dropout(0.5)(torch.ones(999)) == 0).any()
    (note,) = caplog.messages
    assert said in note and note.endswith("attention, GELU and dropout take torch's, which is slower")
    with pytest.raises(
        ValueError, match="model.attention_backend=cpu needs its compiled code: .*; or set model.attention_backend=auto"
    ):
        backend_named("cpu")
    assert not list((empty_cache).glob("*.partial*"))


def test_no_compiler_at_all(empty_cache, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.MissingError, match="there is no C\\+\\+ compiler"):
        build.library()


def test_a_type_that_it_does_not_compute_is_refused():
    model = make_model(attention_backend="cpu").bfloat16()
    memory = initial_memory(model.config, 2, mem_len=4, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match="computes fp32 on a processor, not torch.bfloat16 on cpu; set model.attention_backend=auto"
    ):
        model(random_batch(), memory)
