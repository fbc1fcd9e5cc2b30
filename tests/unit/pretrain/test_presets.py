"""Every preset loads and states how to run it, what it reaches and its source."""

import dataclasses
import re

import pytest

from pretrain.config import PretrainConfig
from pretrain.planning.flops import count_parameters
from tests.conftest import REPOSITORY
from xlpre.config.loader import load_config

PRESETS = sorted((REPOSITORY / "configs/pretrain").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_loads_and_its_model_can_be_built(path):
    config = load_config(PretrainConfig, path)
    model = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    assert config.name == path.stem
    assert sum(count_parameters(model).values()) > 0
    assert (
        config.train.batch_schedule(world_size=1).rows(config.train.batch_warmup_steps)
        == config.train.global_batch_size
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_states_how_to_run_it_what_it_reaches_and_its_source(path):
    head = path.read_text().split("\n\n")[0]
    for heading in ("how to run", "reaches", "source"):
        assert re.search(rf"^# {heading}: +\S", head, re.MULTILINE), f"{path.name} lacks {heading}"
