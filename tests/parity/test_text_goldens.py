"""Token ids and sentences of text equal the original (zihangdai/xlnet prepro_utils.py, data_utils.py `_create_data`)."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from xlpre.text import special_tokens
from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.preprocess import preprocess_text, split_comma_after_digit
from xlpre.text.sentence_boundaries import concatenate_documents


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_preprocessing_equals_the_original(path):
    cases = json.loads(path.read_text())["preprocess_text"]
    assert cases
    for case in cases:
        expected = case.pop("out")
        assert preprocess_text(**case) == expected, case


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_special_tokens_have_the_ids_of_the_original(path):
    pieces = load_tokenizer(path.with_name("text_tiny_sp.model")).pieces
    special = json.loads(path.read_text())["special_ids"]
    assert special
    assert {symbol: pieces.index(symbol) for symbol in special} == special


@pytest.mark.parametrize("path", files("text_goldens.json"))
def test_commas_after_digits_are_tokenized_as_in_the_original(path):
    tokenizer = load_tokenizer(path.with_name("text_tiny_sp.model"), preprocess="cased")
    cases = json.loads(path.read_text())["encode"]
    assert cases
    for case in cases:
        encode = tokenizer._processor.encode_as_pieces
        parts = [part for piece in case["raw_pieces"] for part in split_comma_after_digit(piece, encode)]
        assert parts == case["pieces"]
        assert tokenizer._processor.piece_to_id(case["pieces"]) == case["ids"]
        # these cases are from `encode_ids` of the original, whose input is already preprocessed
        if preprocess_text(case["text"]) == case["text"]:
            assert tokenizer.encode(case["text"]) == case["ids"], case["text"]


def stream_of(lines, folder):
    """Token ids and sentence ends of one file."""
    (folder / "file.txt").write_text("\n".join(lines) + "\n")
    ids, ends = [], []
    for document in read_documents(TextConfig(source=str(folder / "file.txt"), line_type="sentences")):
        numbers = [[int(word) for word in line.split()] for line in document]  # lines of ids, which need no tokenizer
        new_ids, new_ends, _ = concatenate_documents([numbers], "sentences", np.array([]))
        ends += [len(ids) + end for end in new_ends.tolist()]
        ids += new_ids.tolist()
    return ids, ends


def remove_tokens(ids, ends, drop):
    """Remove the tokens at the positions `drop`, and sentences that become empty."""
    new_ends = [sum(i not in drop for i in range(end)) for end in ends]
    return [token for i, token in enumerate(ids) if i not in drop], sorted(set(new_ends) - {0})


@pytest.mark.parametrize("path", files("data_create_data.npz"))
def test_sentence_lines_give_the_token_stream_of_the_original(path, tmp_path):
    arrays = np.load(path)
    cases = sorted(name.split("/")[0] for name in arrays.files if name.endswith("/config"))
    assert cases
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        shards = [lines for lines in config["files"] if lines]
        np.random.seed(100 * config["task"] + config["pass_id"])  # order of the files in the original
        data, flags = arrays[f"{case}/data"].tolist(), arrays[f"{case}/sent_ids"]
        start = 0
        for index in np.random.permutation(len(shards)):
            lines = shards[index]
            blank = sum(not line.strip() for line in lines)
            end = start + sum(len(line.split()) for line in lines) + blank * config["use_eod"]
            expected = data[start:end]
            expected_ends = [i + 1 for i in range(end - start - 1) if flags[start + i] != flags[start + i + 1]]
            expected_ends.append(end - start)
            assert start == 0 or flags[start] != flags[start - 1]  # a file starts a sentence, as a document does here
            start = end
            ids, ends = stream_of(lines, tmp_path)
            if config["use_eod"]:
                # A known difference: the original writes an <eod> for every blank line, xlpre writes one after each document.
                # An <eod> after another one, or at the start of the file, has no document before it ...
                repeated = {
                    i
                    for i, token in enumerate(expected)
                    if token == special_tokens.EOD and expected[:i][-1:] in ([], [7])
                }
                expected, expected_ends = remove_tokens(expected, expected_ends, repeated)
                if lines[-1].strip():  # ... and the last document of a file may end without a blank line
                    expected.append(special_tokens.EOD)
                    expected_ends[-1] += 1
            else:  # the original can omit <eod>, xlpre cannot
                ids, ends = remove_tokens(ids, ends, {i for i, token in enumerate(ids) if token == special_tokens.EOD})
            assert ids == expected, (case, index)
            assert ends == expected_ends, (case, index)
        assert start == len(data)
