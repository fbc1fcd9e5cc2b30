import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.batching import FILLER, LengthBucketSampler, bucket_ends
from finetune.data.features import Features, Row
from tests.conftest import examples


def make_row(index, length):
    return Row(np.full(length, index + 10, np.int32), np.zeros(length, np.uint8))


def make_features(lengths, n_rows=1):
    return [
        Features(index, (make_row(index, length),) * n_rows, {"label": np.int64(index)})
        for index, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60))
@settings(max_examples=examples(50))
def test_buckets_minimize_padding_plus_overhead(lengths, overhead):
    lengths = np.sort(lengths)

    def cost(ends):
        starts = [0, *ends[:-1]]
        return sum((end - start) * lengths[end - 1] + overhead for start, end in zip(starts, ends, strict=True))

    inner_ends = range(1, len(lengths))
    all_ends = [[*ends, len(lengths)] for n in range(len(lengths)) for ends in itertools.combinations(inner_ends, n)]
    assert cost(bucket_ends(lengths, overhead)) == min(map(cost, all_ends))


@given(
    st.lists(st.integers(3, 30), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 50),
)
@settings(max_examples=examples(50))
def test_evaluation_reads_each_feature_on_one_process_in_equally_many_batches(
    lengths, world_size, batch_size, overhead
):
    features = make_features(lengths)
    batches = [
        list(LengthBucketSampler(features, "left", index, world_size, overhead).eval_batches(batch_size))
        for index in range(world_size)
    ]
    assert len({len(process_batches) for process_batches in batches}) == 1
    indices = [index for process_batches in batches for batch in process_batches for index in batch.indices]
    assert sorted(index for index in indices if index != FILLER) == list(range(len(features)))


@pytest.mark.parametrize(("world_size", "accumulation_steps"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_features_and_mean_loss_however_it_is_split(world_size, accumulation_steps):
    features = make_features(np.random.default_rng(0).integers(3, 30, 20))
    expected = np.concatenate([np.random.default_rng([7, epoch]).permutation(20) for epoch in range(3)])[16:32]
    indices, mean = [], 0.0
    for process_index in range(world_size):
        sampler = LengthBucketSampler(features, "left", process_index, world_size, 16)
        for micro_step in sampler.micro_steps(7, 1, 16, accumulation_steps):
            for batch in micro_step.batches:
                indices += batch.indices.tolist()
                assert (batch.labels["label"].numpy() == batch.indices).all()
            total = sum(float(batch.labels["label"].sum()) for batch in micro_step.batches) * micro_step.loss_scale
            mean += total / accumulation_steps / world_size  # as in DeepSpeed
    assert sorted(indices) == sorted(expected)
    assert mean == pytest.approx(expected.mean())


def test_every_feature_is_read_once_per_epoch():
    sampler = LengthBucketSampler(make_features([5] * 12), "left", 0, 1, 16)
    indices = [
        index
        for step in range(3)
        for micro_step in sampler.micro_steps(1, step, 4, 1)
        for batch in micro_step.batches
        for index in batch.indices
    ]
    assert sorted(indices) == list(range(12))


def test_rows_of_a_feature_are_adjacent_and_padding_is_masked():
    (batch,) = LengthBucketSampler(make_features([4, 6], n_rows=2), "left", 0, 1, 10**6).eval_batches(8)
    assert batch.input_ids.shape == (4, 6) and batch.input_ids[:, -1].tolist() == [10, 10, 11, 11]
    model_batch = batch.model_batch(batch.input_ids[:, :1])
    visible = model_batch.query_rank[:, :, None] > model_batch.key_rank[:, None]
    assert visible.sum().item() == 2 * 6 * 4 + 2 * 6 * 6
