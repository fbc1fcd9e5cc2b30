from xlpre.text.preprocess import clean_text, preprocess_text, split_comma_after_digit
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


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


def test_a_text_is_encoded_as_its_pieces_are_split_one_by_one():
    """The encoder looks for commas only in texts that have a piece which may end with one."""
    lines = [
        f"In {year}, {year - 1},{year} of them; {n}." for year, n in zip(range(1900, 1990), range(90), strict=True)
    ]
    tokenizer = train_tokenizer([lines], TokenizerConfig(vocab_size=150, preprocess="cased"))
    expected = [
        [
            part
            for piece in tokenizer._processor.encode_as_pieces(clean_text(line, "cased"))
            for part in tokenizer._split_piece(piece)
        ]
        for line in [*lines, "no comma", "café ☃5, x"]
    ]
    actual = [tokenizer.encode(line) for line in [*lines, "no comma", "café ☃5, x"]]
    assert actual == [tokenizer._processor.piece_to_id(pieces) for pieces in expected]
    assert any(piece[-1:] == "," and piece[-2:-1].isdigit() for piece in tokenizer.pieces)
