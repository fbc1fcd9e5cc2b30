"""`pretrain/score.py`: scores of lines and accuracies on minimal pairs."""

import json
import os

import pytest

import xlpre
from pretrain import score as command
from tests.conftest import write_folder
from xlpre.conversion.model_folder import load_folder
from xlpre.inference import score, scoring

SENTENCES = ["Ba di bu.", "Ke lo.", "Ba di bu ke lo \N{SNOWMAN} mi."]


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("score") / "model", tokenizer)


@pytest.fixture
def sentences(tmp_path):
    file = tmp_path / "sentences.txt"
    file.write_text("\n".join(SENTENCES), "utf-8")
    return file


@pytest.fixture
def pairs(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("first", "second"):
        rows = [
            {"sentence_good": "Ba di.", "sentence_bad": bad, "UID": name, "linguistics_term": "all"}
            for bad in SENTENCES
        ]
        rows.append({**rows[0], "sentence_bad": "Ba di."})  # a tie
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def test_scores_of_lines_equal_those_from_python(model, sentences, tmp_path, capsys):
    command.main([str(model), str(sentences), "--mode", "any-order", "--orders", "3", "--tokens"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    folder = load_folder(model)
    expected = score(folder.model(), folder.tokenizer, SENTENCES, "any-order", n_orders=3)
    assert [record["text"] for record in records] == SENTENCES
    for record, text in zip(records, expected, strict=True):
        assert record["log_likelihood"] == pytest.approx(text.log_likelihood) and record["std"] == pytest.approx(
            text.std
        )
        assert record["n_tokens"] == text.n_tokens == len(record["tokens"]) and len(record["by_order"]) == 3
        assert sum(record["token_log_likelihoods"]) == pytest.approx(text.log_likelihood)
    assert [record["n_unknown"] for record in records] == [0, 0, 1]
    command.main([str(model), str(sentences), "--out", str(tmp_path / "out.jsonl")])
    (first, *_) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert first.keys() == {"text", "log_likelihood", "n_tokens", "n_unknown"} and not capsys.readouterr().out


def test_options_are_those_of_python_and_change_the_scores(model, sentences, capsys):
    lm = xlpre.load(model)

    def scores(*options):
        command.main([str(model), str(sentences), *options])
        return [json.loads(line)["log_likelihood"] for line in capsys.readouterr().out.splitlines()]

    plain = scores()
    for options, settings in (
        (["--prefix", "Ba di."], {"prefix": "Ba di."}),
        (["--window", "4", "--mem-len", "0"], {"window": 4, "mem_len": 0}),
        (["--mode", "any-order", "--orders", "2", "--seed", "3"], {"mode": "any-order", "n_orders": 2, "seed": 3}),
    ):
        expected = [score.log_likelihood for score in lm.score(SENTENCES, **settings)]
        assert scores(*options) == pytest.approx(expected, abs=1e-3) and scores(*options) != pytest.approx(plain)


def test_lines_of_standard_input_are_scored(model, sentences, capfd):
    saved = os.dup(0)
    with open(sentences) as file:
        os.dup2(file.fileno(), 0)
    try:
        command.main([str(model)])
    finally:
        os.dup2(saved, 0)
        os.close(saved)
    assert [json.loads(line)["text"] for line in capfd.readouterr().out.splitlines()] == SENTENCES


def test_pairs_give_accuracies_a_table_and_a_picture(model, pairs, tmp_path, capsys):
    out, picture = tmp_path / "pairs.json", tmp_path / "pairs.png"
    command.main([str(model), "--pairs", str(pairs), "--out", str(out), "--picture", str(picture)])
    record, table = json.loads(out.read_text()), capsys.readouterr().out
    assert record["mode"] == "pll" and record["n_pairs"] == 8 and record["paradigms"].keys() == {"first", "second"}
    assert record["accuracy"] == pytest.approx(sum(record["paradigms"].values()) / 2)
    assert record["accuracy"] <= 75  # one pair of four is a tie
    assert "mean over paradigms" in table and "first" in table and picture.exists()
    command.main([str(model), "--pairs", str(pairs / "first.jsonl"), "--limit", "2", "--mode", "any-order"])
    assert "any-order, 4 orders" in capsys.readouterr().out
    command.main([str(model), "--pairs", str(pairs), "--prefix", "Ba.", "--out", str(out)])
    assert json.loads(out.read_text())["prefix"] == "Ba." and "pll, prefix 'Ba.'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "causal"], "mode=causal is invalid for a permutation model"),
        (["--orders", "0"], "--orders=0 is invalid"),
        (["--orders", "3"], "--orders=3 is invalid without --mode any-order: it has no effect"),
        (["--seed", "3", "--mode", "pll"], "--seed=3 is invalid without --mode any-order"),
        (["--limit", "3"], "--limit=3 is invalid without --pairs"),
        (["--tokens", "--pairs", "p"], "--tokens is invalid with --pairs"),
        (["--out", "no/such/file"], "the folder no/such does not exist"),
        (["--batch-tokens", "0"], "--batch-tokens=0 is invalid"),
        (["no/such/file"], "FILE=no/such/file is invalid: there is no such file"),
        (["/dev/null"], "FILE=/dev/null is invalid: it is not a regular file"),
        (["--out", "/"], "--out=/ is invalid: it is a folder"),
    ],
)
def test_invalid_options_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        command.main([str(model), *arguments])


def test_files_of_pairs_pipes_and_devices_are_refused(model, pairs, sentences, tmp_path):
    file = pairs / "first.jsonl"
    with pytest.raises(ValueError, match=f"FILE={file} is invalid: .* use --pairs {file}"):
        command.main([str(model), str(file)])
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match=f"--out={out} is invalid: it is a device or a pipe"):
            command.main([str(model), str(sentences), "--out", str(out)])


def test_pairs_with_unknown_characters_are_noted(model, pairs, capsys):
    command.main([str(model), "--pairs", str(pairs)])
    assert "note: pairs with <unk>: 2 of 8." in capsys.readouterr().err


def test_an_empty_file_is_refused(model, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"FILE=\S*empty.txt is invalid: it is empty"):
        command.main([str(model), str(tmp_path / "empty.txt")])


def test_an_empty_line_is_refused_with_its_number_and_no_file_is_left(model, sentences, tmp_path, monkeypatch):
    sentences.write_text("Ba di.\n\nBa.\n")
    monkeypatch.setattr(scoring, "score", lambda *_, **__: pytest.fail("a line was scored"))
    with pytest.raises(ValueError, match=r"sentences.txt, line 2: text='' is invalid: a text needs at least one token"):
        command.main([str(model), str(sentences), "--out", str(tmp_path / "out.jsonl")])
    assert [path.name for path in tmp_path.iterdir()] == ["sentences.txt"]
