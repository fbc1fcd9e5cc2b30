"""The model folder: weights in safetensors, config, vocabulary, passport. Nothing in it is ever unpickled.

model.safetensors   fp32 weights by their names in xlpre/model
config.json         `model`: ModelConfig, `objective`: its name, `passport`: vocabulary hash, data fingerprint, step, versions
spiece.model        the SentencePiece vocabulary
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from xlpre.atomic import new_folder
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.build import OBJECTIVES
from xlpre.text.tokenizer import Tokenizer

FORMAT = "xlpre"


def save_folder(
    path: str | Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    objective: str,
    passport: Mapping[str, Any],
) -> None:
    """Write a model folder, whole or not at all; one that is there is replaced."""
    with new_folder(path) as partial:
        safetensors.torch.save_file(
            {name: w.contiguous() for name, w in weights.items()}, partial / "model.safetensors"
        )
        tokenizer.save(partial / "spiece.model")
        content = {
            "format": FORMAT,
            "model": dataclasses.asdict(config),
            "objective": objective,
            "passport": {**passport, "vocabulary_sha256": tokenizer.sha256, "torch": torch.__version__},
        }
        (partial / "config.json").write_text(json.dumps(content, indent=1))


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder holds, the model ready to evaluate."""

    model: LanguageModel
    tokenizer: Tokenizer
    objective: str


def load_folder(path: str | Path) -> ModelFolder:
    """Read a model folder.

    Raises:
        ValueError: not a model folder, a file damaged, weights of another shape, another vocabulary than it was saved with.
    """
    path = Path(path)
    try:
        content = json.loads((path / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        inside = path / "model"
        hint = f"did you mean {inside}?" if (inside / "config.json").exists() else f"config.json: {error}"
        raise ValueError(f"{path}: not a model folder; {hint}") from None
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}/config.json: format {content.get('format')!r} is not {FORMAT!r}")
    tokenizer = Tokenizer.load(path / "spiece.model")
    if tokenizer.sha256 != content["passport"]["vocabulary_sha256"]:
        raise ValueError(
            f"{path}/spiece.model (sha256 {tokenizer.sha256[:12]}) is not the vocabulary that the model was saved with "
            f"({content['passport']['vocabulary_sha256'][:12]})"
        )
    model = LanguageModel(ModelConfig(**content["model"]), OBJECTIVES[content["objective"]].two_streams)
    try:
        _put(safetensors.torch.load_file(path / "model.safetensors"), model)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path}/model.safetensors: does not fit its config.json: {str(error).splitlines()[0]}"
        ) from None
    return ModelFolder(model.eval(), tokenizer, content["objective"])


@torch.no_grad()
def _put(weights: Mapping[str, Tensor], model: LanguageModel) -> None:
    """Copy `weights` into `model`; a parameter that layers share has one name."""
    own = dict(model.named_parameters())
    if odd := own.keys() ^ weights.keys():
        raise ValueError(f"{sorted(odd)[0]} is in one and not in the other")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)}, the config says {tuple(parameter.shape)}")
        parameter.copy_(weights[name])
