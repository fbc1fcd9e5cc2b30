"""Pretrained model with its vocabulary: `xlpre.load("runs/mine")`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.conversion.model_folder import load_folder, resolve_model_dir
from xlpre.conversion.task_model_folder import TASK
from xlpre.inference.cloze import TOP_K, ClozeResult, predict_blanks
from xlpre.inference.embeddings import embed
from xlpre.inference.evaluation import Evaluation, HeldOutText, evaluate
from xlpre.inference.filling import Filling, fill
from xlpre.inference.filling import check_objective as check_fills_blanks
from xlpre.inference.generation import BATCH_SIZE, Continuation, GenerationConfig, TextCallback, generate
from xlpre.inference.modes import SCORE_MODES, resolve_mode
from xlpre.inference.scoring import OrderConsistency, TextScore, order_consistency, score
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import select_device

Texts = Sequence[str] | Sequence[np.ndarray]


def load(path: str | Path, device: str | None = None) -> PretrainedModel:
    """Load a pretrained model and its vocabulary.

    Args:
        path: run folder, or model folder of xlpre, Hugging Face's XLNet or the TensorFlow release.
        device: `cpu` or `cuda`. None: a GPU if there is one.

    Raises:
        InputError: `device` is not available; the folder cannot be read (see `load_folder`); or it has no vocabulary.
    """
    if device not in (None, "cpu", "cuda"):
        raise InputError(
            f"device={device!r} is invalid: it must be cpu or cuda. Leave it out for a GPU if there is one."
        )
    target = select_device(device)
    folder = load_folder(path)
    if (resolve_model_dir(path) / TASK).exists():
        warnings.warn(
            f"{path} is fine-tuned: its task head is not used. Predict with finetune/predict.py.", stacklevel=2
        )
    tokenizer = folder.require_tokenizer(path)
    return PretrainedModel(folder.model().to(target), tokenizer, folder.objective)


@dataclass(frozen=True)
class PretrainedModel:
    """Pretrained model with its vocabulary and its objective.

    Each method calls the function of the same name in `xlpre.inference`, which documents its arguments, results and errors.

    Attributes:
        model: language model in evaluation mode.
        tokenizer: its vocabulary.
        objective: name of its pretraining objective.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    objective: str

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.backbone.device

    def predict_blanks(self, text: str, top_k: int = TOP_K) -> ClozeResult:
        """Predict each missing piece of a text independently."""
        check_fills_blanks(self.objective)
        return predict_blanks(self.model, self.tokenizer, text, top_k)

    def fill(self, texts: Sequence[str], **settings: Any) -> list[list[Filling]]:
        """Fill in the blanks of texts jointly."""
        return fill(self.model, self.tokenizer, texts, objective=self.objective, **settings)

    def score(self, texts: Texts, mode: str | None = None, **settings: Any) -> list[TextScore]:
        """Compute the log-likelihood of texts."""
        return score(self.model, self.tokenizer, texts, mode, objective=self.objective, **settings)

    def order_consistency(self, texts: Texts, **settings: Any) -> OrderConsistency:
        """Measure the spread of the log-likelihood of texts over factorization orders."""
        resolve_mode("any-order", self.objective, SCORE_MODES)
        return order_consistency(self.model, self.tokenizer, texts, **settings)

    def evaluate(self, texts: Sequence[str] | HeldOutText, mode: str | None = None, **settings: Any) -> Evaluation:
        """Compute the loss, perplexity and bits per byte of documents."""
        return evaluate(self.model, self.tokenizer, texts, mode, objective=self.objective, **settings)

    def embed(self, texts: Texts, pooling: str = "mean", **settings: Any) -> Tensor:
        """Compute a vector for each text."""
        return embed(self.model, self.tokenizer, texts, pooling, objective=self.objective, **settings)

    def generate(
        self, prompts: Texts, *, batch_size: int = BATCH_SIZE, on_text: TextCallback | None = None, **settings: Any
    ) -> list[Continuation]:
        """Continue texts. `settings` are the fields of `GenerationConfig`."""
        config, objective = GenerationConfig(**settings), self.objective
        return generate(
            self.model, self.tokenizer, prompts, config, objective=objective, batch_size=batch_size, on_text=on_text
        )
