import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import pytest

from tests.conftest import REPOSITORY
from xlpre.config.schema_docs import check_choices, list_settings
from xlpre.model.config import ModelConfig
from xlpre.model.feedforward import GATED, PLAIN
from xlpre.model.kernels.backend import BACKENDS
from xlpre.model.layer import LAYERS
from xlpre.model.positions import SCHEMES
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES


@dataclass(frozen=True)
class Undescribed:
    """A group of settings.

    Attributes:
        first: the first setting.
    """

    first: int = 1
    second: int = 2


@dataclass(frozen=True)
class Choice:
    """A group of settings.

    Attributes:
        kind: a choice.
    """

    kind: Literal["a", "b"] = "a"


def test_a_setting_without_a_description_is_named():
    with pytest.raises(AssertionError, match="Undescribed does not describe second"):
        list_settings(Undescribed)


def test_a_value_outside_the_choices_is_refused():
    with pytest.raises(ValueError, match=r"group.kind=c is invalid: it must be one of a, b"):
        check_choices(Choice("c"), "group.")


@pytest.mark.parametrize(
    ("schema", "key", "registry"),
    [
        (ObjectiveConfig, "name", OBJECTIVES),
        (ModelConfig, "positions", SCHEMES),
        (ModelConfig, "norm", LAYERS),
        (ModelConfig, "feed_forward", PLAIN | GATED),
        (ModelConfig, "attention_backend", {"auto": None, **BACKENDS}),
    ],
)
def test_the_choices_of_a_setting_are_the_registered_names(schema, key, registry):
    assert set(get_args(get_type_hints(schema)[key])) == registry.keys()


def test_the_pages_of_settings_are_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_settings", REPOSITORY / "docs" / "generate_settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        assert (REPOSITORY / "docs" / name).read_text() == text, "run python docs/generate_settings.py"
