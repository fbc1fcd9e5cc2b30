"""Character offsets of tokens."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, examples
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.offsets import clean_text_with_offsets
from xlpre.text.preprocess import clean_text
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer

DATA = Path(os.environ.get("XLPRE_DATA", REPOSITORY.parent / "shared" / "data"))
PREPROCESS = ("none", "cased", "uncased")
UNUSUAL = (
    "aZéñßΣσİﬁ½１Åﷺ가각ท東`'\"“…  \t\n\u00a0\u200b\u2028\u3000\ufeff\u0301\u0302\u0345▁,.20;\u037e\u2126\U0001f600"
)
TEXTS = st.one_of(st.text(max_size=40), st.text(alphabet=UNUSUAL, max_size=40))


def with_preprocess(tokenizer, preprocess):
    return SentencePieceTokenizer(tokenizer.content, preprocess=preprocess)


@settings(max_examples=examples(200))
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS))
def test_text_cleaned_with_offsets_is_the_cleaned_text(text, preprocess):
    cleaned, positions = clean_text_with_offsets(text, preprocess)
    assert cleaned == clean_text(text, preprocess)
    assert len(positions) == len(cleaned) + 1
    assert (positions[1:] >= positions[:-1]).all() and positions[-1] == len(text)


@settings(max_examples=examples(300))
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS))
def test_ids_with_offsets_are_the_encoded_ids(tokenizer, text, preprocess):
    cleaning_tokenizer = with_preprocess(tokenizer, preprocess)
    offsets = cleaning_tokenizer.encode_with_offsets(text)
    assert offsets.ids == cleaning_tokenizer.encode(text)
    assert len(offsets.starts) == len(offsets.ends) == len(offsets.ids)
    for positions in (offsets.starts, offsets.ends):
        assert (positions[1:] >= positions[:-1]).all() and ((positions >= 0) & (positions <= len(text))).all()


@settings(max_examples=examples(300))
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS), data=st.data())
def test_a_token_range_covers_its_characters_with_no_token_too_many(tokenizer, text, preprocess, data):
    offsets = with_preprocess(tokenizer, preprocess).encode_with_offsets(text)
    first = int(offsets.starts[0]) if offsets.ids else len(text)
    covered = [
        position
        for position in range(first, len(text))
        if any(begin <= position < end for begin, end in zip(offsets.starts, offsets.ends, strict=True))
    ]
    if not covered:
        return
    begin, last = sorted((data.draw(st.sampled_from(covered)), data.draw(st.sampled_from(covered))))
    a, b = offsets.token_range(begin, last + 1)
    assert offsets.starts[a] <= begin and last < offsets.ends[b]
    assert text[begin : last + 1] in offsets.span_text(a, b)
    assert offsets.ends[a] > begin and offsets.starts[b] <= last  # neither could be left out
    assert a == 0 or offsets.ends[a - 1] <= begin
    assert b == len(offsets.ids) - 1 or offsets.starts[b + 1] > last


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("ba  de\u0301bi", "de\u0301bi"),
        ("``ba'' be", "ba"),
        ("\ufeffba \u3000 be\u200bbi ", "be"),
        ("ba 20,000 be", "20,000"),
        ("ba ½ be", "½"),
        ("ﬁ ba", "ﬁ"),
        (" BA\u2028be", "BA"),
        ("İba be", "İba"),
    ],
)
@pytest.mark.parametrize("preprocess", PREPROCESS)
def test_an_answer_between_spaces_and_quotes_is_recovered_exactly(tokenizer, text, answer, preprocess):
    offsets = with_preprocess(tokenizer, preprocess).encode_with_offsets(text)
    begin = text.index(answer)
    assert offsets.span_text(*offsets.token_range(begin, begin + len(answer))) == answer


@pytest.mark.parametrize("name", ["dev-v1.1", "dev-v2.0"])
def test_answers_of_squad_are_recovered_from_their_tokens(name):
    path, vocabulary = DATA / "squad" / f"{name}.json.gz", DATA / "spm_derived" / "xlnet_style_32k.model"
    if not (path.exists() and vocabulary.exists()):
        pytest.skip(f"no {path} or no {vocabulary}; set XLPRE_DATA")
    tokenizer = load_tokenizer(vocabulary, "cased")
    n_answers = n_equal = 0
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        offsets = tokenizer.encode_with_offsets(paragraph["context"])
        answers = {(a["answer_start"], a["text"]) for qa in paragraph["qas"] for a in qa["answers"]}
        for begin, text in answers:
            first, last = offsets.token_range(begin, begin + len(text))
            recovered = offsets.span_text(first, last)
            n_answers, n_equal = n_answers + 1, n_equal + (recovered == text.strip())
            # the first and the last token may contain more than the answer
            assert text.strip() in recovered, (text, recovered)
            assert offsets.ends[first] > begin and offsets.starts[last] < begin + len(text)
    assert n_answers > 7000 and n_equal / n_answers > 0.99
