"""An objective of a user's own: what it makes is looked at before a model reads it."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from tests.unit.test_data_loader import loader_of  # noqa: F401  a fixture
from xlpre.data.window_layout import DataConfig
from xlpre.objectives.objective import ModelInputs, ObjectiveConfig
from xlpre.objectives.registry import build_objective


class EverySeventh:
    """Every seventh token, from all others of its half."""

    two_streams = True

    def __init__(self, **changes):
        self.changes = changes

    def build_inputs(self, windows, rng):
        rows, length = windows.ids.shape
        key_rank = np.tile(2 * (np.arange(length) >= windows.reuse_len).astype(np.int32), (rows, 1))
        query_rank, places = key_rank + 1, np.tile(np.arange(3, length - 3, 7), (rows, 1))
        np.put_along_axis(key_rank, places, np.take_along_axis(query_rank, places, 1), 1)
        found = ModelInputs(windows.ids, query_rank, key_rank, places, np.take_along_axis(windows.ids, places, 1))
        return dataclasses.replace(
            found, **{name: change(getattr(found, name)) for name, change in self.changes.items()}
        )


def batch_of(loader, **changes):
    loader._objective = EverySeventh(**changes)
    return loader.batch(0, range(4))


def test_it_becomes_a_batch(loader_of):  # noqa: F811
    batch = batch_of(loader_of())
    assert batch.target_positions.tolist() == [[3, 10, 17, 24, 31, 38, 45, 52, 59]] * 4
    assert torch.equal(batch.targets, batch.input_ids.gather(1, batch.target_positions))
    mirrored = batch_of(loader_of(), targets=lambda x: x[:, ::-1])
    assert torch.equal(mirrored.targets, batch.targets.flip(1))


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("target_positions", lambda x: x + 60, "be between 0 and 63"),
        ("target_positions", lambda x: x - 60, "be between 0 and 63"),
        ("target_positions", lambda x: x[:, ::-1], "strictly increase in each row"),
        ("target_positions", lambda x: x * 0, "strictly increase in each row"),
        ("target_positions", lambda x: x.astype(np.int32), "Batch.target_positions is (4, 9) torch.int32. It must be"),
        ("targets", lambda x: x.tolist(), "ModelInputs.targets is ["),
        ("targets", lambda x: x[:, :2], "ModelInputs.targets has shape (4, 2)"),
        ("query_rank", lambda x: x.astype(np.int64), "Batch.query_rank is (4, 64) torch.int64. It must be"),
        ("key_rank", lambda x: x[0], "ModelInputs.key_rank is "),
    ],
)
def test_what_is_no_batch_is_told_by_the_name_of_its_field(loader_of, name, change, said):  # noqa: F811
    with pytest.raises(ValueError, match=re.escape(said)):
        batch_of(loader_of(), **{name: change})


@pytest.mark.parametrize("step, lanes", [(0, [8]), (0, [-1]), (0, []), (0, 4), (-1, [0])])
def test_a_batch_is_of_lanes_that_there_are(loader_of, step, lanes):  # noqa: F811
    with pytest.raises(ValueError, match=r"lanes=.* step=-?\d is invalid: .*range\(8\)"):
        loader_of().batch(step, lanes)


def test_groups_that_are_no_groups_are_told_so(loader_of):  # noqa: F811
    with pytest.raises(ValueError, match=r"`batches` returns a list"):
        next(loader_of().batches(0, lambda step: range(4)))


def test_an_objective_that_there_is_not_is_told_those_that_there_are():
    with pytest.raises(ValueError, match=r"objective.name=mlm is invalid: it must be one of permutation, denoising, causal"):
        build_objective(ObjectiveConfig(name="mlm"), DataConfig(), np.ones(9, bool))
