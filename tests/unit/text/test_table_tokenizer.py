import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.conftest import examples
from xlpre.text import special_tokens
from xlpre.text.load_tokenizer import load_tokenizer, parse_tokenizer, tokenizer_from_config
from xlpre.text.special_tokens import EOD, EOP, UNK
from xlpre.text.table_tokenizer import ByteTokenizer, CharacterTokenizer, WordTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

LINES = [" = Robert <unk> = \n", " \n", " the cat the dog , the end . \n", " a dog \n"]
CONFIG = {kind: TokenizerConfig(kind=kind) for kind in ("bytes", "characters", "words")}
KINDS = pytest.mark.parametrize("kind", CONFIG)


@KINDS
def test_a_file_of_each_kind_is_read_back_with_the_same_hash(kind, tmp_path):
    tokenizer = train_tokenizer([LINES, ["naïve 中 \x85 \u2028x"]], CONFIG[kind])
    tokenizer.save(tmp_path / "v.model")
    loaded = load_tokenizer(tmp_path / "v.model")
    assert type(loaded) is type(tokenizer) and loaded.pieces == tokenizer.pieces and loaded.sha256 == tokenizer.sha256
    assert tuple(loaded.pieces[:9]) == special_tokens.SPECIAL_TOKENS
    assert len(loaded) == len(loaded.pieces) == len(loaded.bytes_per_piece) == len(loaded.starts_word)


@settings(max_examples=examples(150))
@given(st.text(), st.lists(st.text(min_size=1), max_size=4))
def test_bytes_keep_every_text(text, lines):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids, ends = tokenizer.encode_document(lines)
    assert bytes(i - 9 for i in ids[:-1]) == "".join(f"{line}\n" for line in lines).encode() and ids[-1] == EOD
    assert ends[-1] == len(ids) and (np.diff(ends, prepend=0) > 0).all()


@settings(max_examples=examples(150))
@given(st.lists(st.binary(min_size=1), min_size=1, max_size=5))
def test_a_verbatim_text_is_its_bytes_and_no_special_token(parts):
    document = [part.decode(errors="surrogateescape") for part in parts]
    ids, ends, document_ends = ByteTokenizer().encode_documents([document], "verbatim")
    assert bytes(i - 9 for i in ids) == b"".join(parts)
    assert ends[-1] == document_ends[-1] == len(ids) and (np.diff(ends, prepend=0) > 0).all()


@settings(max_examples=examples(150))
@given(st.text(alphabet="ab .\n\t\x0b\x1cé中", max_size=30))
def test_offsets_name_the_characters_of_each_token(text):
    words = train_tokenizer([["a b ab ba . a."]], CONFIG["words"])
    characters = train_tokenizer([["ab .é中"]], CONFIG["characters"])
    for tokenizer in (words, characters, ByteTokenizer()):
        offsets = tokenizer.encode_with_offsets(text)
        assert offsets.ids == tokenizer.encode(text)
        assert len(offsets.starts) == len(offsets.ends) == len(offsets.ids)
        assert (np.diff(offsets.starts) >= 0).all() and (np.diff(offsets.ends) >= 0).all()
        for index, i in enumerate(offsets.ids):
            piece, span = tokenizer.pieces[i].lstrip("▁"), offsets.span_text(index, index)
            if i > EOP and piece.strip() and not piece.startswith("<0x"):
                assert span == piece


def test_words_are_counted_and_the_rest_is_unknown():
    tokenizer = train_tokenizer([LINES], TokenizerConfig(kind="words", min_count=2))
    assert tokenizer.pieces[9:] == ["▁the", "▁=", "▁dog"]  # by frequency, then by first occurrence; <unk> is no word
    assert tokenizer.encode(" the cat <unk> dog \n") == [9, UNK, UNK, 11, EOP]
    assert tokenizer.unknown_fraction(["the cat <unk>"]) == pytest.approx(
        4 / 14
    )  # <unk> in the text is no unknown word
    assert tokenizer.decode([9, 0, EOP, 11]) == "the ⁇\ndog"


@pytest.mark.parametrize(("kind", "n_kept"), [("words", 11), ("characters", 11)])
def test_the_most_frequent_pieces_are_kept(kind, n_kept):
    text = [" ".join(chr(ord("a") + i) for i in range(20) for _ in range(30 - i))]
    tokenizer = train_tokenizer([text], TokenizerConfig(kind=kind, vocab_size=9 + n_kept))
    kept = {piece.lstrip("▁") for piece in tokenizer.pieces[9:]} - {"", "<0x0A>"}
    assert len(tokenizer) == 9 + n_kept and kept == set("abcdefghijklmnopqrst"[: len(kept)]) and len(kept) >= 9


def test_a_line_end_of_a_verbatim_text_is_one_token_of_each_kind():
    for kind, config in CONFIG.items():
        tokenizer = train_tokenizer([LINES], config)
        ids, _, ends = tokenizer.encode_documents([LINES, [" a dog"]], "verbatim")
        newline = EOP if kind == "words" else tokenizer.pieces.index("<0x0A>")
        assert list(ids).count(newline) == 4 and EOD not in ids and len(ends) == 2
        assert (
            tokenizer.decode(ids).split()
            == "".join([*LINES, " a dog"]).replace("<unk>", "⁇" if kind == "words" else "<unk>").split()
        )
    assert [len(part) for part in train_tokenizer([LINES], CONFIG["words"])._encode(LINES)] == [5, 1, 9, 3]


@KINDS
def test_bytes_per_piece_sum_to_the_bytes_of_the_text(kind):
    tokenizer = train_tokenizer([["naïve cat 中文", "end"]], CONFIG[kind])
    ids, _ = tokenizer.encode_document(["naïve cat 中文", "end cat"])
    n_bytes = len("naïve cat 中文\nend cat\n\n".encode())
    # a word counts the space before it, also at the start of a line
    assert tokenizer.bytes_per_piece[ids].sum() == n_bytes + (2 if kind == "words" else 0)


def test_sentences_of_characters_and_bytes_end_as_sentences_of_pieces_do(tokenizer):
    lines = ["Ba be. Di do bu. fa", "Go ga"]
    for kind, config in CONFIG.items():
        table = train_tokenizer([lines], config)
        ids, ends = table.encode_document(lines)
        texts = [table.decode(part).strip() for part in np.split(ids, ends[:-1])]
        assert texts == ["Ba be.", "Di do bu. fa", "Go ga"], kind


def test_a_newline_separates_sentences_of_a_table_with_newlines():
    ids, ends = ByteTokenizer().encode_document(["Ba.", "Di"], "sentences")
    assert [bytes(i - 9 for i in part if i > EOD) for part in np.split(ids, ends[:-1])] == [b"Ba.\n", b"Di\n"]


def test_a_span_of_bytes_does_not_start_inside_of_a_character():
    tokenizer = ByteTokenizer()
    starts = [bool(tokenizer.starts_word[i]) for i in tokenizer.encode("a é.\n")]
    assert starts == [False, True, False, False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "syllables"}, "holds no vocabulary"),
        ({"format_version": 2}, "has format 2, this version of xlpre reads 1"),
        ({"pieces": ["a", "a"]}, "1 entries .* repeated or special"),
        ({"pieces": ["a", "<mask>"]}, "1 entries .* repeated or special"),
        ({"pieces": ["a b"]}, "without white space"),
        ({"pieces": "ab"}, "must be a list"),
        ({"kind": "characters", "pieces": ["a"]}, "single characters with a newline"),
        ({"kind": "characters", "pieces": ["\n", "ab"]}, "single characters with a newline"),
    ],
)
def test_an_invalid_table_is_refused(change, message):
    content = json.dumps({**json.loads(WordTokenizer(["a"]).content), **change}).encode()
    with pytest.raises(ValueError, match=rf"^file.* {message}.*\. Copy the file again"):
        parse_tokenizer(content, "file")


def test_a_truncated_table_is_refused():
    with pytest.raises(ValueError, match="^file cannot be read: .* Copy the file again"):
        parse_tokenizer(CharacterTokenizer(["\n", "a"]).content[:-9], "file")


def test_a_file_of_another_kind_than_configured_is_refused(tmp_path):
    ByteTokenizer().save(tmp_path / "v.model")
    with pytest.raises(ValueError, match=r"tokenizer.kind=words is invalid: .* Set tokenizer.kind=bytes"):
        tokenizer_from_config(TokenizerConfig(kind="words", path=str(tmp_path / "v.model")))


@KINDS
def test_a_table_does_not_clean_text(kind):
    with pytest.raises(ValueError, match=r"tokenizer.preprocess=cased is invalid: .* Set tokenizer.preprocess=none"):
        TokenizerConfig(kind=kind, preprocess="cased")
    with pytest.raises(ValueError, match="preprocess=uncased is invalid"):
        parse_tokenizer(train_tokenizer([LINES], CONFIG[kind]).content, "file", "uncased")


def test_a_table_may_have_fewer_pieces_than_a_sentencepiece_vocabulary_has_symbols():
    assert len(train_tokenizer([["ACGT"]], TokenizerConfig(kind="characters", vocab_size=14))) == 14
    with pytest.raises(ValueError, match="tokenizer.vocab_size=9 is invalid"):
        TokenizerConfig(kind="characters", vocab_size=9)
    with pytest.raises(ValueError, match="tokenizer.vocab_size=18 is invalid"):
        TokenizerConfig(vocab_size=18)


def test_a_text_without_frequent_pieces_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer.min_count=9 is invalid: no piece .* Lower it"):
        train_tokenizer([LINES], TokenizerConfig(kind="words", min_count=9))
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size=10 is invalid: it must be above 10"):
        train_tokenizer([LINES], TokenizerConfig(kind="characters", vocab_size=10))
    with pytest.raises(ValueError, match=r"tokenizer.min_count=0 is invalid: .* Set 1"):
        TokenizerConfig(min_count=0)


def test_an_id_outside_of_the_table_is_refused():
    with pytest.raises(ValueError, match="token id 265 is invalid: ids are 0 to 264"):
        ByteTokenizer().decode([265])
