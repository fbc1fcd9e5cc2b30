import pytest

from pretrain.config import PretrainConfig
from xlpre.config.cli import ExplicitKeys, parse_config_and_flags, read_explicit_keys


def test_explicit_keys_are_those_of_the_command_line_the_file_and_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {n_layer: 12}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\noptim: {lr: 2e-5}\n")
    keys = read_explicit_keys({"look": ""}, ["--config", str(tmp_path / "top.yaml"), "--look", "seed=1"])
    assert keys == ExplicitKeys(frozenset({"seed"}), frozenset({"model.n_layer", "optim.lr"}))


@pytest.mark.parametrize("argv", [["--look", "name=a"], ["name=a", "--look"], ["--local_rank=1", "--look", "name=a"]])
def test_flags_and_overrides_may_be_in_any_order(argv):
    config, flags = parse_config_and_flags(PretrainConfig, "", {"look": "", "leap": ""}, argv)
    assert config.name == "a" and flags == {"look"}
    assert parse_config_and_flags(PretrainConfig, "", {"look": ""}, ["name=a"])[1] == set()
