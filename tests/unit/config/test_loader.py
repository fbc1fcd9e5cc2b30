import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.config import FinetuneConfig, task_overrides
from finetune.tasks.registry import TASK_NAMES
from pretrain.config import PretrainConfig
from tests.conftest import REPOSITORY
from xlpre.config.loader import config_from_mapping, load_config, save_config
from xlpre.model.language_model import meta_model
from xlpre.text.corpus import TextConfig

FINETUNE_PRESETS = sorted((REPOSITORY / "configs" / "finetune").rglob("*.yaml"))


@pytest.mark.parametrize("path", FINETUNE_PRESETS, ids=lambda path: path.stem)
def test_a_fine_tuning_preset_loads_and_starts_with_how_to_run_it(path):
    load_config(FinetuneConfig, path)
    head = path.read_text().split("\n\n")[0]
    assert "how to run:" in head and "source:" in head


def test_overrides_win_over_the_file_and_the_file_over_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("optim: {lr: 1e-5, eps: 1e-6}\nmodel: {n_layer: 3}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\noptim: {lr: 2e-5}\n")
    config = load_config(PretrainConfig, tmp_path / "top.yaml", ["model.n_layer=5", "text.source=*.txt"])
    assert (config.optim.lr, config.optim.eps, config.model.n_layer, config.text.source) == (2e-5, 1e-6, 5, "*.txt")


@pytest.mark.parametrize("path", FINETUNE_PRESETS, ids=lambda path: path.stem)
def test_task_overrides_of_a_preset_name_tasks_and_load(path):
    for task in load_config(FinetuneConfig, path).task_overrides:
        assert task in TASK_NAMES
        load_config(FinetuneConfig, path, [f"task={task}"], task_overrides)


def test_a_mixture_of_texts_is_replaced_not_merged(tmp_path):
    (tmp_path / "base.yaml").write_text("text: {mixture: {wiki.txt: 2}}")
    (tmp_path / "extending.yaml").write_text("extends: base.yaml\ntext: {mixture: {books.txt: 1}}")
    (tmp_path / "other.yaml").write_text("extends: base.yaml\ntext: {source: books.txt}")

    def sources(file, *overrides):
        return load_config(PretrainConfig, tmp_path / file, overrides).text.sources

    assert sources("base.yaml") == {"wiki.txt": 2}
    assert sources("extending.yaml") == sources("other.yaml") == {"books.txt": 1}
    assert sources("base.yaml", "text.mixture={b.txt: 3}") == {"b.txt": 3}
    assert sources("base.yaml", "text.source=b.txt") == sources("base.yaml", "text.mixture={}", "text.source=b.txt")
    assert sources("base.yaml", "text.source=b.txt") == {"b.txt": 1}
    assert sources("base.yaml", "text.mixture.b=3", "text.mixture.c=4") == {"b": 3, "c": 4}


@pytest.mark.parametrize("number", ["1:30", "010"])
def test_numbers_are_decimal(number):
    with pytest.raises(ValueError, match=f"train.hours={number}' is invalid: the value must be a decimal number"):
        load_config(PretrainConfig, None, [f"train.hours={number}"])


def test_settings_of_a_file_that_extends_a_preset_win_over_the_overrides_of_a_task(tmp_path):
    (tmp_path / "preset.yaml").write_text(
        "train: {steps: 10}\ntask_overrides: {glue/rte: [train.steps=20, eval.every=5]}"
    )
    (tmp_path / "mine.yaml").write_text("extends: preset.yaml\ntask: glue/rte\ntrain: {steps: 30}")
    preset = load_config(FinetuneConfig, tmp_path / "preset.yaml", ["task=glue/rte"], task_overrides)
    mine = load_config(FinetuneConfig, tmp_path / "mine.yaml", [], task_overrides)
    assert (preset.train.steps, mine.train.steps) == (20, 30) and preset.eval.every == mine.eval.every == 5


def test_derived_overrides_win_over_the_file_and_lose_against_the_command_line():
    path = REPOSITORY / "configs/finetune/glue.yaml"
    config = load_config(FinetuneConfig, path, ["task=glue/cola", "optim.lr=1e-3"], task_overrides)
    assert (config.train.global_batch_size, config.train.steps, config.optim.lr) == (128, 3000, 1e-3)


@pytest.mark.parametrize("name", ["007", "2024_11_21", "1e3", "on", "a #1", "*.txt", "null"])
def test_a_string_is_not_parsed(name):
    assert load_config(PretrainConfig, None, [f"name={name}"]).name == name


@pytest.mark.parametrize("text", ["", "null", "~"])
def test_an_optional_string_can_be_unset(tmp_path, text):
    (tmp_path / "a.yaml").write_text("init_from: folder")
    assert load_config(PretrainConfig, tmp_path / "a.yaml", [f"init_from={text}"]).init_from is None
    assert load_config(PretrainConfig, tmp_path / "a.yaml").init_from == "folder"


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "a.yaml").write_text(
        "run_dir: ~/runs/${name}\ntext: {mixture: {~/wiki/*.txt: 2, 'hf:~/news': 1, b: 1}}"
    )
    config = load_config(PretrainConfig, tmp_path / "a.yaml", ["data.store_dir=~/stores/mine", "name=a"])
    assert (config.run_dir, config.data.store_dir) == ("/home/me/runs/a", "/home/me/stores/mine")
    assert config.text.mixture == {"/home/me/wiki/*.txt": 2, "hf:/home/me/news": 1, "b": 1}
    assert load_config(PretrainConfig, None, ["text.source=hf:~/news"]).text.source == "hf:/home/me/news"
    assert config.init_from is None and load_config(PretrainConfig, None, ["init_from=a~/b"]).init_from == "a~/b"


def test_the_name_sets_the_folders():
    config = load_config(PretrainConfig, None, ["name=mine"])
    assert (config.run_dir, config.data.store_dir) == ("runs/mine", "stores/mine")


def test_a_saved_config_loads_to_an_equal_object(tmp_path):
    config = load_config(
        PretrainConfig,
        REPOSITORY / "configs/pretrain/debug.yaml",
        ["optim.lr=2e-5", "deepspeed.zero_optimization.stage=2", "eval.sentences=['a ____']"],
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(PretrainConfig, tmp_path / "config.yaml") == config
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "12e3",
        "1.5e5",
        "2.e3",
        "007",
        "08",
        "08:30",
        "-08",
        "2024_01",
        "on",
        "1.10",
        "null",
        "${b}",
        "a: b",
        "é",
    ],
)
def test_every_text_survives_saving(tmp_path, text):
    config = replace(load_config(PretrainConfig, None), name=text)
    config = replace(config, text=replace(config.text, mixture={text: 2.0}))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(PretrainConfig, tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train:\n  hours: 1:30", r"a.yaml, line 2: 1:30 is invalid: it must be a decimal number without colons"),
        ("train: {steps: 010}", r"a.yaml, line 1: 010 is invalid"),
        ("name: 2024_01", r"a.yaml, line 1: 2024_01 is invalid"),
        ("name: 1.10", r"a.yaml: name=1.1 is invalid: it must be text. Put it in quotes"),
        ("name: on", r"a.yaml: name=true is invalid: it must be text"),
        ("train: {wandb: false}", r"train.wandb=false is invalid: it must be text"),
    ],
)
def test_a_value_that_yaml_reads_as_another_one_is_refused(tmp_path, content, message):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_an_alias_that_contains_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("deepspeed: &x {a: *x}")
    with pytest.raises(ValueError, match="a.yaml: cannot be read as YAML"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_a_file_that_extends_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


@pytest.mark.parametrize("content", ["seed: [1,", "- seed", "extends: [1]", "\tseed: 1"])
def test_an_invalid_file_is_refused_with_its_name(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError) as refusal:
        load_config(PretrainConfig, tmp_path / "config.yaml")
    assert str(refusal.value).startswith(f"{tmp_path}/config.yaml: ")


def test_extends_must_be_a_path(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: 5\n")
    with pytest.raises(ValueError, match=r"a.yaml: extends=5 is invalid: it must be the path"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_a_setting_can_refer_to_another_one():
    assert load_config(PretrainConfig, None, ["optim.eps=${optim.lr}"]).optim.eps == PretrainConfig().optim.lr


def test_an_unknown_key_in_a_file_is_refused_with_the_file_and_a_suggestion(tmp_path):
    (tmp_path / "a.yaml").write_text("objective:\n  partial_l: 7\n")
    with pytest.raises(ValueError, match=r"a.yaml: .* 'objective.partial_l'; did you mean 'objective.partial_k'\?"):
        load_config(PretrainConfig, Path(tmp_path / "a.yaml"))


def test_an_unknown_key_without_a_similar_one_is_refused_without_a_suggestion(tmp_path):
    with pytest.raises(ValueError, match=r"there is no setting 'model.banana'; --help all lists the settings.$"):
        load_config(PretrainConfig, None, ["model.banana=1"])
    (tmp_path / "a.yaml").write_text("model: {banana: 1}")
    with pytest.raises(ValueError, match=r"there is no setting 'model.banana'$"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_a_dotted_key_in_a_file_is_refused_with_the_nested_form(tmp_path):
    (tmp_path / "a.yaml").write_text("data.seq_len: 512\n")
    with pytest.raises(ValueError, match=r"a.yaml: 'data.seq_len' must be .* `data: \{seq_len: ...\}`"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.pairs=3", r"^data.pairs=3 is invalid: it must be true or false"),
        ("model.cutoffs=5", r"^model.cutoffs=5 is invalid: it must be a list .*\. Set model.cutoffs=\[5\]\.$"),
        ("text.mixture=[a]", r"^text.mixture=\[a\] is invalid: it must be a mapping"),
        ("train.steps=", r"^train.steps= is invalid: the value is empty; it must be an integer"),
        ("text.max_chars=1e6", r"text.max_chars=1000000.0 is invalid: .* Set text.max_chars=1000000\."),
        ("optim.lr=x", r"^optim.lr=x is invalid: it must be a number"),
        ("data.pairs=maybe", r"^data.pairs=maybe is invalid: it must be true or false"),
        ("text.row_type=x", r"^text.row_type=x is invalid: it must be one of 'documents', 'lines'"),
        ("text.mixture=null", r"^text.mixture=null is invalid: it must be a mapping"),
        ("text.mixture={a: b}", r"text.mixture.a=b is invalid: it must be a number"),
        ("optim.lr=inf", r"optim.lr=inf is invalid: it must be a finite number"),
        ("text.mixture={a:1}", r"'a:1' in text.mixture has no value"),
        ("model=large", r"'model' is a group of settings. Set one of model.vocab_size"),
        ("steps", r"'steps' is invalid: it must have the form key=value"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(PretrainConfig, None, [override])


@pytest.mark.parametrize("content", ['text: {source: "a${b"}\n', "null: 3\n"])
def test_an_error_of_omegaconf_names_the_file(content, tmp_path):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"a.yaml"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_invalid_settings_in_a_mapping_are_refused_with_their_origin():
    with pytest.raises(ValueError, match=r"meta.json: text.max_chars=0 is invalid"):
        config_from_mapping(TextConfig, {"max_chars": 0}, "meta.json")


@pytest.mark.parametrize(
    ("name", "n_pieces", "millions"),
    [
        ("enwik8", 265, 41),
        ("enwik8_large", 265, 277),
        ("text8", 37, 277),
        ("text8_base", 37, 41),
        ("wt103", 267_742, 151),
        ("wt103_large", 267_742, 285),
        ("lm1b", 800_000, 358),
        ("lm1b_large", 800_000, 841),
        ("ptb", 10_009, 24),
    ],
)
def test_a_preset_of_transformer_xl_has_the_published_number_of_parameters(name, n_pieces, millions):
    config = load_config(PretrainConfig, REPOSITORY / f"configs/pretrain/transformer_xl_{name}.yaml")
    assert config.tokenizer.n_pieces == n_pieces and config.text.line_type == "verbatim"
    model = meta_model(dataclasses.replace(config.model, vocab_size=n_pieces), two_streams=False)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    # the special tokens and the segments of XLNet add less than half a million
    assert n_parameters / 1e6 == pytest.approx(millions, abs=0.6)
