"""The GPU kernels of attention are taken where a process of its own found them right; whatever else happens, torch's are.

What that process does with the kernels: test_triton.py.
"""

import json
import logging
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from xlpre.model.kernels.backend import resolve_backend
from xlpre.model.kernels.selfcheck import selfcheck

GPU = torch.device("cuda:1")
RIGHT = {"taken": True, "off_by": {"out": 0.001}}
WRONG = {"taken": False, "off_by": {"out": 1.0}, "why": "they are wrong"}


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """As on a machine that has one; returns what says what the trial does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(selfcheck.torch, "version", types.SimpleNamespace(cuda="13"))
    monkeypatch.setattr(selfcheck, "find_spec", lambda name: object())
    monkeypatch.setattr(selfcheck, "version", lambda name: "3")
    script = tmp_path / "python"

    def does(body):
        script.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/tried\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        forget()

    yield does
    forget()


def forget():
    selfcheck._verdict.cache_clear()


def says(verdict):
    return f"echo noise; echo '{json.dumps(verdict)}'"


def test_what_is_found_right_is_taken_and_not_tried_again(on_a_gpu, tmp_path, caplog):
    on_a_gpu(says(RIGHT))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert (tmp_path / "tried").read_text() == "-m xlpre.model.kernels.selfcheck.selfcheck cuda:1 bfloat16 64\n"
    on_a_gpu("exit 1")
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 128), "another width is another trial"
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (says(WRONG), "they are wrong"),
        ("echo Segmentation fault >&2; exit 139", "they failed .Segmentation fault."),
        ("kill -9 $$", "they failed .status -9."),
        ("echo {", "they failed .status 0."),
        ("exec sleep 60", "not done after 1 seconds"),
    ],
    ids=["wrong", "crash", "killed", "nonsense", "hang"],
)
def test_whatever_else_happens_torchs_are_and_it_is_said_why(on_a_gpu, monkeypatch, caplog, body, why):
    monkeypatch.setattr(selfcheck.tried, "__defaults__", (1.0,))
    on_a_gpu(body)
    assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert re.search(why, caplog.text), caplog.text


@pytest.mark.parametrize(
    ("first", "then"),
    [("echo CUDA out of memory >&2; exit 1", True), ("exec sleep 60", True), (says(WRONG), False)],
    ids=["memory", "time", "numbers"],
)
def test_only_what_was_found_of_numbers_and_speed_is_kept(on_a_gpu, monkeypatch, first, then):
    monkeypatch.setattr(selfcheck.tried, "__defaults__", (1.0,))
    on_a_gpu(first)
    assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    on_a_gpu(says(RIGHT))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64) == then


def test_auto_comes_to_one_name_on_a_gpu_that_all_processes_can_take(on_a_gpu):
    on_a_gpu(says(RIGHT))
    assert resolve_backend("auto", GPU, torch.bfloat16, 64) == "triton"
    assert resolve_backend("auto", GPU, torch.float64, 64) == "sdpa"
    assert resolve_backend("reference", GPU, torch.bfloat16, 64) == "reference"
    assert resolve_backend("auto", torch.device("cpu"), torch.float32, 64) == "auto"


def test_without_a_place_for_verdicts_it_is_tried_each_time(on_a_gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        on_a_gpu(says(RIGHT))
        assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert len((tmp_path / "tried").read_text().splitlines()) == 2


def test_a_damaged_verdict_is_found_anew(on_a_gpu, tmp_path):
    on_a_gpu(says(RIGHT))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    (file,) = (tmp_path / "cache" / "xlpre").iterdir()
    os.truncate(file, 5)
    forget()
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert json.loads(file.read_text()) == RIGHT


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 64), (torch.bfloat16, 512)])
def test_what_the_kernels_cannot_do_is_not_tried(on_a_gpu, tmp_path, dtype, width):
    on_a_gpu(says(RIGHT))
    assert not selfcheck.passes_selfcheck(GPU, dtype, width)
    assert not (tmp_path / "tried").exists()


def test_a_compiler_takes_the_answer_and_leaves_no_gap(monkeypatch):
    monkeypatch.setattr(selfcheck, "_possible", lambda *_: True)
    monkeypatch.setattr(selfcheck, "_verdict", lambda *_: subprocess.run(["true"], check=True).returncode == 0)

    def doubled_if_trusted(x):
        return x * 2 if selfcheck.passes_selfcheck(GPU, x.dtype, x.size(-1)) else x

    compiled = torch.compile(doubled_if_trusted, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
