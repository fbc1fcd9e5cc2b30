"""Text with blanks as a batch."""

import numpy as np
import pytest
import torch

from xlpre.inference.cloze import cloze_batch, masked_batch, unmasked_batch

TOKENS = np.array([20, 21, 22])


@pytest.mark.parametrize("positions", [[3], [-1], [0, 7], [1, 1]])
def test_only_places_of_the_text_are_hidden_and_each_once(positions):
    with pytest.raises(
        ValueError, match=r"positions \(\[.*\]\) must be places in the text, 0 to 2, none of them twice"
    ):
        masked_batch(TOKENS, np.array(positions))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.uint16, np.int32])
def test_any_row_of_whole_numbers_is_a_text(kind):
    found, expected = masked_batch(kind([20, 21, 22]), kind([1])), masked_batch(TOKENS, np.array([1]))
    assert torch.equal(found.input_ids, expected.input_ids) and torch.equal(found.targets, expected.targets)
    assert found.target_positions.dtype == torch.int64


@pytest.mark.parametrize(
    "odd", ["abc", 5, None, [1.5], [[1, 2]], [[1], [2, 3]], ["a"], [True, False]], ids=repr
)  # fmt: skip
def test_anything_else_is_none(odd):
    with pytest.raises(ValueError, match="tokens must be one row of whole numbers, not .*objectives\.together makes"):
        unmasked_batch(odd)
    with pytest.raises(ValueError, match="positions must be one row of whole numbers"):
        masked_batch(TOKENS, odd)


def test_an_id_below_zero_is_refused_and_no_text_is_one():
    with pytest.raises(ValueError, match="the id -1; ids of pieces begin with 0"):
        unmasked_batch([20, -1])
    assert unmasked_batch([]).input_ids.shape == (1, 2)


@pytest.mark.parametrize("odd", [None, b"a ____", ["a ____"]])
def test_only_one_str_has_blanks(odd, tokenizer):
    with pytest.raises(ValueError, match="the text must be one str, not"):
        cloze_batch(odd, tokenizer)
