"""Config and weights in a native model folder: config.json and model.safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.files import FileEntries, compute_crc32c, write_bytes
from xlpre.common.safetensors_io import write_tensors
from xlpre.config.loader import config_from_mapping
from xlpre.conversion.provenance import older_format
from xlpre.model.config import ModelConfig

FORMAT = "xlpre"
FORMAT_VERSION = 2  # incremented when names in the files change
CHECKSUM = "weights_crc32c"
# the backend that trained a model may not exist on the machine that opens it
ANY_DEVICE: dict[str, Any] = {"attention_backend": "auto"}


def write_model(path: Path, config: ModelConfig, weights: Mapping[str, Tensor], objective: str) -> FileEntries:
    """Write config.json and model.safetensors into the folder `path`. Return their sizes and checksums."""
    size, crc = write_tensors(path / "model.safetensors", weights)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": dataclasses.asdict(dataclasses.replace(config, **ANY_DEVICE)),
        "objective": objective,
        CHECKSUM: crc,
    }
    return {
        "model.safetensors": (size, crc),
        "config.json": write_bytes(path / "config.json", json.dumps(content, indent=1).encode()),
    }


def read_settings(path: Path, readable: str) -> dict[str, Any]:
    """Read config.json of a native or Hugging Face folder.

    Args:
        path: folder of a model.
        readable: names the kinds of folder that can be read, for the error message.

    Raises:
        InputError: the folder or the file is missing, or the file is not a JSON object.
    """
    file = path / "config.json"
    if not path.is_dir():
        problem = "there is no such folder" if not path.exists() else "it is not a folder"
        raise InputError(
            f"{path} is invalid: {problem}. Give {readable}, on this machine; download a model of the Hugging Face Hub first."
        )
    if not file.exists():
        run = next((parent for parent in path.parents if (parent / "model" / "config.json").exists()), None)
        remedy = f"Did you mean {run}?" if run else f"Give {readable}."
        raise InputError(f"{path} is invalid: it is not a model folder. {remedy}")
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}. Copy the file again from the original folder.") from None
    if not isinstance(settings, dict):
        raise InputError(
            f"{file} is invalid: it must hold an object, not a {type(settings).__name__}. "
            "Copy the file again from the original folder."
        )
    return settings


def read_model(path: Path, settings: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Read a native model folder.

    Args:
        path: folder of the model.
        settings: content of its config.json.

    Returns:
        Model config, fp32 weights by parameter name, and name of the objective.

    Raises:
        InputError: an older format, an unknown setting, a file that cannot be read, or weights that do not match their checksum.
    """
    file, config_file = path / "model.safetensors", path / "config.json"
    if settings.get("format_version", 1) != FORMAT_VERSION:
        raise InputError(older_format(path))
    model, objective = settings.get("model"), settings.get("objective")
    if not isinstance(model, dict) or not isinstance(objective, str):
        raise InputError(
            f"{config_file} is invalid: it must hold `model`, an object, and `objective`, a name. "
            "Copy the file again from the original folder."
        )
    config = config_from_mapping(ModelConfig, {**model, **ANY_DEVICE}, str(config_file))
    try:
        check_checksum(file, settings.get(CHECKSUM), config_file, CHECKSUM)
        return config, safetensors.torch.load_file(file), objective
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            f"{file} cannot be read: {str(error).splitlines()[0]}. Copy the file again from the original folder."
        ) from None


def check_checksum(file: Path, expected: int | None, config_file: Path, key: str) -> None:
    """Raise InputError if `file` does not have the checksum `expected`, read from `key` of `config_file`. None is not checked."""
    if expected is not None and compute_crc32c(file) != expected:
        raise InputError(
            f"{file} is damaged: its checksum differs from {key} in {config_file}. Copy the file again from the original folder; or, if "
            f"you changed the weights on purpose, remove {key} from {config_file.name}."
        )
