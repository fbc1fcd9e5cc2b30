import dataclasses
import itertools
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from tests.unit.data.test_lanes import lanes_over
from xlpre import data_loader
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader, assign_lanes
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES, build_objective
from xlpre.text import special_tokens


@pytest.fixture
def loader_of(store, tokenizer):
    def make(seed=1, num_threads=1, n_lanes=8, name="permutation"):
        data = DataConfig(seq_len=64, reuse_len=64 if name == "causal" else 32, num_threads=num_threads)
        lanes = lanes_over(store.train, n_lanes, stride=data.reuse_len, lookahead=data.lookahead, seed=seed)
        objective = build_objective(ObjectiveConfig(name=name), data, tokenizer.starts_word)
        return Loader(lanes, data, objective, seed)

    return make


def are_equal(a, b):
    fields = [field.name for field in dataclasses.fields(a)]
    return all(
        torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in ((getattr(a, f), getattr(b, f)) for f in fields)
    )


def concatenate(batches):
    first = batches[0]
    return dataclasses.replace(
        first,
        **{
            f.name: torch.cat([getattr(b, f.name) for b in batches])
            for f in dataclasses.fields(first)
            if torch.is_tensor(getattr(first, f.name))
        },
    )


def test_a_batch_does_not_depend_on_the_batches_before(loader_of):
    all_batches = list(itertools.islice(loader_of().batches(0, lambda step: [range(8)]), 12))
    late = list(itertools.islice(loader_of(num_threads=4).batches(7, lambda step: [range(8)]), 5))
    assert all(are_equal(a, b) for a, b in zip(all_batches[7:], late, strict=True))
    assert not are_equal(all_batches[0], all_batches[1]) and not are_equal(
        all_batches[0], loader_of(seed=2).batch(0, range(8))
    )


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_processes_and_micro_steps_together_read_the_rows_of_a_step(loader_of, world_size, accumulation):
    micro_batch_size = 8 // (world_size * accumulation)
    micro_batches = []
    for micro_step in range(accumulation):
        for rank in range(world_size):
            lanes = assign_lanes(rank, world_size, micro_batch_size, accumulation)[micro_step]
            micro_batches.append(loader_of().batch(3, lanes))
    assert are_equal(loader_of().batch(3, range(8)), concatenate(micro_batches))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(loader_of, name):
    loader = loader_of(name=name)
    all_rows = loader.batch(3, range(8))
    for lanes in ([5], [6, 1, 3], range(1, 8, 3)):
        some_rows = loader.batch(3, lanes)
        assert are_equal(some_rows, concatenate([loader.batch(3, [lane]) for lane in lanes]))
        assert torch.equal(some_rows.key_rank, all_rows.key_rank[list(lanes)])
        assert torch.equal(some_rows.input_ids, all_rows.input_ids[list(lanes)])


def test_wait_seconds_counts_the_time_until_a_batch_is_ready(loader_of, monkeypatch):
    """The clock advances by 5 seconds while the first batch is built, after the request for it."""
    loader, build, now, requested, second_is_built = loader_of(), Loader.batch, [0.0], Event(), Event()

    def clock():
        requested.set()
        return now[0]

    def build_after_request(self, step, lanes):
        assert requested.wait(60)
        batch = build(self, step, lanes)
        now[0] += 5.0 * (step == 0)
        if step == 1:
            second_is_built.set()
        return batch

    monkeypatch.setattr(data_loader, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(Loader, "batch", build_after_request)
    batches = loader.batches(0, lambda step: [range(8)])
    next(batches)
    assert loader.wait_seconds == 5
    assert second_is_built.wait(60)
    next(batches)  # is ready
    assert loader.wait_seconds == 5
    batches.close()


def test_rows_have_equally_many_targets_which_are_their_own_tokens(loader_of):
    batch = loader_of().batch(5, range(8))
    assert batch.targets.shape == (8, 10) and (batch.target_weights == 1).all()
    assert torch.equal(batch.targets, batch.input_ids.gather(1, batch.target_positions))
    assert not torch.isin(batch.targets, torch.tensor([special_tokens.SEP, special_tokens.CLS])).any()
    assert batch.backward.tolist() == [False, True] * 4
