import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.batching import FILLER, LengthBucketSampler, cut
from finetune.data.features import Features, Row


def row_of(number, length):
    return Row(np.full(length, number + 10, np.int32), np.zeros(length, np.uint8))


def items_of(lengths, n_rows=1):
    return [
        Features(number, (row_of(number, length),) * n_rows, {"label": np.int64(number)})
        for number, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60))
@settings(max_examples=50, deadline=None)
def test_parts_are_cut_where_padding_and_passes_cost_least(lengths, overhead):
    lengths = np.sort(lengths)

    def cost(ends):
        begins = [0, *ends[:-1]]
        return sum((end - begin) * lengths[end - 1] + overhead for begin, end in zip(begins, ends, strict=True))

    inner = range(1, len(lengths))
    every = [[*some, len(lengths)] for n in range(len(lengths)) for some in itertools.combinations(inner, n)]
    assert cost(cut(lengths, overhead)) == min(map(cost, every))


@given(
    st.lists(st.integers(3, 30), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 50),
)
@settings(max_examples=50, deadline=None)
def test_over_all_processes_each_item_is_asked_once_in_as_many_passes(lengths, world_size, rows, pass_tokens):
    items = items_of(lengths)
    of_process = [
        list(LengthBucketSampler(items, "left", p, world_size, pass_tokens).eval_batches(rows)) for p in range(world_size)
    ]
    assert len({len(parts) for parts in of_process}) == 1
    asked = [number for parts in of_process for part in parts for number in part.indices if number != FILLER]
    assert sorted(asked) == list(range(len(items)))


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_an_update_has_the_same_items_and_mean_however_it_is_shared(world_size, accumulation):
    items = items_of(np.random.default_rng(0).integers(3, 30, 20))
    expected = np.concatenate([np.random.default_rng([7, epoch]).permutation(20) for epoch in range(3)])[16:32]
    found, mean = [], 0.0
    for process in range(world_size):
        for micro in LengthBucketSampler(items, "left", process, world_size, 16).micro_steps(7, 1, 16, accumulation):
            for part in micro.batches:
                found += part.indices.tolist()
                assert (part.labels["label"].numpy() == part.indices).all()
            total = sum(float(part.labels["label"].sum()) for part in micro.batches) * micro.loss_scale
            mean += total / accumulation / world_size  # what DeepSpeed makes of it
    assert sorted(found) == sorted(expected)
    assert mean == pytest.approx(expected.mean())


def test_every_item_is_read_once_an_epoch():
    dealer = LengthBucketSampler(items_of([5] * 12), "left", 0, 1, 16)
    read = [
        number
        for step in range(3)
        for micro in dealer.micro_steps(1, step, 4, 1)
        for part in micro.batches
        for number in part.indices
    ]
    assert sorted(read) == list(range(12))


def test_rows_of_an_item_stay_together_and_padding_is_hidden():
    (part,) = LengthBucketSampler(items_of([4, 6], n_rows=2), "left", 0, 1, 10**6).eval_batches(8)
    assert part.input_ids.shape == (4, 6) and part.input_ids[:, -1].tolist() == [10, 10, 11, 11]
    batch = part.model_batch(part.input_ids[:, :1])
    assert (batch.query_rank[:, :, None] > batch.key_rank[:, None]).sum().item() == 2 * 6 * 4 + 2 * 6 * 6
