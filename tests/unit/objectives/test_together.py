"""Texts of several lengths as one batch."""

import dataclasses

import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.batch import HIDDEN_RANK
from xlpre.inference.cloze import masked_batch, unmasked_batch
from xlpre.inference.collate import collate
from xlpre.model.memory import initial_memory

TEXTS = [[20, 21, 22, 23, 24], [30], [25, 26, 27]]
SHAPES = [{}, {"positions": "learned", "n_positions": 20}, {"positions": "shaw", "n_positions": 20}]


def alone_and_together(read, model, batches):
    """What is read of each, and of all at once, as long as each."""
    alone = [read(batch, initial_memory(model.config, 1, mem_len=0))[0][0] for batch in batches]
    rows = read(collate(batches), initial_memory(model.config, len(batches), mem_len=0))[0]
    return alone, [row[row.size(0) - len(one) :] for row, one in zip(rows, alone, strict=True)]


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("settings", SHAPES, ids=["relative", "learned", "shaw"])
def test_a_text_is_read_with_others_as_it_is_alone(two_streams, settings):
    model = make_model(two_streams, **settings).eval()
    for batches in ([unmasked_batch(text) for text in TEXTS], [masked_batch(TEXTS[0], places) for places in ([0, 2, 4], [1], [])]):
        alone, found = alone_and_together(model.logits, model, batches)
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)  # float32, products of other shapes


def test_the_loss_is_the_mean_over_all_targets_but_those_that_fill_rows():
    model = make_model().eval()
    batches = [masked_batch(TEXTS[0], [0, 3]), masked_batch(TEXTS[2], [1])]
    one, two = (model(batch, initial_memory(model.config, 1, mem_len=0))[0] for batch in batches)
    both = model(collate(batches), initial_memory(model.config, 2, mem_len=0))[0]
    assert both.item() == pytest.approx(((2 * one + two) / 3).item(), rel=1e-5)


def test_cls_is_the_last_token_of_every_row_and_padding_is_known_by_its_rank():
    batch = collate([unmasked_batch(text) for text in TEXTS])
    assert (batch.input_ids[:, -1] == 3).all()
    assert (batch.key_rank == HIDDEN_RANK).sum(1).tolist() == [0, 4, 2] and batch.target_weights.sum(1).tolist() == [7, 3, 5]


@pytest.mark.parametrize("settings", [{"reuse_len": 2}, {"visible_mem_len": torch.tensor([4])}])
def test_what_goes_with_a_memory_is_not_padded(settings):
    with pytest.raises(ValueError, match="goes with a memory"):
        collate([unmasked_batch(TEXTS[0]), dataclasses.replace(unmasked_batch(TEXTS[1]), **settings)])


def test_nothing_together_is_refused():
    with pytest.raises(ValueError, match="no batch to put together"):
        collate([])
