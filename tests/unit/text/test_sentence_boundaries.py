import numpy as np
import pytest

from xlpre.text import special_tokens
from xlpre.text.sentence_boundaries import boundary_flags, sentence_ends, starts_word


def test_every_piece_of_a_script_without_spaces_starts_a_word():
    assert starts_word("研究") and starts_word("の") and starts_word("ไทย")
    assert not starts_word("ing") and not starts_word("한국")


def ends_of(text: str, preprocess="none") -> list[int]:
    """Return the sentence ends of pieces, which are separated by spaces."""
    pieces = text.split()
    return sentence_ends(np.arange(len(pieces)), boundary_flags(pieces, preprocess)).tolist()


def test_a_sentence_ends_after_its_closing_quotes_before_a_word_that_is_not_lower_case():
    assert ends_of("▁A . ” ▁B c") == [3, 5]
    assert ends_of("▁A . ▁b c") == [4]
    assert ends_of("▁A . B c") == [4]  # no word starts


def test_consecutive_marks_are_one_end():
    assert ends_of('▁A . ) " ▁B . . . ▁C ? ! ▁D') == [4, 8, 11, 12]
    assert ends_of("▁A !” ▁B .) ▁c , ▁A . , ▁B") == [2, 10]  # also as one piece; no end before a comma
    assert ends_of("▁A . <eop> ▁B") == [3, 4]


def test_a_quotation_mark_closes_before_a_space_and_opens_before_a_word():
    assert ends_of("▁A . “ ▁B") == [3, 4]  # as in German
    assert ends_of("他 。 「 好 。 」 她") == [2, 6, 7]
    assert ends_of("他 。 “ 好 。 ” 她") == [2, 6, 7]


@pytest.mark.parametrize("mark", "।۔؟։።။。")
def test_full_stops_of_other_scripts_end_sentences(mark):
    assert ends_of(f"▁क {mark} ▁ख ख") == [2, 4]


def test_a_piece_that_is_a_space_belongs_to_the_next_word():
    assert ends_of("▁A . ▁ B c") == [2, 5]
    assert ends_of("▁A . ▁ b c") == [5]


def test_in_uncased_text_any_word_starts_a_sentence():
    assert ends_of("▁a . ▁b c", "uncased") == [2, 4]


def test_a_document_that_ends_with_a_paragraph_ends_once():
    ids = np.array(
        [9, special_tokens.EOP, 9, special_tokens.EOP, special_tokens.EOD, 9, special_tokens.EOP, special_tokens.EOD]
    )
    flags = boundary_flags([*special_tokens.SPECIAL_TOKENS, "▁A"], "none")
    assert sentence_ends(ids, flags).tolist() == [2, 5, 8]
