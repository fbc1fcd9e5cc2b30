from types import SimpleNamespace

import pytest
import torch

from xlpre.training.deepspeed_engine import TrainConfig
from xlpre.training.distributed import Comm
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.progress import Progress


class Writer:
    """As CheckpointWriter is; `done` is what was asked of it."""

    def __init__(self, begun=False, writing=False):
        self.begun, self.writing, self.done = begun, writing, []

    def advance(self):
        self.done.append("advance")

    def finish(self):
        self.done.append("finish")


@pytest.fixture
def make():
    def made(writer=None, was=None, asked=False, **train):
        groups = [{"lr_scale": 1.0}, {"lr_scale": 0.5}]
        engine = SimpleNamespace(skipped_steps=0, optimizer=SimpleNamespace(param_groups=groups))
        stopping = SimpleNamespace(asked=asked)
        return Progress(TrainConfig(**train), engine, Comm(), stopping, writer or Writer(), was or {})

    return made


def update(course, skipped=False, **more):
    course.engine.skipped_steps += skipped
    return course.end_step(**more)


def test_it_is_finished_after_its_steps(make):
    course = make(steps=2)
    assert not update(course) and not course.finished
    assert not update(course) and course.finished and course.step == 2


def test_it_is_finished_when_its_hours_are_used_up_in_all_starts_together(make):
    was = {"step": 5, "train_seconds": 3599.0, "counters": {"skipped_steps": 1}}
    course = make(was=was, hours=1.0)
    assert (course.step, course.skipped) == (5, 1) and not course.finished
    course = make(was={**was, "train_seconds": 3600.0}, hours=1.0)
    update(course)
    assert course.finished and course.step == 6


def test_the_clock_goes_on_from_that_of_the_checkpoint(make):
    course = make(was={"step": 5, "train_seconds": 100.0, "counters": {"skipped_steps": 0}})
    update(course)
    assert 100 < course.seconds < 101


def test_skipped_updates_count_in_a_row_until_one_is_made(make):
    course = make(max_skipped=3)
    seen = []
    for skipped in (True, True, False, True):
        update(course, skipped)
        seen.append((course.skipped, course.skipped_in_a_row))
    assert seen == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_too_many_skipped_end_it_once_the_checkpoint_is_written_and_a_hint_is_there(make):
    writer = Writer()
    course = make(writer, max_skipped=2)

    def on_too_many_skips():
        writer.done.append("look back")
        return "read this; "

    assert not update(course, True, on_too_many_skips=on_too_many_skips)
    message = "2 updates in a row, to step 2, were not finite, and no update was made; read this; lower optim.lr"
    with pytest.raises(ValueError, match=message):
        update(course, True, on_too_many_skips=on_too_many_skips)
    assert writer.done == ["finish", "look back"]


def test_a_checkpoint_goes_on_when_nobody_writes_any_more(make):
    for writer, done in [(Writer(), []), (Writer(True, True), []), (Writer(True, False), ["advance"])]:
        update(make(writer))
        assert writer.done == done


def test_who_was_asked_to_stop_says_so_after_the_update(make):
    assert update(make(asked=True)) and not update(make())


def test_an_update_has_its_learning_rate_and_its_dropout(make):
    was = {"step": 3, "train_seconds": 0.0, "counters": {"skipped_steps": 0}}
    drawn = []
    for seed in (1, 1, 2):
        course = make(was=was, steps=10)
        course.begin_step(seed, ScheduleConfig(warmup_steps=4), 0.4)
        drawn.append(torch.rand(3).tolist())
    assert [group["lr"] for group in course.engine.optimizer.param_groups] == pytest.approx([0.3, 0.15])
    assert drawn[0] == drawn[1] != drawn[2]
