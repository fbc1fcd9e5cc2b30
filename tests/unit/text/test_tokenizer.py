import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from xlpre.text import special_tokens
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import MAX_SENTENCE_BYTES, split_long_line, train_tokenizer


def test_ids_0_to_8_are_the_special_tokens_of_xlnet(tokenizer):
    assert tuple(tokenizer.pieces[:9]) == special_tokens.SPECIAL_TOKENS


def test_text_survives_a_round_trip(tokenizer, documents):
    for document in documents[:50]:
        for paragraph in document:
            assert tokenizer.decode(tokenizer.encode(paragraph)) == paragraph


def test_unknown_fraction_counts_characters_not_tokens(tokenizer):
    assert tokenizer.unknown_fraction(["Ba be."]) == 0 == tokenizer.unknown_fraction([])
    assert tokenizer.encode("Ba 中文字大").count(special_tokens.UNK) == 1
    assert tokenizer.unknown_fraction(["Ba 中文字大"]) == pytest.approx(4 / 8)  # with the space before each word


def test_a_too_large_vocabulary_is_refused_with_the_largest_size(documents):
    with pytest.raises(
        ValueError, match=r"tokenizer.vocab_size=9000 is invalid: .* Set tokenizer.vocab_size=\d+ or less"
    ):
        train_tokenizer(documents, TokenizerConfig(vocab_size=9000))


def test_a_too_small_vocabulary_is_refused_with_the_smallest_size():
    text = [["".join(map(chr, range(0x4E00 + 50 * k, 0x4E00 + 50 * (k + 1)))) for k in range(4)]]
    with pytest.raises(
        ValueError, match=r"tokenizer.vocab_size=60 is invalid: .* Set tokenizer.vocab_size=\d+ or more"
    ):
        train_tokenizer(text, TokenizerConfig(vocab_size=60))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("character_coverage", 0.5), ("character_coverage", 2.0), ("train_chars", 0), ("vocab_size", 9)],
)
def test_an_invalid_setting_is_refused_with_its_key_and_value(setting, value):
    with pytest.raises(ValueError, match=rf"tokenizer.{setting}={value} is invalid: .* Set "):
        TokenizerConfig(**{setting: value})


@pytest.mark.parametrize("text", ["\x01\x02", "▁ ▁▁"])
def test_a_text_without_visible_characters_is_refused(text):
    with pytest.raises(ValueError, match="no visible characters"):
        train_tokenizer([[text], [text]], TokenizerConfig(vocab_size=50))


def test_a_missing_or_invalid_model_file_is_refused(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad.model is not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(ValueError, match="none.model does not exist. .*train_tokenizer.py"):
        load_tokenizer(tmp_path / "none.model")


def test_eop_follows_each_paragraph_and_eod_each_document(tokenizer):
    ids, _ = tokenizer.encode_document(["Ba be.", "Di do."])
    assert list(np.flatnonzero(ids == special_tokens.EOP)) == [len(tokenizer.encode("Ba be.")), len(ids) - 2]
    assert ids[-1] == special_tokens.EOD


def test_sentences_end_at_full_stops_before_capitals_and_at_paragraphs(tokenizer):
    ids, ends = tokenizer.encode_document(["Ba be. Di do bu. fa", "Go ga"])
    texts = [tokenizer.decode(part) for part in np.split(ids, ends[:-1])]
    assert [text.strip() for text in texts] == ["Ba be.", "Di do bu. fa", "Go ga"]
    assert ends[-1] == len(ids)


def test_with_line_type_sentences_each_line_is_a_sentence_without_eop(tokenizer):
    lines = ["Ba be. Di", "do bu.", "", "fa"]
    ids, ends = tokenizer.encode_document(lines, "sentences")
    assert special_tokens.EOP not in ids
    assert [part.tolist() for part in np.split(ids, ends[:-1])] == [
        tokenizer.encode("Ba be. Di"),
        tokenizer.encode("do bu."),
        [*tokenizer.encode("fa"), special_tokens.EOD],
    ]
    assert ends[-1] == len(ids)


def test_empty_lines_are_not_sentences(tokenizer):
    for lines in ([""], ["", ""]):
        ids, ends = tokenizer.encode_document(lines, "sentences")
        assert ids.tolist() == [special_tokens.EOD] and ends.tolist() == [1]
    ids, ends = tokenizer.encode_document(["", "ba", ""], "sentences")
    assert ends.tolist() == [len(ids)]


def test_text_is_preprocessed_before_it_is_encoded(tokenizer):
    uncased = SentencePieceTokenizer(tokenizer.content, preprocess="uncased")
    assert uncased.encode(" Ba``  BÉ") == tokenizer.encode('ba" be')
    ids, ends = uncased.encode_document(["Ba be. Di do"])
    assert ids[:-2].tolist() == tokenizer.encode("ba be. di do")
    assert len(ends) == 2  # in lower case, any word can start a sentence


def test_a_vocabulary_is_trained_on_preprocessed_text(documents):
    uncased = train_tokenizer(documents, TokenizerConfig(vocab_size=200, preprocess="uncased"))
    assert uncased.preprocess == "uncased"
    assert not any(piece != piece.lower() for piece in uncased.pieces)


def test_a_word_starts_at_a_space_a_symbol_or_punctuation(tokenizer):
    starts = dict(zip(tokenizer.pieces, tokenizer.starts_word, strict=True))
    assert starts["<sep>"] and starts["."] and starts["-"] and not starts["£"]
    assert all(
        start == piece.startswith(special_tokens.WORD_BOUNDARY)
        for piece, start in starts.items()
        if piece.strip("▁").isalpha()
    )


def test_bytes_per_piece_add_up_to_the_bytes_of_a_text_and_the_space_before_it(tokenizer, documents):
    for line in documents[0]:
        ids = tokenizer.encode(line)
        assert special_tokens.UNK not in ids
        assert tokenizer.bytes_per_piece[ids].sum() == len(line.encode()) + 1


@pytest.mark.parametrize("space", ["", " "])
def test_a_line_too_long_for_sentencepiece_is_split(space):
    words = ["山河" * 40, "水火" * 40]
    line = space.join(words * 300)
    assert len(line.encode()) > 2 * MAX_SENTENCE_BYTES
    tokenizer = train_tokenizer([[line], ["Ba be di do."]], TokenizerConfig(vocab_size=40))
    assert {"山", "河", "水", "火"} <= set("".join(tokenizer.pieces))
    parts = list(split_long_line(line))
    assert "".join(parts) == line and all(len(part.encode()) <= MAX_SENTENCE_BYTES for part in parts)
    if space:
        assert all(part.startswith(" ") for part in parts[1:])


MINUTES_OF_TRAINING = """
import random
from xlpre.text import tokenizer_training
from xlpre.text.tokenizer import TokenizerConfig
draw = random.Random(1)
words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(200_000)]
training_lines = tokenizer_training.training_lines
def print_at_the_end(*args):
    yield from training_lines(*args)
    print("SentencePiece has read the text", flush=True)
tokenizer_training.training_lines = print_at_the_end
tokenizer_training.train_tokenizer([[" ".join(words)]], TokenizerConfig(vocab_size=8000))
"""


def test_ctrl_c_ends_the_training_of_a_vocabulary_at_once():
    command = [sys.executable, "-c", MINUTES_OF_TRAINING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as training:
        try:
            assert training.stdout.readline() == b"SentencePiece has read the text\n"
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == -signal.SIGINT  # the training would take minutes
        finally:
            training.kill()


@pytest.mark.parametrize("value", [None, 5, b"Ba", ["Ba", "be"]])
def test_encode_takes_one_string(tokenizer, value):
    with pytest.raises(ValueError, match="takes one text, a str, not"):
        tokenizer.encode(value)


def test_an_id_outside_the_vocabulary_is_not_decoded(tokenizer):
    with pytest.raises(ValueError, match="token id 300 is invalid: .* 0 to 299"):
        tokenizer.decode([20, 300])
