from xlpre.text.preprocess import clean_text, preprocess_text, split_comma_after_digit


def test_text_is_unchanged_cleaned_or_lower_cased():
    text = "  Ein ``Café''\t "
    assert clean_text(text, "none") == text
    assert clean_text(text, "cased") == 'Ein "Cafe"'
    assert clean_text(text, "uncased") == 'ein "cafe"'


def test_accents_and_spaces_may_be_kept():
    assert preprocess_text(" é  ﬁ", remove_space=False, keep_accents=True) == " é  ﬁ"
    assert preprocess_text(" é  ﬁ", remove_space=False) == " e  fi"


def test_a_comma_after_a_digit_becomes_a_piece_and_the_number_is_encoded_again():
    known = {"20": ["▁2", "0"], "5": ["▁", "5"], "7": ["▁7"]}
    pieces = ["▁20,", "a", "20,", "5,", "7,", ",", "a,"]
    expected = ["▁2", "0", ",", "a", "2", "0", ",", "5", ",", "7", ",", ",", "a,"]
    parts = [part for piece in pieces for part in split_comma_after_digit(piece, lambda text: list(known[text]))]
    assert parts == expected
