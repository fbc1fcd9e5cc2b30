"""Inference from token ids or text: batches without an objective, predictions for blanks, scores, generation and evaluation on text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlpre.inference.evaluation import evaluate
    from xlpre.inference.generation import GenerationConfig, generate
    from xlpre.inference.scoring import order_consistency, score

# public name: its module, which is imported when the name is used
_MODULES = {
    "GenerationConfig": "generation",
    "evaluate": "evaluation",
    "generate": "generation",
    "order_consistency": "scoring",
    "score": "scoring",
}
__all__ = ["GenerationConfig", "evaluate", "generate", "order_consistency", "score"]


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
