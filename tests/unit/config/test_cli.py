import sys

import pytest

from pretrain.config import PretrainConfig
from tests.conftest import REPOSITORY
from xlpre.config.cli import CommandParser, ExplicitKeys, SettingsParser

QUICKSTART = "configs/pretrain/quickstart.yaml"


def make_parser():
    parser = SettingsParser(PretrainConfig, "Do it.", ["name"])
    parser.add_argument("--dry-run", action="store_true")
    return parser


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def test_explicit_keys_are_those_of_the_command_line_the_file_and_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {n_layer: 12}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\noptim: {lr: 2e-5}\n")
    _, keys, args = make_parser().parse_config(["--config", str(tmp_path / "top.yaml"), "--dry-run", "seed=1"])
    of_file, own = frozenset({"model.n_layer", "optim.lr"}), frozenset({"optim.lr"})
    assert keys == ExplicitKeys(frozenset({"seed"}), of_file, own) and args.dry_run


@pytest.mark.parametrize(
    "argv", [["--dry-run", "name=a"], ["name=a", "--dry-run"], ["--local_rank=1", "--dry-run", "name=a"]]
)
def test_options_and_settings_may_be_in_any_order(argv):
    config, _, args = make_parser().parse_config(argv)
    assert config.name == "a" and args.dry_run
    assert not make_parser().parse_config(["name=a"])[2].dry_run


def test_arguments_may_stand_between_settings():
    parser = make_parser()
    parser.add_argument("text")
    config, _, args = parser.parse_config(["a text", "--config", QUICKSTART, "name=a", "--dry-run", "seed=3"])
    assert (args.text, config.name, config.seed) == ("a text", "a", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--learning-rate 1e-4", "--learning-rate is invalid: settings are written as key=value. Write optim.lr=1e-4."),
        ("--learning_rate=1e-4", "--learning_rate is invalid: settings are written as key=value. Write optim.lr=1e-4."),
        ("--fp16 --dry-run", "--fp16 is invalid: settings are written as key=value. Write train.precision=fp16."),
        ("--bf16", "--bf16 is invalid: settings are written as key=value. Write train.precision=bf16."),
        ("--name mine", "--name is invalid: settings are written as key=value. Write name=mine."),
        ("--train.steps 10", "--train.steps is invalid: settings are written as key=value. Write train.steps=10."),
        ("--seed", "--seed is invalid: settings are written as key=value. Write seed=VALUE."),
        ("--output-dir a/b", "--output-dir is invalid: settings are written as key=value. Write run_dir=a/b."),
        ("--dryrun", "--dryrun is invalid: there is no such option. Did you mean --dry-run?"),
        ("--banana", "--banana is invalid: there is no such option. See --help."),
        ("optim.lr = 1e-4", "'optim.lr' is invalid: settings are written as key=value, without spaces around =. Write optim.lr=1e-4."),
        ("optim.lr =1e-4", "'optim.lr' is invalid: settings are written as key=value, without spaces around =. Write optim.lr=1e-4."),
        ("optim.lr= 1e-4", "'1e-4' is invalid: settings are written as key=value, without spaces around =. Write optim.lr=1e-4."),
        ("text.source=my texts", "'texts' is invalid: settings are written as key=value. Put a text or value with spaces in quotes."),
        (QUICKSTART, f"{QUICKSTART!r} is invalid: settings are written as key=value. Write --config {QUICKSTART}."),
        (
            "--config quickstart.yaml",
            f"--config=quickstart.yaml is invalid: there is no such file. Did you mean {QUICKSTART}?",
        ),
        ("--config nowhere.yaml", "--config=nowhere.yaml is invalid: there is no such file. The presets are in configs/."),
        (
            f"--config {QUICKSTART} --config configs/pretrain/debug.yaml",
            f"--config=configs/pretrain/debug.yaml is invalid: --config is set to {QUICKSTART} already. Give one file. "
            "To build on another file, add the line `extends: OTHER.yaml` to yours.",
        ),
        ("--config", "--config is invalid: it has no value. Write the value after it."),
        ("--help modle", "--help=modle is invalid: it must be one of run, text, tokenizer, data, objective, model, memory, optim, "
         "schedule, train, eval, or all."),
        ("optim.lr=", "optim.lr= is invalid: the value is empty; it must be a number."),
        ("eval.sentences=", "eval.sentences= is invalid: the value is empty; it must be a list such as [a, b]."),
        ("optim.learning_rate=1", "optim.learning_rate=1: there is no setting 'optim.learning_rate'; did you mean 'optim.lr'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_what_to_write(arguments, message):
    with pytest.raises(ValueError) as error:
        make_parser().parse_config(arguments.split(" "))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are missing: MODEL. See --help."),
        ("m --size x", "--size=x is invalid: it must be an integer."),
        ("m --device gpu", "--device=gpu is invalid: it must be one of 'cpu', 'cuda'."),
        ("m --verifi", "--verifi is invalid: there is no such option. Did you mean --verify?"),
        ("m seed=1", "'seed=1' is invalid: there is no such argument. See --help."),
    ],
)
def test_a_command_without_settings_refuses_mistakes_in_one_line(arguments, message):
    parser = CommandParser("Do it.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--size", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--verify", action="store_true")
    with pytest.raises(ValueError) as error:
        parser.parse(arguments.split())
    assert str(error.value) == message


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_help_fills_the_width_of_the_terminal_and_not_more(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["pretrain/run.py"])
    parser = SettingsParser(PretrainConfig, "A word. " * 60 + "\n\nExamples:\n  " + "verbatim " * 30, ["model"])
    with pytest.raises(SystemExit) as end:
        parser.parse(["--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "verbatim" not in line]
    assert not end.value.code and columns - 12 < max(map(len, lines)) <= columns


def test_help_of_a_group_lists_all_its_settings_with_default_and_full_description(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse(["--help", "memory"])
    out = capsys.readouterr().out
    assert (
        "memory.initial={empty,zeros}" in out and "(default: carry)" in out and "`cut`: a window sees no memory" in out
    )
    assert "model." not in out


def test_keys_of_a_mapping_on_the_command_line_are_explicit():
    keys = ExplicitKeys.read(None, ["model={mem_len: 0, dropout: 0.3}", "text.mixture={a.txt: 1}", "seed=2"])
    assert {"model.mem_len", "model.dropout", "text.mixture", "seed"} <= keys.args
