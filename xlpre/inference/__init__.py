"""Inference from token ids or text: batches without an objective, fillings of blanks, scores, generation, embeddings and evaluation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlpre.inference.cloze import predict_blanks
    from xlpre.inference.embeddings import embed
    from xlpre.inference.evaluation import evaluate
    from xlpre.inference.filling import fill
    from xlpre.inference.generation import GenerationConfig, generate
    from xlpre.inference.scoring import order_consistency, score

# public name: its module, which is imported when the name is used
_MODULES = {
    "GenerationConfig": "generation",
    "embed": "embeddings",
    "evaluate": "evaluation",
    "fill": "filling",
    "generate": "generation",
    "order_consistency": "scoring",
    "predict_blanks": "cloze",
    "score": "scoring",
}
__all__ = ["GenerationConfig", "embed", "evaluate", "fill", "generate", "order_consistency", "predict_blanks", "score"]


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
