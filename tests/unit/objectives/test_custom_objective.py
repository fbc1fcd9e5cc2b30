"""Custom objectives: their model inputs are checked before a model reads them."""

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
    """Every seventh token is predicted from the other tokens of its part."""

    two_streams = True

    def __init__(self, **changes):
        self.changes = changes

    def build_inputs(self, windows, rng):
        rows, length = windows.ids.shape
        key_rank = np.tile(2 * (np.arange(length) >= windows.reuse_len).astype(np.int32), (rows, 1))
        query_rank, positions = key_rank + 1, np.tile(np.arange(3, length - 3, 7), (rows, 1))
        np.put_along_axis(key_rank, positions, np.take_along_axis(query_rank, positions, 1), 1)
        targets = np.take_along_axis(windows.ids, positions, 1)
        inputs = ModelInputs(windows.ids, query_rank, key_rank, positions, targets)
        return dataclasses.replace(
            inputs, **{name: change(getattr(inputs, name)) for name, change in self.changes.items()}
        )


def batch_of(loader, **changes):
    loader._objective = EverySeventh(**changes)
    return loader.batch(0, range(4))


def test_a_custom_objective_gives_a_batch(loader_of):  # noqa: F811
    batch = batch_of(loader_of())
    assert batch.target_positions.tolist() == [[3, 10, 17, 24, 31, 38, 45, 52, 59]] * 4
    assert torch.equal(batch.targets, batch.input_ids.gather(1, batch.target_positions))
    mirrored = batch_of(loader_of(), targets=lambda x: x[:, ::-1])
    assert torch.equal(mirrored.targets, batch.targets.flip(1))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("target_positions", lambda x: x + 60, "be between 0 and 63"),
        ("target_positions", lambda x: x - 60, "be between 0 and 63"),
        ("target_positions", lambda x: x[:, ::-1], "increase strictly in each row"),
        ("target_positions", lambda x: x * 0, "increase strictly in each row"),
        (
            "target_positions",
            lambda x: x.astype(np.int32),
            "Batch.target_positions of shape (4, 9) and torch.int32 is invalid: it must be",
        ),
        ("targets", lambda x: x.tolist(), "ModelInputs.targets=["),
        ("targets", lambda x: x[:, :2], "ModelInputs.targets of shape (4, 2) is invalid"),
        (
            "query_rank",
            lambda x: x.astype(np.int64),
            "Batch.query_rank of shape (4, 64) and torch.int64 is invalid: it must be",
        ),
        ("key_rank", lambda x: x[0], "ModelInputs.key_rank="),
    ],
)
def test_invalid_model_inputs_are_refused_by_field_name(loader_of, name, change, message):  # noqa: F811
    with pytest.raises(ValueError, match=re.escape(message)):
        batch_of(loader_of(), **{name: change})


@pytest.mark.parametrize("step, lanes", [(0, [8]), (0, [-1]), (0, []), (0, 4), (-1, [0])])
def test_unknown_lanes_are_refused(loader_of, step, lanes):  # noqa: F811
    with pytest.raises(ValueError, match=r"lanes=.* step=-?\d is invalid: .* from 0 to 7"):
        loader_of().batch(step, lanes)


def test_lane_groups_that_are_not_lists_are_refused(loader_of):  # noqa: F811
    with pytest.raises(ValueError, match=r"For `batches`, `lane_groups_at"):
        next(loader_of().batches(0, lambda step: range(4)))


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"objective.name=mlm is invalid: it must be one of permutation, denoising, causal"
    ):
        build_objective(ObjectiveConfig(name="mlm"), DataConfig(), np.ones(9, bool))
