import pytest

from pretrain.config import PretrainTrainConfig
from xlpre.training.batch_schedule import BatchSchedule, split_batch


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "expected"),
    [
        (8, None, 1, (8, 1)),
        (8, None, 2, (4, 1)),
        (8, 2, 1, (2, 4)),
        (8, 2, 2, (2, 2)),
        (8, 2, 4, (2, 1)),
        (8, 8, 1, (8, 1)),
    ],
)
def test_accumulation_follows_from_batch_sizes_and_processes(global_batch_size, micro_batch_size, world_size, expected):
    assert split_batch(global_batch_size, micro_batch_size, world_size) == expected
    schedule = PretrainTrainConfig(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
    ).batch_schedule(world_size)
    assert schedule == BatchSchedule(world_size, *expected)
    assert schedule.rows(0) == global_batch_size


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "message"),
    [
        (8, None, 3, r"train.global_batch_size=8 is invalid: .* processes. Set train.global_batch_size=6 or 9,"),
        (8, 2, 3, r"train.global_batch_size=8 is invalid: .* Set train.global_batch_size=6 or 12,"),
        (1, None, 2, r"train.global_batch_size=1 is invalid: .* Set train.global_batch_size=2,"),
        (
            24,
            5,
            2,
            r"train.micro_batch_size=5 is invalid: .* 12 rows .* Set train.micro_batch_size=4 or 6, or .*=20 or 30.",
        ),
        (
            8,
            16,
            1,
            r"train.micro_batch_size=16 is invalid: .* Set train.micro_batch_size=8, or train.global_batch_size=16.",
        ),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_with_the_nearest_sizes(
    global_batch_size, micro_batch_size, world_size, message
):
    with pytest.raises(ValueError, match=message):
        split_batch(global_batch_size, micro_batch_size, world_size)


def test_micro_steps_rise_to_the_accumulation_during_the_warmup():
    schedule = PretrainTrainConfig(global_batch_size=16, micro_batch_size=2, batch_warmup_steps=6).batch_schedule(2)
    assert [schedule.micro_steps(step) for step in range(8)] == [1, 1, 2, 3, 3, 4, 4, 4]
    assert [schedule.rows(step) for step in range(8)] == [4, 4, 8, 12, 12, 16, 16, 16]
    for n_steps in range(9):
        assert schedule.total_rows(n_steps) == sum(schedule.rows(step) for step in range(n_steps))


def test_the_warmup_on_more_processes_reads_the_same_rows_with_smaller_micro_batches():
    config = PretrainTrainConfig(global_batch_size=24, micro_batch_size=6, batch_warmup_steps=6)
    schedules = {world_size: config.batch_schedule(world_size) for world_size in (2, 4)}
    assert {n: (x.micro_batch_size, x.accumulation) for n, x in schedules.items()} == {2: (6, 2), 4: (3, 2)}
    assert all(schedules[2].rows(step) == schedules[4].rows(step) for step in range(8))
    assert (
        PretrainTrainConfig(global_batch_size=9, micro_batch_size=9, batch_warmup_steps=6)
        .batch_schedule(1)
        .accumulation
        == 3
    )


def test_a_warmup_of_a_single_micro_step_is_refused():
    with pytest.raises(ValueError, match=r"train.batch_warmup_steps=6 is invalid: .*train.micro_batch_size"):
        PretrainTrainConfig(global_batch_size=16, batch_warmup_steps=6)
    with pytest.raises(ValueError, match=r"train.batch_warmup_steps=6 is invalid: .*16 processes leaves one row"):
        PretrainTrainConfig(global_batch_size=16, micro_batch_size=1, batch_warmup_steps=6).batch_schedule(16)


@pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size"])
def test_a_batch_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"train.{name}=0 is invalid"):
        PretrainTrainConfig(**{name: 0})
