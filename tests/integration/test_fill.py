"""`pretrain/fill.py`: blanks of a text, filled in jointly, independently, or with given answers."""

import pytest

from pretrain import fill as command
from tests.conftest import write_folder
from tests.unit.model.conftest import make_model
from xlpre.common.cli_main import run_main
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.inference import fill
from xlpre.inference.cloze import format_result, predict_blanks

ONE, TWO = "Ba ____ di.", "Ba ____ di ____{1,2}."


@pytest.fixture(scope="module")
def path(tokenizer, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("fill") / "model", tokenizer)


def output(capsys, *args):
    command.main([str(arg) for arg in args])
    return capsys.readouterr().out.splitlines()


def test_a_single_piece_is_shown_as_before_and_independent_blanks_each_have_a_line(path, tokenizer, capsys):
    model = load_folder(path).model()
    expected = format_result(predict_blanks(model, tokenizer, ONE)).splitlines()
    assert output(capsys, path, ONE) == expected and len(expected[1].split("%")) == 6
    both = "Ba ____ di ____{2}."
    expected = format_result(predict_blanks(model, tokenizer, both)).splitlines()
    assert output(capsys, path, both, "--independent") == expected and len(expected) == 4
    assert len(output(capsys, path, ONE, "--top", 3)[1].split("%")) == 4


def test_tables_have_the_fillings_of_python(path, tokenizer, capsys):
    model = load_folder(path).model()
    (best, *_) = fill(model, tokenizer, [TWO], order="confident", beam=7)[0]
    lines = output(capsys, path, TWO, "--order", "confident", "--beam", 7, "--top", 4)
    assert lines[0] == TWO and len(lines) == 6
    values = [
        f"{best.log_probability:.2f}",
        f"{best.log_probability / best.n_pieces:.2f}",
        f"{best.independent_log_probability:.2f}",
    ]
    assert lines[2].split()[-3:] == values and lines[2].strip().startswith(" | ".join(best.answers))
    (ranked,) = fill(model, tokenizer, [ONE], options=[["bu", "Ke lo"]])
    lines = output(capsys, path, ONE, "--options", "bu,Ke lo")
    assert [line.rsplit(maxsplit=4)[0].strip() for line in lines[2:]] == [filling.answers[0] for filling in ranked]
    samples = output(capsys, path, ONE, "--num-samples", 6, "--temperature", 0.5, "--seed", 2)
    assert len(samples) == 8 and samples == output(
        capsys, path, ONE, "--num-samples", 6, "--temperature", 0.5, "--seed", 2
    )


def test_the_length_penalty_is_that_of_python_and_changes_the_order(path, tokenizer, capsys):
    model = load_folder(path).model()
    answers = {}
    for penalty in (0, 2):
        (expected,) = fill(model, tokenizer, ["Ba ____{2,3}."], beam=5, length_penalty=penalty)
        answers[penalty] = [filling.answers[0] for filling in expected]
        lines = output(capsys, path, "Ba ____{2,3}.", "--beam", 5, "--length-penalty", penalty)[2:]
        assert all(line.strip().startswith(answer) for line, answer in zip(lines, answers[penalty], strict=True))
    assert answers[0] != answers[2]


def test_unknown_characters_of_the_text_are_noted(path, capsys):
    assert "note: 1 token of the text is <unk>" in output(capsys, path, "Ba \N{SNOWMAN} ____.")[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Ba di."], "it has no blank"),
        (["Ba ____.", "--top", "0"], "--top=0 is invalid"),
        (["Ba ____.", "--seed", "-1"], "--seed=-1 is invalid"),
        (["Ba ____.", "--order", "last"], "--order=last is invalid: it must be one of"),
        (["Ba ____.", "--options", "bu", "--independent"], "--options is invalid with --independent"),
        (
            ["Ba ____.", "--options", "bu", "--options", "di"],
            "one list of answers for each blank, and 'Ba ____.' has 1 blank.",
        ),
        (["Ba ____.", "--options", "bu,"], "options='' is invalid: it has no tokens"),
        (["Ba ____.", "--options", "bu,\N{SNOWMAN}"], "the vocabulary does not have a character of it"),
        (["Ba ____.", "--temperature", "0.5"], "--temperature=0.5 is invalid without --num-samples"),
        (["Ba ____.", "--independent", "--beam", "3"], "--beam=3 is invalid with --independent: it has no effect"),
        (["Ba ____.", "--num-samples", "3", "--top", "2"], "--top=2 is invalid with --num-samples"),
        (["Ba ____{1,2}.", "--independent"], "each blank needs one length"),
        (["ba " * 3000 + "____"], "the limit is 2,048"),
    ],
)
def test_bad_input_is_a_one_line_error(path, monkeypatch, capsys, args, message):
    monkeypatch.setattr("sys.argv", ["fill.py", str(path), *args])
    with pytest.raises(SystemExit) as ended:
        run_main(command.main)
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(errors) == 1 and message in errors[0]


def test_a_causal_model_is_refused_with_the_commands_that_fit(tokenizer, tmp_path):
    model = make_model(False, vocab_size=len(tokenizer))
    save_folder(tmp_path / "causal", ModelFolder.from_model(model, tokenizer, "causal"))
    for mode in ([], ["--independent"]):
        with pytest.raises(ValueError, match=r"pretrain/generate.py.*pretrain/score.py"):
            command.main([str(tmp_path / "causal"), ONE, *mode])
