import numpy as np

from xlpre.text import symbols
from xlpre.text.boundaries import kinds_of, sentence_ends, starts_word


def test_every_piece_of_a_script_without_spaces_starts_a_word():
    assert starts_word("研究") and starts_word("の") and starts_word("ไทย")
    assert not starts_word("ing") and not starts_word("한국")


def ends_of(text: str, preprocess="none") -> list[int]:
    """Where sentences end in pieces that spaces stand between."""
    pieces = text.split()
    return sentence_ends(np.arange(len(pieces)), kinds_of(pieces, preprocess)).tolist()


def test_a_sentence_ends_after_its_closing_quotes_before_a_word_that_is_not_lower_case():
    assert ends_of("▁A . ” ▁B c") == [3, 5]
    assert ends_of("▁A . ▁b c") == [4]
    assert ends_of("▁A . B c") == [4]  # no word begins


def test_a_space_of_its_own_belongs_to_the_word_after_it():
    assert ends_of("▁A . ▁ B c") == [2, 5]
    assert ends_of("▁A . ▁ b c") == [5]


def test_lower_case_says_nothing_where_all_text_is():
    assert ends_of("▁a . ▁b c", "uncased") == [2, 4]


def test_a_document_that_ends_with_a_paragraph_ends_once():
    ids = np.array([9, symbols.EOP, 9, symbols.EOP, symbols.EOD, 9, symbols.EOP, symbols.EOD])
    kinds = kinds_of([*symbols.PIECES, "▁A"], "none")
    assert sentence_ends(ids, kinds).tolist() == [2, 5, 8]
