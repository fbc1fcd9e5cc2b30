"""xlpre: permutation language modeling with a Transformer-XL backbone (XLNet, arXiv:1906.08237).

`xlpre.load` opens a pretrained model. docs/python.md shows how to fill in blanks, score and generate texts, compute hidden states and
embeddings, read long texts, and train in a custom loop.

Packages, from text to trained model: `text`, `data`, `objectives`, `model`, `training`, `conversion`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlpre.pretrained import PretrainedModel, load

__all__ = ["PretrainedModel", "load"]

# Number of times that a waiting OpenMP thread polls before it sleeps. GNU's default of 300,000 slows down processes that share cores by a
# large factor (docs/performance.md). OpenMP reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Return a public name. Its module, and with it torch, is imported when the name is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xlpre import pretrained

    return getattr(pretrained, name)
