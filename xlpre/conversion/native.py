"""The model in a folder of ours: model.safetensors, fp32 weights by their names in xlpre/model; config.json, its shape and a checksum."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from xlpre.common.checksum import checksum
from xlpre.common.safetensors_io import write_tensors
from xlpre.config.loader import from_mapping
from xlpre.model.config import ModelConfig

FORMAT = "xlpre"
CHECKSUM = "weights_crc32c"


def write_model(path: Path, config: ModelConfig, weights: Mapping[str, Tensor], objective: str) -> None:
    """Write config.json and model.safetensors into the folder `path`."""
    write_tensors(path / "model.safetensors", weights)
    content = {
        "format": FORMAT,
        "model": dataclasses.asdict(config),
        "objective": objective,
        CHECKSUM: checksum(path / "model.safetensors"),
    }
    (path / "config.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    as_readable_as_the_rest(path / "model.safetensors")


def read_settings(path: Path, kinds: str) -> dict[str, Any]:
    """What config.json of the folder `path` holds, of ours or of Hugging Face's.

    Raises:
        ValueError: there is none, with what can be read (`kinds`), or it is no object.
    """
    file = path / "config.json"
    if not path.is_dir():
        missing = "there is no such folder" if not path.exists() else "not a folder"
        raise ValueError(
            f"{path}: {missing}; what can be read is {kinds}, on this machine (a model of a hub must be fetched first)"
        )
    if not file.exists():
        inside = path / "model"
        run = next((parent for parent in path.parents if (parent / "model" / "config.json").exists()), None)
        hint = (
            f"did you mean {inside}?"
            if inside.is_dir()
            else f"did you mean {run}/model?"
            if run
            else f"what can be read is {kinds}"
        )
        raise ValueError(f"{path}: not a model folder; {hint}")
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: must hold an object, not a {type(settings).__name__}")
    return settings


def read_model(path: Path, settings: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Shape, weights and objective of a folder whose config.json holds `settings`.

    Raises:
        ValueError: a setting that is not known, a file that cannot be read, weights that are not those that were written.
    """
    file, described = path / "model.safetensors", path / "config.json"
    shape, objective = settings.get("model"), settings.get("objective")
    if not isinstance(shape, dict) or not isinstance(objective, str):
        raise ValueError(
            f"{described}: not of this version of xlpre: it must hold `model`, an object, and `objective`, a name"
        )
    config = from_mapping(ModelConfig, shape, str(described))
    try:
        check_whole(file, settings.get(CHECKSUM), described, CHECKSUM)
        return config, safetensors.torch.load_file(file), objective
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from None


def check_whole(file: Path, expected: int | None, described: Path, key: str) -> None:
    """Raise ValueError if the checksum of a file is another than `described` says in `key`; one of before says nothing."""
    if expected is not None and checksum(file) != expected:
        raise ValueError(
            f"{file} is not as it was written (its checksum is not {key} of {described}); get it anew, or, if its weights were "
            f"changed on purpose, remove {key} from there"
        )


def as_readable_as_the_rest(weights: Path) -> None:
    """The safetensors library lets only the owner read its files."""
    shutil.copymode(weights.with_name("config.json"), weights)
