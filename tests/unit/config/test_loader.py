from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import finetune.settings
import pretrain.settings
import pytest

from finetune.config import FinetuneConfig, task_overrides
from finetune.tasks.registry import NAMES
from pretrain.config import PretrainConfig
from tests.conftest import REPOSITORY
from xlpre.config.cli import ExplicitKeys, parse_config_and_flags, read_explicit_keys
from xlpre.config.loader import load_config, save_config
from xlpre.config.schema_docs import list_settings
from xlpre.model.config import ModelConfig
from xlpre.model.feedforward import GATED, PLAIN
from xlpre.model.kernels.backend import BACKENDS
from xlpre.model.layer import LAYERS
from xlpre.model.positions import SCHEMES
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES

PRESETS = sorted((REPOSITORY / "configs" / "pretrain").rglob("*.yaml"))
FINETUNE_PRESETS = sorted((REPOSITORY / "configs" / "finetune").rglob("*.yaml"))
SCHEMAS = [(path, PretrainConfig) for path in PRESETS] + [(path, FinetuneConfig) for path in FINETUNE_PRESETS]


@pytest.mark.parametrize(("path", "schema"), SCHEMAS, ids=[path.stem for path, _ in SCHEMAS])
def test_every_preset_loads_and_opens_with_how_to_run_it(path, schema):
    load_config(schema, path)
    head = path.read_text().split("\n\n")[0]
    assert "how to run:" in head and "source:" in head


def test_words_win_over_the_file_and_the_file_over_what_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text("optim: {lr: 1e-5, eps: 1e-6}\nmodel: {n_layer: 3}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\noptim: {lr: 2e-5}\n")
    config = load_config(PretrainConfig, tmp_path / "top.yaml", ["model.n_layer=5", "text.source=*.txt"])
    assert (config.optim.lr, config.optim.eps, config.model.n_layer, config.text.source) == (2e-5, 1e-6, 5, "*.txt")


def test_what_was_given_is_what_a_word_or_a_file_or_what_it_extends_says(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {n_layer: 12}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\noptim: {lr: 2e-5}\n")
    given = read_explicit_keys({"look": ""}, ["--config", str(tmp_path / "top.yaml"), "--look", "seed=1"])
    assert given == ExplicitKeys(frozenset({"seed"}), frozenset({"model.n_layer", "optim.lr"}))


@pytest.mark.parametrize(
    ("schema", "key", "built"),
    [
        (ObjectiveConfig, "name", OBJECTIVES),
        (ModelConfig, "positions", SCHEMES),
        (ModelConfig, "norm", LAYERS),
        (ModelConfig, "feed_forward", PLAIN | GATED),
        (ModelConfig, "attention", BACKENDS),
    ],
)
def test_what_a_setting_may_name_is_what_can_be_built(schema, key, built):
    assert set(get_args(get_type_hints(schema)[key])) == built.keys()


@dataclass(frozen=True)
class Untold:
    """A group of settings.

    Attributes:
        told: what it is.
    """

    told: int = 1
    untold: int = 2


def test_a_setting_that_its_docstring_leaves_out_is_named():
    with pytest.raises(AssertionError, match="the docstring of Untold has no untold among its Attributes"):
        list_settings(Untold)


@pytest.mark.parametrize("path", FINETUNE_PRESETS, ids=lambda path: path.stem)
def test_every_recipe_of_a_preset_is_of_a_task_and_loads(path):
    for task in load_config(FinetuneConfig, path).task_overrides:
        assert task in NAMES
        load_config(FinetuneConfig, path, [f"task={task}"], task_overrides)


def test_a_recipe_wins_over_its_file_and_loses_against_words():
    path = REPOSITORY / "configs/finetune/glue.yaml"
    config = load_config(FinetuneConfig, path, ["task=glue/cola", "optim.lr=1e-3"], task_overrides)
    assert (config.train.global_batch_size, config.train.steps, config.optim.lr) == (128, 3000, 1e-3)


@pytest.mark.parametrize("name", ["007", "2024_11_21", "1e3", "on", "a #1", "*.txt"])
def test_a_string_stays_what_was_typed(name):
    assert load_config(PretrainConfig, None, [f"name={name}"]).name == name


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "a.yaml").write_text(
        "run_dir: ~/runs/${name}\ntext: {mixture: {~/wiki/*.txt: 2, 'hf:~/news': 1, b: 1}}"
    )
    config = load_config(PretrainConfig, tmp_path / "a.yaml", ["data.store_dir=~/stores/mine", "name=a"])
    assert (config.run_dir, config.data.store_dir) == ("/home/me/runs/a", "/home/me/stores/mine")
    assert config.text.mixture == {"/home/me/wiki/*.txt": 2, "hf:/home/me/news": 1, "b": 1}
    assert load_config(PretrainConfig, None, ["text.source=hf:~/news"]).text.source == "hf:/home/me/news"
    assert config.init_from == "" and load_config(PretrainConfig, None, ["init=a~/b"]).init_from == "a~/b"


def test_a_name_names_the_folders():
    config = load_config(PretrainConfig, None, ["name=mine"])
    assert (config.run_dir, config.data.store_dir) == ("runs/mine", "stores/mine")


@pytest.mark.parametrize("argv", [["--look", "name=a"], ["name=a", "--look"], ["--local_rank=1", "--look", "name=a"]])
def test_a_flag_may_stand_anywhere(argv):
    config, flags = parse_config_and_flags(PretrainConfig, "", {"look": "", "leap": ""}, argv)
    assert config.name == "a" and flags == {"look"}
    assert parse_config_and_flags(PretrainConfig, "", {"look": ""}, ["name=a"])[1] == set()


def test_what_is_dumped_loads_to_an_equal_object(tmp_path):
    config = load_config(
        PretrainConfig,
        PRESETS[0],
        ["optim.lr=2e-5", "deepspeed.zero_optimization.stage=2", "eval.sentences=['a ____']"],
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(PretrainConfig, tmp_path / "config.yaml") == config
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}


def test_a_file_that_extends_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


@pytest.mark.parametrize("content", ["seed: [1,", "- seed", "extends: [1]", "\tseed: 1"])
def test_what_is_wrong_with_a_file_is_said_with_its_name_alone(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError) as raised:
        load_config(PretrainConfig, tmp_path / "config.yaml")
    assert str(raised.value).startswith(f"{tmp_path}/config.yaml: ")


def test_what_a_file_extends_is_a_path(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: 5\n")
    with pytest.raises(ValueError, match=r"a.yaml: extends \(5\) must be the path of another file"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_a_setting_may_be_another_one():
    assert load_config(PretrainConfig, None, ["optim.eps=${optim.lr}"]).optim.eps == PretrainConfig().optim.lr


def test_a_misspelt_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path):
    (tmp_path / "a.yaml").write_text("objective:\n  partial_l: 7\n")
    with pytest.raises(
        ValueError, match=r"a.yaml: there is no setting 'objective.partial_l'; did you mean 'objective.partial_k'\?"
    ):
        load_config(PretrainConfig, Path(tmp_path / "a.yaml"))


def test_a_dotted_key_in_a_file_says_how_it_is_written(tmp_path):
    (tmp_path / "a.yaml").write_text("data.seq_len: 512\n")
    with pytest.raises(ValueError, match=r"a.yaml: 'data.seq_len' is written as a group, `data: \{window: ...\}`"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


@pytest.mark.parametrize("content", ['text: {source: "a${b"}\n', "null: 3\n"])
def test_what_omegaconf_does_not_read_is_a_sentence(content, tmp_path):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"a.yaml"):
        load_config(PretrainConfig, tmp_path / "a.yaml")


def test_the_pages_of_settings_are_what_the_schemas_say():
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == pretrain.settings.page()
    assert (REPOSITORY / "docs" / "finetuning_settings.md").read_text() == finetune.settings.page()
