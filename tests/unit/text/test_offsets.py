"""Tokens are found again in the text that they are of, to the character."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from xlpre.text.offsets import clean_text_with_offsets
from xlpre.text.preprocess import clean_text
from xlpre.text.tokenizer import Tokenizer

DATA = Path(os.environ.get("XLPRE_DATA", REPOSITORY.parent / "shared" / "data"))
PREPROCESS = ("none", "cased", "uncased")
ODD = "aZéñßΣσİﬁ½１Åﷺ가각ท東`'\"“…  \t\n\u00a0\u200b\u2028\u3000\ufeff\u0301\u0302\u0345▁,.20;\u037e\u2126\U0001f600"
TEXTS = st.one_of(st.text(max_size=40), st.text(alphabet=ODD, max_size=40))


def with_preprocess(tokenizer, preprocess):
    return Tokenizer(tokenizer.model, preprocess=preprocess)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS))
def test_text_that_is_located_is_the_text_that_is_read(text, preprocess):
    cleaned, places = clean_text_with_offsets(text, preprocess)
    assert cleaned == clean_text(text, preprocess)
    assert len(places) == len(cleaned) + 1 and (places[1:] >= places[:-1]).all() and places[-1] == len(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS))
def test_tokens_with_places_are_those_that_are_read(tokenizer, text, preprocess):
    of = with_preprocess(tokenizer, preprocess)
    found = of.encode_with_offsets(text)
    assert found.ids == of.encode(text)
    assert len(found.starts) == len(found.ends) == len(found.ids)
    for places in (found.starts, found.ends):
        assert (places[1:] >= places[:-1]).all() and ((places >= 0) & (places <= len(text))).all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXTS, preprocess=st.sampled_from(PREPROCESS), data=st.data())
def test_tokens_of_any_stretch_hold_it_and_no_token_too_many(tokenizer, text, preprocess, data):
    found = with_preprocess(tokenizer, preprocess).encode_with_offsets(text)
    first = int(found.starts[0]) if found.ids else len(text)
    seen = [
        place
        for place in range(first, len(text))
        if any(begin <= place < end for begin, end in zip(found.starts, found.ends, strict=True))
    ]
    if not seen:
        return
    begin, last = sorted((data.draw(st.sampled_from(seen)), data.draw(st.sampled_from(seen))))
    a, b = found.token_range(begin, last + 1)
    assert found.starts[a] <= begin and last < found.ends[b]
    assert text[begin : last + 1] in found.span_text(a, b)
    assert found.ends[a] > begin and found.starts[b] <= last  # neither could be left out
    assert a == 0 or found.ends[a - 1] <= begin
    assert b == len(found.ids) - 1 or found.starts[b + 1] > last


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
def test_an_answer_between_spaces_and_quotes_comes_back_exactly(tokenizer, text, answer, preprocess):
    found = with_preprocess(tokenizer, preprocess).encode_with_offsets(text)
    begin = text.index(answer)
    assert found.span_text(*found.token_range(begin, begin + len(answer))) == answer


@pytest.mark.parametrize("name", ["dev-v1.1", "dev-v2.0"])
def test_every_answer_of_squad_comes_back_from_its_tokens(name):
    path, vocabulary = DATA / "squad" / f"{name}.json.gz", DATA / "spm_derived" / "xlnet_style_32k.model"
    if not (path.exists() and vocabulary.exists()):
        pytest.skip(f"no {path} or no {vocabulary}; set XLPRE_DATA")
    tokenizer = Tokenizer.load(vocabulary, "cased")
    n_answers = n_equal = 0
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        found = tokenizer.encode_with_offsets(paragraph["context"])
        answers = {(a["answer_start"], a["text"]) for qa in paragraph["qas"] for a in qa["answers"]}
        for begin, text in answers:
            first, last = found.token_range(begin, begin + len(text))
            stretch = found.span_text(first, last)
            n_answers, n_equal = n_answers + 1, n_equal + (stretch == text.strip())
            # what is more is of the first and the last token, which hold a part of the answer each
            assert text.strip() in stretch, (text, stretch)
            assert found.ends[first] > begin and found.starts[last] < begin + len(text)
    assert n_answers > 7000 and n_equal / n_answers > 0.99
