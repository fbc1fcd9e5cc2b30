"""Batches of single texts."""

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.inference.batches import masked_batch, unmasked_batch
from xlpre.inference.cloze import ClozeResult, cloze_batch, encode_cloze, format_result, predict_blanks
from xlpre.model.memory import initial_memory
from xlpre.text import special_tokens

TOKENS = np.array([20, 21, 22])


@pytest.mark.parametrize("positions", [[3], [-1], [0, 7], [1, 1]])
def test_positions_outside_the_text_or_repeated_are_refused(positions):
    with pytest.raises(ValueError, match=r"positions=\[.*\] is invalid: .* between 0 and 2, each at most once"):
        masked_batch(TOKENS, np.array(positions))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.uint16, np.int32])
def test_any_sequence_of_integers_is_accepted(kind):
    actual, expected = masked_batch(kind([20, 21, 22]), kind([1])), masked_batch(TOKENS, np.array([1]))
    assert torch.equal(actual.input_ids, expected.input_ids) and torch.equal(actual.targets, expected.targets)
    assert actual.target_positions.dtype == torch.int64


@pytest.mark.parametrize(
    "invalid", ["abc", 5, None, [1.5], [[1, 2]], [[1], [2, 3]], ["a"], [True, False]], ids=repr
)  # fmt: skip
def test_tokens_that_are_not_one_row_of_integers_are_refused(invalid):
    with pytest.raises(ValueError, match="tokens=.* one-dimensional sequence of integers.*xlpre.inference.collate"):
        unmasked_batch(invalid)
    with pytest.raises(ValueError, match="positions=.* one-dimensional sequence of integers"):
        masked_batch(TOKENS, invalid)


def test_negative_ids_are_refused_and_an_empty_text_is_accepted():
    with pytest.raises(ValueError, match="id -1 .* at least 0"):
        unmasked_batch([20, -1])
    assert unmasked_batch([]).input_ids.shape == (1, 2)


@pytest.mark.parametrize("invalid", [None, b"a ____", ["a ____"]])
def test_a_cloze_text_that_is_not_a_str_is_refused(invalid, tokenizer):
    with pytest.raises(ValueError, match="text=.* must be one str"):
        cloze_batch(invalid, tokenizer)


def test_a_blank_is_hidden_and_sees_the_text_but_no_other_blank(tokenizer):
    batch = cloze_batch("Ba ____ di ____ bu.", tokenizer)
    first, second = batch.target_positions[0].tolist()
    sees = batch.query_rank[0][:, None] > batch.key_rank[0][None]
    assert (batch.input_ids[0][[first, second]] == special_tokens.MASK).all()
    assert not sees[first, second] and not sees[second, first] and not sees[first, first]
    assert sees[first].sum() == len(sees) - 2
    others = torch.ones(len(sees), dtype=bool)
    others[[first, second]] = False
    assert not sees[others][:, [first, second]].any()
    assert tokenizer.pieces[batch.input_ids[0][first + 1]].startswith(special_tokens.WORD_BOUNDARY)


def test_a_blank_of_several_pieces_is_as_many_positions(tokenizer):
    batch = cloze_batch("Ba ____{3} bu.", tokenizer)
    single = cloze_batch("Ba ____ bu.", tokenizer)
    first = int(single.target_positions[0, 0])
    assert batch.target_positions[0].tolist() == [first, first + 1, first + 2]
    assert batch.input_ids.size(1) == single.input_ids.size(1) + 2
    assert encode_cloze("Ba ____{1,4} bu.", tokenizer).blanks[0].longest == 4
    with pytest.raises(ValueError, match="each blank needs one length"):
        cloze_batch("Ba ____{1,4} bu.", tokenizer)


def test_in_a_denoising_model_all_tokens_see_a_masked_position(tokenizer):
    """As in training: the prediction is that of the content row at <mask>, when every token sees every token."""
    for batch in (cloze_batch("Ba ____ di ____ bu.", tokenizer, False), masked_batch(TOKENS, [0, 2], False)):
        assert (batch.query_rank[0][:, None] > batch.key_rank[0][None]).all()
        assert (batch.input_ids[0][batch.target_positions[0]] == special_tokens.MASK).all()
    model = make_model(False, vocab_size=len(tokenizer)).eval()
    batch = unmasked_batch(cloze_batch("Ba ____ di.", tokenizer).input_ids[0, :-2])
    with torch.no_grad():
        logits = model.logits(batch, initial_memory(model.config, 1, mem_len=0))[0][0].softmax(-1)
    (predictions,) = predict_blanks(model, tokenizer, "Ba ____ di.").predictions
    row = int((batch.input_ids[0] == special_tokens.MASK).nonzero())
    best = logits[row, special_tokens.EOP + 1 :].topk(5).values
    assert [probability for _, probability in predictions] == pytest.approx(best.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ba di.", "it has no blank. Mark .* ____"),
        ("", "has no blank"),
        ("def __init__(self): di.", "has no blank"),
        pytest.param("ba " * 3000 + "____", "the limit is 2,048", id="long"),
        ("<eop> ____ di.", "<eop> is a special token"),
    ],
)
def test_a_text_that_cannot_be_filled_in_is_refused(tokenizer, text, message):
    with pytest.raises(ValueError, match=message):
        cloze_batch(text, tokenizer)


def test_a_small_probability_is_not_shown_as_zero():
    predictions = [[("a", 0.985), ("b", 0.01), ("c", 0.0099), ("d", 1e-9)]]
    assert "a 98%  b 1%  c <1%  d <1%" in format_result(ClozeResult("____", predictions, []))
