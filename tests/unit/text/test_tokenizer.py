import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig
from xlpre.text.tokenizer_training import MAX_SENTENCE_BYTES, split_long_line, train_tokenizer


def test_ids_0_to_8_are_xlnets_symbols(tokenizer):
    assert tuple(tokenizer.pieces[:9]) == special_tokens.SPECIAL_TOKENS


def test_text_survives_a_round_trip(tokenizer, documents):
    for document in documents[:50]:
        for paragraph in document:
            assert tokenizer.decode(tokenizer.encode(paragraph)) == paragraph


def test_unknown_characters_are_counted_where_unknown_tokens_are_one_for_many(tokenizer):
    assert tokenizer.unknown_fraction(["Ba be."]) == 0 == tokenizer.unknown_fraction([])
    assert tokenizer.encode("Ba 中文字大").count(special_tokens.UNK) == 1
    assert tokenizer.unknown_fraction(["Ba 中文字大"]) == pytest.approx(4 / 8)  # with the space before each word


def test_a_vocabulary_larger_than_the_text_allows_names_the_largest(documents):
    with pytest.raises(
        ValueError, match=r"tokenizer.vocab_size \(9000\) is more than this text allows; set tokenizer.vocab_size=\d+"
    ):
        train_tokenizer(documents, TokenizerConfig(vocab_size=9000))


def test_a_vocabulary_with_no_room_for_the_characters_says_how_many_there_are():
    text = [["".join(map(chr, range(0x4E00 + 50 * k, 0x4E00 + 50 * (k + 1)))) for k in range(4)]]
    with pytest.raises(
        ValueError, match=r"tokenizer.vocab_size \(60\) has no room .*; set tokenizer.vocab_size=\d+ at the least"
    ):
        train_tokenizer(text, TokenizerConfig(vocab_size=60))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("character_coverage", 0.5), ("character_coverage", 2.0), ("train_mb", 0.0), ("vocab_size", 9)],
)
def test_senseless_settings_are_refused_before_any_text_is_read(setting, value):
    with pytest.raises(ValueError, match=rf"tokenizer.{setting} \({value}\)"):
        TokenizerConfig(**{setting: value})


@pytest.mark.parametrize("text", ["\x01\x02", "▁ ▁▁"])
def test_a_text_of_nothing_that_can_be_seen_is_refused(text):
    with pytest.raises(ValueError, match="no characters that can be seen"):
        train_tokenizer([[text], [text]], TokenizerConfig(vocab_size=50))


def test_what_is_no_vocabulary_is_refused(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad.model: not a SentencePiece model"):
        Tokenizer.load(tmp_path / "bad.model")
    with pytest.raises(ValueError, match="make it with pretrain/train_tokenizer.py"):
        Tokenizer.load(tmp_path / "none.model")


def test_a_document_ends_each_paragraph_with_eop_and_itself_with_eod(tokenizer):
    ids, _ = tokenizer.encode_document(["Ba be.", "Di do."])
    assert list(np.flatnonzero(ids == special_tokens.EOP)) == [len(tokenizer.encode("Ba be.")), len(ids) - 2]
    assert ids[-1] == special_tokens.EOD


def test_sentences_end_at_full_stops_before_capitals_and_at_paragraphs(tokenizer):
    ids, ends = tokenizer.encode_document(["Ba be. Di do bu. fa", "Go ga"])
    texts = [tokenizer.decode(part) for part in np.split(ids, ends[:-1])]
    assert [text.strip() for text in texts] == ["Ba be.", "Di do bu. fa", "Go ga"]
    assert ends[-1] == len(ids)


def test_lines_that_are_sentences_end_them_and_get_no_eop(tokenizer):
    lines = ["Ba be. Di", "do bu.", "", "fa"]
    ids, ends = tokenizer.encode_document(lines, "sentences")
    assert special_tokens.EOP not in ids
    assert [part.tolist() for part in np.split(ids, ends[:-1])] == [
        tokenizer.encode("Ba be. Di"),
        tokenizer.encode("do bu."),
        [*tokenizer.encode("fa"), special_tokens.EOD],
    ]
    assert ends[-1] == len(ids)


def test_lines_that_hold_no_token_are_no_sentences(tokenizer):
    for lines in ([""], ["", ""]):
        ids, ends = tokenizer.encode_document(lines, "sentences")
        assert ids.tolist() == [special_tokens.EOD] and ends.tolist() == [1]
    ids, ends = tokenizer.encode_document(["", "ba", ""], "sentences")
    assert ends.tolist() == [len(ids)]


def test_preprocessing_is_done_wherever_text_is_encoded(documents, tokenizer):
    uncased = Tokenizer(tokenizer.model, preprocess="uncased")
    assert uncased.encode(" Ba``  BÉ") == tokenizer.encode('ba" be')
    ids, ends = uncased.encode_document(["Ba be. Di do"])
    assert ids[:-2].tolist() == tokenizer.encode("ba be. di do")
    assert len(ends) == 2  # though no capital says that a sentence begins


def test_a_vocabulary_is_learned_from_preprocessed_text(documents):
    learned = train_tokenizer(documents, TokenizerConfig(vocab_size=200, preprocess="uncased"))
    assert learned.preprocess == "uncased"
    assert not any(piece != piece.lower() for piece in learned.pieces)


def test_a_word_starts_at_a_space_a_symbol_or_punctuation(tokenizer):
    starts = dict(zip(tokenizer.pieces, tokenizer.starts_word, strict=True))
    assert starts["<sep>"] and starts["."] and starts["-"] and not starts["£"]
    assert all(
        start == piece.startswith(special_tokens.WORD_BOUNDARY) for piece, start in starts.items() if piece.strip("▁").isalpha()
    )


def test_the_bytes_of_its_pieces_are_those_of_a_text_and_the_space_before_it(tokenizer, documents):
    for line in documents[0]:
        ids = tokenizer.encode(line)
        assert 0 not in ids  # nothing unknown
        assert tokenizer.bytes_per_piece[ids].sum() == len(line.encode()) + 1


@pytest.mark.parametrize("space", ["", " "])
def test_a_line_too_long_for_sentencepiece_is_learned_from_in_parts(space):
    words = ["山河" * 40, "水火" * 40]
    line = space.join(words * 300)
    assert len(line.encode()) > 2 * MAX_SENTENCE_BYTES
    learned = train_tokenizer([[line], ["Ba be di do."]], TokenizerConfig(vocab_size=40))
    assert {"山", "河", "水", "火"} <= set("".join(learned.pieces))
    parts = list(split_long_line(line))
    assert "".join(parts) == line and all(len(part.encode()) <= MAX_SENTENCE_BYTES for part in parts)
    if space:
        assert all(part.startswith(" ") for part in parts[1:])


LEARNS_FOR_MINUTES = """
import random
from xlpre.text.tokenizer_training import train_tokenizer
from xlpre.text.tokenizer import TokenizerConfig
draw = random.Random(1)
words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(200_000)]
def documents():
    yield [" ".join(words)]
    print("read", flush=True)
train_tokenizer(documents(), TokenizerConfig(vocab_size=8000))
"""


def test_ctrl_c_is_heard_while_a_vocabulary_is_learned():
    learning = subprocess.Popen([sys.executable, "-c", LEARNS_FOR_MINUTES], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert learning.stdout.readline() == b"read\n"
    time.sleep(1.5)
    learning.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert learning.wait(60) == -signal.SIGINT
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("odd", [None, 5, b"Ba", ["Ba", "be"]])
def test_one_text_is_encoded_at_a_time(tokenizer, odd):
    with pytest.raises(ValueError, match="one text is encoded at a time, a str, not"):
        tokenizer.encode(odd)


def test_an_id_of_another_vocabulary_is_no_text(tokenizer):
    with pytest.raises(ValueError, match="there is no piece 300 among the 300, 0 to 299"):
        tokenizer.decode([20, 300])
