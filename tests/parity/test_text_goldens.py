"""Text becomes the original's ids and sentences (zihangdai/xlnet prepro_utils.py, data_utils.py `_create_data`)."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from xlpre.text import special_tokens
from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.preprocess import preprocess_text, split_comma_after_digit
from xlpre.text.sentence_boundaries import concatenate_documents
from xlpre.text.tokenizer import Tokenizer


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_text_is_cleaned_as_the_original_cleans_it(path):
    cases = json.loads(path.read_text())["preprocess_text"]
    assert cases
    for case in cases:
        expected = case.pop("out")
        assert preprocess_text(**case) == expected, case


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_special_symbols_have_the_originals_ids(path):
    pieces = Tokenizer.load(path.with_name("text_tiny_sp.model")).pieces
    special = json.loads(path.read_text())["special_ids"]
    assert special
    assert {symbol: pieces.index(symbol) for symbol in special} == special


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_commas_after_digits_are_pieces_as_in_the_original(path):
    tokenizer = Tokenizer.load(path.with_name("text_tiny_sp.model"), preprocess="cased")
    cases = json.loads(path.read_text())["encode"]
    assert cases
    for case in cases:
        encode = tokenizer._processor.encode_as_pieces
        parts = [part for piece in case["raw_pieces"] for part in split_comma_after_digit(piece, encode)]
        assert parts == case["pieces"]
        assert tokenizer._processor.piece_to_id(case["pieces"]) == case["ids"]
        # these cases are of the original's `encode_ids` alone, which is handed text that was cleaned before
        if preprocess_text(case["text"]) == case["text"]:
            assert tokenizer.encode(case["text"]) == case["ids"], case["text"]


def stream_of(lines, folder):
    """Our ids and sentence ends of one file."""
    (folder / "file.txt").write_text("\n".join(lines) + "\n")
    ids, ends = [], []
    for document in read_documents(TextConfig(source=str(folder / "file.txt"), line_type="sentences")):
        numbers = [[int(word) for word in line.split()] for line in document]  # lines of ids: no vocabulary is asked
        more, their_ends, _ = concatenate_documents([numbers], "sentences", np.array([]))
        ends += [len(ids) + end for end in their_ends.tolist()]
        ids += more.tolist()
    return ids, ends


def without(ids, ends, drop):
    """A stream without the tokens at `drop`; a sentence of which nothing is left is gone."""
    left = [sum(i not in drop for i in range(end)) for end in ends]
    return [token for i, token in enumerate(ids) if i not in drop], sorted(set(left) - {0})


@pytest.mark.parametrize("path", files("data_create_data.npz"))
def test_lines_that_are_sentences_become_the_originals_stream(path, tmp_path):
    arrays = np.load(path)
    cases = sorted(name.split("/")[0] for name in arrays.files if name.endswith("/config"))
    assert cases
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        shards = [lines for lines in config["files"] if lines]
        np.random.seed(100 * config["task"] + config["pass_id"])  # the original's order of files, which we do not offer
        data, flags = arrays[f"{case}/data"].tolist(), arrays[f"{case}/sent_ids"]
        begin = 0
        for index in np.random.permutation(len(shards)):
            lines = shards[index]
            blank = sum(not line.strip() for line in lines)
            end = begin + sum(len(line.split()) for line in lines) + blank * config["use_eod"]
            theirs = data[begin:end]
            their_ends = [i + 1 for i in range(end - begin - 1) if flags[begin + i] != flags[begin + i + 1]]
            their_ends.append(end - begin)
            assert begin == 0 or flags[begin] != flags[begin - 1]  # a file begins a sentence, here as a document does
            begin = end
            ours, our_ends = stream_of(lines, tmp_path)
            if config["use_eod"]:
                # A departure: they write an <eod> for every blank line, we write one after each document.
                # What follows another one, or opens the file, has no document before it ...
                repeated = {
                    i for i, token in enumerate(theirs) if token == special_tokens.EOD and theirs[:i][-1:] in ([], [7])
                }
                theirs, their_ends = without(theirs, their_ends, repeated)
                if lines[-1].strip():  # ... and the last document of a file need not be followed by a blank line
                    theirs.append(special_tokens.EOD)
                    their_ends[-1] += 1
            else:  # they can leave it out, we do not offer that
                ours, our_ends = without(
                    ours, our_ends, {i for i, token in enumerate(ours) if token == special_tokens.EOD}
                )
            assert ours == theirs, (case, index)
            assert our_ends == their_ends, (case, index)
        assert begin == len(data)
