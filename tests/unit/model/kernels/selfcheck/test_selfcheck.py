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

from xlpre.model.kernels.backend import resolve_backend, run_needed_selfchecks
from xlpre.model.kernels.selfcheck import selfcheck
from xlpre.training import startup
from xlpre.training.config import OptimConfig, TrainConfig

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
        selfcheck._results.clear()

    yield set_script
    selfcheck._results.clear()


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
        monkeypatch.setattr(selfcheck, "MAX_SECONDS", 1.0)
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
            patch.setattr(selfcheck, "MAX_SECONDS", 1.0)
        set_check(first)
        assert not selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    set_check(printing(GOOD))
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64) == passes_later


def test_auto_resolves_to_one_name_that_all_processes_can_use(set_check):
    set_check(printing(GOOD))
    assert resolve_backend("auto", GPU, torch.bfloat16, 64) == "triton"
    assert resolve_backend("auto", GPU, torch.float64, 64) == "sdpa"
    assert resolve_backend("reference", GPU, torch.bfloat16, 64) == "reference"


@pytest.mark.parametrize(("minutes", "seconds"), [(20, 300), (2, 60)])
def test_training_checks_the_kernels_before_it_uses_the_gpu_and_while_other_processes_still_wait(
    set_check, monkeypatch, minutes, seconds
):
    set_check(printing(GOOD))
    for name, value in {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    events = []
    run_selfcheck = selfcheck.run_selfcheck
    monkeypatch.setattr(selfcheck, "run_selfcheck", lambda *a: events.append(("check", *a)) or run_selfcheck(*a))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(("use", device)))
    monkeypatch.setattr(startup, "init_process_group", lambda device: events.append(("join", device)))
    monkeypatch.setattr(startup, "Comm", lambda: None)
    monkeypatch.setattr(startup, "set_timeout", lambda minutes: None)
    monkeypatch.setattr(startup, "build_deepspeed_config", lambda *args: {})
    train = TrainConfig(global_batch_size=2, micro_batch_size=1, timeout_minutes=minutes)

    def check(device, dtype, timeout_seconds):
        run_needed_selfchecks("auto", 64, device, [dtype], timeout_seconds)

    context = startup.start_training(train, OptimConfig(), {}, check)
    assert events == [("check", "cuda:1", torch.bfloat16, 64, seconds), ("use", GPU), ("join", GPU)]
    assert resolve_backend("auto", context.device, context.dtype, 64) == "triton"
    assert len(events) == 3, "the result is remembered"
    monkeypatch.setenv("RANK", "1")
    selfcheck._results.clear()
    startup.start_training(train, OptimConfig(), {}, check)
    assert [name for name, *_ in events[3:]] == ["use", "join"], "rank 0 checks for all"


def test_checks_of_several_dtypes_share_the_time_and_only_auto_needs_them(set_check, tmp_path, monkeypatch):
    set_check(printing(GOOD))
    limits = []
    run_selfcheck = selfcheck.run_selfcheck
    monkeypatch.setattr(selfcheck, "run_selfcheck", lambda *a: limits.append(a[-1]) or run_selfcheck(*a))
    run_needed_selfchecks("sdpa", 64, GPU, [torch.bfloat16], 60)
    run_needed_selfchecks("auto", 64, torch.device("cpu"), [torch.bfloat16], 60)
    assert limits == []
    run_needed_selfchecks("auto", 64, GPU, [torch.bfloat16, torch.float32], 60)
    assert limits == [30, 30]


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
    selfcheck._results.clear()
    assert selfcheck.passes_selfcheck(GPU, torch.bfloat16, 64)
    assert json.loads(file.read_text()) == GOOD


@pytest.mark.parametrize(("dtype", "head_width"), [(torch.float64, 64), (torch.bfloat16, 512)])
def test_unsupported_dtypes_and_head_widths_are_not_checked(set_check, tmp_path, dtype, head_width):
    set_check(printing(GOOD))
    assert not selfcheck.passes_selfcheck(GPU, dtype, head_width)
    assert not (tmp_path / "commands").exists()


def test_torch_compile_takes_the_result_as_a_constant(monkeypatch):
    monkeypatch.setattr(selfcheck, "_can_run", lambda *_: True)
    monkeypatch.setattr(selfcheck, "_check_once", lambda *_: subprocess.run(["true"], check=True).returncode == 0)

    def double_if_passed(x):
        return x * 2 if selfcheck.passes_selfcheck(GPU, x.dtype, x.size(-1)) else x

    compiled = torch.compile(double_if_passed, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
