"""Self-check of the GPU kernels: they are used only if a separate process finds them correct and fast.

The check itself is tested in triton/test_attention.py.
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
GOOD = {"passed": True, "errors": {"out": 0.001}}
WRONG = {"passed": False, "errors": {"out": 1.0}, "reason": "they are wrong"}


@pytest.fixture
def set_check(tmp_path, monkeypatch):
    """Simulates a machine with a GPU. Returns a function that sets the shell script that runs as the check."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(selfcheck.torch, "version", types.SimpleNamespace(cuda="13"))
    monkeypatch.setattr(selfcheck, "find_spec", lambda name: object())
    monkeypatch.setattr(selfcheck, "version", lambda name: "3")
    script = tmp_path / "python"

    def set_script(body):
        script.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/commands\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        selfcheck._passed.cache_clear()

    yield set_script
    selfcheck._passed.cache_clear()


def printing(result):
    return f"echo noise; echo '{json.dumps(result)}'"


def test_kernels_that_pass_are_used_and_not_checked_again(set_check, tmp_path, caplog):
    set_check(printing(GOOD))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert (tmp_path / "commands").read_text() == "-m xlpre.model.kernels.selfcheck.selfcheck cuda:1 bfloat16 64\n"
    set_check("exit 1")
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 128), "another head width is another check"
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (printing(WRONG), "they are wrong"),
        ("echo Segmentation fault >&2; exit 139", "they failed .Segmentation fault."),
        ("kill -9 $$", "they failed .exit status -9."),
        ("echo {", "they failed .exit status 0."),
        ("exec sleep 60", "within 1 seconds"),
    ],
    ids=["wrong", "crash", "killed", "nonsense", "hang"],
)
def test_kernels_that_fail_in_any_way_are_not_used_and_the_reason_is_logged(
    set_check, monkeypatch, caplog, body, reason
):
    if "sleep" in body:
        monkeypatch.setattr(selfcheck.run_selfcheck, "__defaults__", (1.0,))
    set_check(body)
    assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert re.search(reason, caplog.text), caplog.text


@pytest.mark.parametrize(
    ("first", "passes_later"),
    [("echo CUDA out of memory >&2; exit 1", True), ("exec sleep 60", True), (printing(WRONG), False)],
    ids=["memory", "time", "numbers"],
)
def test_only_results_about_numbers_and_speed_are_stored(set_check, monkeypatch, first, passes_later):
    with monkeypatch.context() as patch:
        if "sleep" in first:
            patch.setattr(selfcheck.run_selfcheck, "__defaults__", (1.0,))
        set_check(first)
        assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    set_check(printing(GOOD))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64) == passes_later


def test_auto_resolves_to_one_name_that_all_processes_can_use(set_check):
    set_check(printing(GOOD))
    assert resolve_backend("auto", GPU, torch.bfloat16, 64) == "triton"
    assert resolve_backend("auto", GPU, torch.float64, 64) == "sdpa"
    assert resolve_backend("reference", GPU, torch.bfloat16, 64) == "reference"


def test_without_a_cache_folder_the_check_runs_each_time(set_check, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        set_check(printing(GOOD))
        assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert len((tmp_path / "commands").read_text().splitlines()) == 2


def test_a_damaged_result_is_replaced(set_check, tmp_path):
    set_check(printing(GOOD))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    (file,) = (tmp_path / "cache" / "xlpre").iterdir()
    os.truncate(file, 5)
    selfcheck._passed.cache_clear()
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert json.loads(file.read_text()) == GOOD


@pytest.mark.parametrize(("dtype", "head_width"), [(torch.float64, 64), (torch.bfloat16, 512)])
def test_unsupported_dtypes_and_head_widths_are_not_checked(set_check, tmp_path, dtype, head_width):
    set_check(printing(GOOD))
    assert not selfcheck.passes_selfcheck(GPU, dtype, head_width)
    assert not (tmp_path / "commands").exists()


def test_torch_compile_takes_the_result_as_a_constant(monkeypatch):
    monkeypatch.setattr(selfcheck, "_can_run", lambda *_: True)
    monkeypatch.setattr(selfcheck, "_passed", lambda *_: subprocess.run(["true"], check=True).returncode == 0)

    def double_if_passed(x):
        return x * 2 if selfcheck.passes_selfcheck(GPU, x.dtype, x.size(-1)) else x

    compiled = torch.compile(double_if_passed, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
