"""Texts of different lengths as one batch."""

import dataclasses

import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.batch import HIDDEN_RANK
from xlpre.inference.batches import collate, masked_batch, unmasked_batch
from xlpre.model.memory import initial_memory

TEXTS = [[20, 21, 22, 23, 24], [30], [25, 26, 27]]
SHAPES = [{}, {"positions": "learned", "n_positions": 20}, {"positions": "shaw", "n_positions": 20}]


def single_and_collated(read, model, batches):
    """Outputs of each batch, and of the collated batch without its padding."""
    single = [read(batch, initial_memory(model.config, 1, mem_len=0))[0][0] for batch in batches]
    rows = read(collate(batches), initial_memory(model.config, len(batches), mem_len=0))[0]
    return single, [row[row.size(0) - len(output) :] for row, output in zip(rows, single, strict=True)]


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("settings", SHAPES, ids=["relative", "learned", "shaw"])
def test_collated_texts_give_the_outputs_of_single_texts(two_streams, settings):
    model = make_model(two_streams, **settings).eval()
    for batches in (
        [unmasked_batch(text) for text in TEXTS],
        [masked_batch(TEXTS[0], positions) for positions in ([0, 2, 4], [1], [])],
    ):
        single, collated = single_and_collated(model.logits, model, batches)
        for expected, actual in zip(single, collated, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)  # float32, products of other shapes


def test_padding_targets_do_not_count_in_the_loss():
    model = make_model().eval()
    batches = [masked_batch(TEXTS[0], [0, 3]), masked_batch(TEXTS[2], [1])]
    one, two = (model(batch, initial_memory(model.config, 1, mem_len=0))[0] for batch in batches)
    both = model(collate(batches), initial_memory(model.config, 2, mem_len=0))[0]
    assert both.item() == pytest.approx(((2 * one + two) / 3).item(), rel=1e-5)


def test_cls_is_the_last_token_and_padding_has_the_hidden_rank():
    batch = collate([unmasked_batch(text) for text in TEXTS])
    assert (batch.input_ids[:, -1] == 3).all()
    assert (batch.key_rank == HIDDEN_RANK).sum(1).tolist() == [0, 4, 2] and batch.target_weights.sum(1).tolist() == [
        7,
        3,
        5,
    ]


@pytest.mark.parametrize("settings", [{"reuse_len": 2}, {"visible_mem_len": torch.tensor([4])}])
def test_batches_with_memory_are_not_collated(settings):
    with pytest.raises(ValueError, match="reuse_len or visible_mem_len"):
        collate([unmasked_batch(TEXTS[0]), dataclasses.replace(unmasked_batch(TEXTS[1]), **settings)])


def test_an_empty_list_is_not_collated():
    with pytest.raises(ValueError, match="batches=.. is invalid: .*at least one"):
        collate([])
