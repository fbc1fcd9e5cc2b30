import re
from types import SimpleNamespace

import pytest
import torch

from xlpre.training.config import TrainConfig
from xlpre.training.distributed import Comm
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.progress import Progress


class FakeWriter:
    """Stand-in for CheckpointWriter that records its calls."""

    def __init__(self, in_progress=False, is_writing=False):
        self.in_progress, self.is_writing, self.calls = in_progress, is_writing, []

    def advance(self):
        self.calls.append("advance")

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def make_progress():
    def make(writer=None, manifest=None, stop_requested=False, **train):
        groups = [{"lr_scale": 1.0}, {"lr_scale": 0.5}]
        engine = SimpleNamespace(skipped_steps=0, optimizer=SimpleNamespace(param_groups=groups))
        shutdown = SimpleNamespace(is_requested=stop_requested)
        return Progress(TrainConfig(**train), engine, Comm(), shutdown, writer or FakeWriter(), manifest or {})

    return make


def run_step(progress, skipped=False, **kwargs):
    progress.begin_step(0, ScheduleConfig(), 0.4)
    progress.engine.skipped_steps += skipped
    return progress.end_step(**kwargs)


def test_a_run_is_finished_after_its_steps(make_progress):
    progress = make_progress(steps=2)
    assert not run_step(progress) and not progress.is_finished
    assert not run_step(progress) and progress.is_finished and progress.step == 2


def test_a_run_is_finished_when_all_its_starts_together_have_used_up_the_hours(make_progress):
    manifest = {"step": 5, "train_seconds": 3599.0, "counters": {"skipped_steps": 1}}
    progress = make_progress(manifest=manifest, hours=1.0)
    assert (progress.step, progress.skipped_steps) == (5, 1) and not progress.is_finished
    progress = make_progress(manifest={**manifest, "train_seconds": 3600.0}, hours=1.0)
    run_step(progress)
    assert progress.is_finished and progress.step == 6


def test_a_time_budget_that_ends_in_the_warmup_is_reported(make_progress):
    manifest = {"step": 4, "train_seconds": 3600.0, "counters": {"skipped_steps": 0}}
    progress = make_progress(manifest=manifest, hours=1.0)
    run_step(progress)
    assert re.search(r"at step 5, .*Raise train.hours", progress.unfinished_warmup_warning(ScheduleConfig(5)))
    assert not progress.unfinished_warmup_warning(ScheduleConfig(4))
    progress = make_progress(manifest=manifest, hours=2.0)
    assert not progress.unfinished_warmup_warning(ScheduleConfig(5))


def test_the_clock_resumes_from_the_checkpoint(make_progress):
    progress = make_progress(manifest={"step": 5, "train_seconds": 100.0, "counters": {"skipped_steps": 0}})
    run_step(progress)
    assert progress.train_seconds > 100


def test_an_update_resets_the_count_of_consecutive_skips(make_progress):
    progress = make_progress(max_skipped_steps=3)
    counts = []
    for skipped in (True, True, False, True):
        run_step(progress, skipped)
        counts.append((progress.skipped_steps, progress.consecutive_skips))
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_too_many_skips_finish_the_checkpoint_and_raise_with_the_hint(make_progress):
    writer = FakeWriter()
    progress = make_progress(writer, max_skipped_steps=2)

    def on_too_many_skips():
        writer.calls.append("hint")
        return "Read this. "

    assert not run_step(progress, True, on_too_many_skips=on_too_many_skips)
    with pytest.raises(ValueError, match=r"2 steps in a row.* Read this. Lower optim.lr"):
        run_step(progress, True, on_too_many_skips=on_too_many_skips)
    assert writer.calls == ["finish", "hint"]


def test_a_checkpoint_advances_when_no_process_is_writing(make_progress):
    for writer, calls in [
        (FakeWriter(), []),
        (FakeWriter(in_progress=True, is_writing=True), []),
        (FakeWriter(in_progress=True, is_writing=False), ["advance"]),
    ]:
        run_step(make_progress(writer))
        assert writer.calls == calls


def test_a_signal_during_a_step_of_a_single_process_stops_at_its_end(make_progress):
    progress = make_progress()
    progress.begin_step(0, ScheduleConfig(), 0.4)
    progress.shutdown.is_requested = True
    assert progress.end_step()


def test_a_stop_request_is_returned_at_the_end_of_a_step(make_progress):
    assert run_step(make_progress(stop_requested=True)) and not run_step(make_progress())


def test_a_step_sets_its_learning_rate_and_its_dropout_seed(make_progress):
    manifest = {"step": 3, "train_seconds": 0.0, "counters": {"skipped_steps": 0}}
    draws = []
    for seed in (1, 1, 2):
        progress = make_progress(manifest=manifest, steps=10)
        progress.begin_step(seed, ScheduleConfig(warmup_steps=4), 0.4)
        draws.append(torch.rand(3).tolist())
    assert [group["lr"] for group in progress.engine.optimizer.param_groups] == pytest.approx([0.3, 0.15])
    assert draws[0] == draws[1] != draws[2]
