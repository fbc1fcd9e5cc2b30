"""`pretrain/recl.py`, and `pretrain/evaluate.py --compare sliding`."""

import json

import pytest

from pretrain import evaluate, recl
from tests.conftest import write_folder
from tests.unit.model.conftest import make_model
from xlpre.conversion.model_folder import ModelFolder, save_folder


@pytest.fixture(scope="module")
def causal(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("recl") / "causal"
    model = make_model(two_streams=False, vocab_size=len(tokenizer), mem_len=16)
    save_folder(path, ModelFolder.from_model(model, tokenizer, "causal"))
    return path


@pytest.fixture(scope="module")
def permutation(tmp_path_factory, tokenizer):
    return write_folder(tmp_path_factory.mktemp("recl") / "permutation", tokenizer)


def test_a_group_of_models_gets_a_table_a_file_and_a_picture(causal, store, tmp_path, capsys):
    out, picture = tmp_path / "recl.jsonl", tmp_path / "recl.png"
    arguments = [
        "--text",
        str(store.path),
        "--max-context",
        "12",
        "--step",
        "4",
        "--tokens",
        "20",
        "--fraction",
        "0.5,1",
    ]
    recl.main([str(causal), str(causal), *arguments, "--out", str(out), "--picture", str(picture)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["contexts"] == [4, 8, 12] and len(lines[0]["losses"]) == 3
    assert [each["fraction"] for each in lines[0]["recl"]] == [0.5, 1.0]
    table = capsys.readouterr().out
    assert "20 tokens" in table and "RECL, r = 0.5" in table and table.count(str(causal)) == 2
    assert picture.stat().st_size > 1000


def test_models_that_cannot_be_compared_are_refused(causal, permutation, store, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("The name of the function.\n")
    for arguments, key, value in (
        ([permutation, "--text", store.path], "MODEL", permutation),
        ([causal, "--text", short], "--max-context", 400),
        ([causal, "--text", store.path, "--fraction", "2"], "--fraction", 2),
        ([causal, "--text", store.path, "--step", "0"], "--step", 0),
        ([causal, "--text", store.path, "--max-context", "60"], "--max-context", 60),
        ([causal, "--text", store.path, "--out", tmp_path / "none" / "x"], "--out", tmp_path / "none" / "x"),
    ):
        with pytest.raises(ValueError) as error:
            recl.main([str(argument) for argument in arguments])
        assert str(error.value).startswith(f"{key}={value} is invalid")


def test_cached_and_sliding_evaluation_are_compared(causal, store, tmp_path, capsys):
    out, picture = tmp_path / "sliding.jsonl", tmp_path / "sliding.png"
    arguments = [str(causal), str(store.path), "--compare", "sliding", "--lengths", "2,8,16", "--seq-len", "8"]
    evaluate.main([*arguments, "--out", str(out), "--picture", str(picture)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["attention_length"] for line in lines] == [2, 8, 16]
    assert len({line["n_compared"] for line in lines}) == 1
    for line in lines:
        assert line["times_as_fast"] == pytest.approx(line["sliding_ms"] / line["cached_ms"])
        assert abs(line["cached_loss"] - line["sliding_loss"]) < 1
    assert lines[0]["flop_ratio"] < lines[1]["flop_ratio"] < lines[2]["flop_ratio"]
    assert "times as fast" in capsys.readouterr().out and picture.stat().st_size > 1000
    evaluate.main([*arguments, "--json"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["cached_loss"] for line in printed] == pytest.approx([line["cached_loss"] for line in lines])


def test_a_comparison_that_is_impossible_is_refused(causal, permutation, store, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("The name of the function.\n")
    sliding = ["--compare", "sliding"]
    for arguments, key in (
        ([permutation, store.path, *sliding], "--compare=sliding"),
        ([causal, store.path, "--lengths", "8"], "--lengths=8"),
        ([causal, store.path, *sliding, "--mem-len", "8"], "--mem-len=8"),
        ([causal, store.path, *sliding, "--lengths", "1,8"], "--lengths=1"),
        ([causal, store.path, *sliding, "--lengths", "8,8"], "--lengths=8,8"),
        ([causal, store.path, *sliding, "--processes", "2"], "--compare=sliding"),
        ([causal, short, *sliding, "--lengths", "8"], "TEXT"),
    ):
        with pytest.raises(ValueError) as error:
            evaluate.main([str(argument) for argument in arguments])
        assert str(error.value).startswith(f"{key} is invalid"), error.value
