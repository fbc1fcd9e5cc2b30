"""A model in memory as what a model folder holds, to be saved."""

from __future__ import annotations

from typing import Any

import torch

from xlpre.conversion.model_folder import ModelFolder
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.tokenizer import Tokenizer


def folder_of(model: LanguageModel, tokenizer: Tokenizer, objective: str, **facts: Any) -> ModelFolder:
    """What a folder of `model` holds: a copy of its weights, on the CPU in fp32.

    Args:
        model: on any device, in any precision.
        tokenizer: its vocabulary.
        objective: what it was trained on; where that is one's own, `permutation` if it reads the query stream, else `denoising`.
        facts: for the passport.

    Raises:
        ValueError: an objective that there is not, or one of another stream; another number of pieces.
    """
    fitting = [name for name, known in OBJECTIVES.items() if known.two_streams == model.backbone.two_streams]
    if objective not in fitting:
        raise ValueError(
            f"objective ({objective!r}) says which stream predictions are read from; for this model it must be {' or '.join(fitting)}"
        )
    if len(tokenizer) != model.config.vocab_size:
        raise ValueError(
            f"the vocabulary has {len(tokenizer)} pieces, the model {model.config.vocab_size}; give the one that its text was encoded with"
        )
    weights = {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in model.named_parameters()}
    return ModelFolder(model.config, weights, tokenizer, objective, facts, "xlpre")
