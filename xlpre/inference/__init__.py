"""Inference from token ids or text: batches without an objective, fillings of blanks, scores, generation, embeddings and evaluation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlpre.inference.batches import collate, masked_batch, unmasked_batch
    from xlpre.inference.cloze import cloze_batch, predict_blanks
    from xlpre.inference.embeddings import embed
    from xlpre.inference.evaluation import evaluate
    from xlpre.inference.filling import fill
    from xlpre.inference.generation import GenerationConfig, generate
    from xlpre.inference.scoring import order_consistency, score

# public name: its module, which is imported when the name is used
_MODULES = {
    "GenerationConfig": "generation",
    "cloze_batch": "cloze",
    "collate": "batches",
    "embed": "embeddings",
    "evaluate": "evaluation",
    "fill": "filling",
    "generate": "generation",
    "masked_batch": "batches",
    "order_consistency": "scoring",
    "predict_blanks": "cloze",
    "score": "scoring",
    "unmasked_batch": "batches",
}
__all__ = [
    "GenerationConfig",
    "cloze_batch",
    "collate",
    "embed",
    "evaluate",
    "fill",
    "generate",
    "masked_batch",
    "order_consistency",
    "predict_blanks",
    "score",
    "unmasked_batch",
]


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
