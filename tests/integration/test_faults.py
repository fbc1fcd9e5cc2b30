"""What goes wrong on real machines is said in a sentence, and loses nothing that was saved."""

import os
import signal
import subprocess

import psutil
import pytest
import safetensors.torch
import torch

from tests.integration.conftest import REPOSITORY, deepspeed_launcher, environment, run
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"


def processes_of(launcher) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children(recursive=True)
    words = {p: " ".join(p.cmdline()) for p in found}
    return [p for p, line in words.items() if "run.py" in line and "launcher" not in line]


def start_two(words, wait_for="step 5:"):
    command = [*deepspeed_launcher(2), str(REPOSITORY / SCRIPT), *words]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    said = []
    for line in launcher.stdout:
        said.append(line)
        if wait_for in line:
            return launcher, said
    raise AssertionError("".join(said))


def end(launcher):
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_process_that_hangs_or_dies_ends_the_job_in_bounded_time(words, tmp_path, number):
    run_words = words("lost", train__steps=100000, train__save_every=4, train__patience_minutes=0.2)
    launcher, said = start_two(run_words)
    try:
        other, victim = sorted(processes_of(launcher), key=lambda process: process.pid)
        victim.send_signal(number)
        psutil.wait_procs([other], timeout=60)  # a zombie counts as gone
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        if victim.is_running():
            victim.kill()
        said += launcher.stdout.read()
        assert launcher.wait(30) != 0
    finally:
        if launcher.poll() is None:
            end(launcher)
    if number == signal.SIGSTOP:
        assert "lost another" in "".join(said), "".join(said)[-2000:]
    again = run(SCRIPT, *run_words, "train.steps=6", launcher=deepspeed_launcher(2))
    assert "goes on from" in again.stdout, again.stdout + again.stderr


def test_weights_that_are_not_numbers_stop_the_run_with_a_sentence(words, tmp_path):
    assert run(SCRIPT, *words("first", train__steps=2)).returncode == 0
    file = tmp_path / "first" / "model" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["backbone.embedding.weight"][100:] = torch.nan
    safetensors.torch.save_file(weights, file)
    done = run(SCRIPT, *words("second", init=tmp_path / "first" / "model", train__max_skipped=5))
    assert done.returncode == 2 and "5 updates in a row, to step 5, were not finite" in done.stderr, done.stderr
    assert not (tmp_path / "second" / "checkpoints").exists()
    lines = [line for line in read_metrics(tmp_path / "second") if "skipped" in line]
    assert [line["skipped"] for line in lines] == [1, 2, 3, 4]
