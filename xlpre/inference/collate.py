"""Batches of single texts as the rows of one batch, padded on the left, as XLNet's fine-tuning pads, so that <cls> stays the last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import SHAPES, Batch
from xlpre.objectives.objective import HIDDEN
from xlpre.text import special_tokens

PADDING = {
    "input_ids": special_tokens.PAD,
    "key_rank": HIDDEN,
}  # of the others, 0: padding sees itself alone, its targets weigh nothing


def together(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of all, whose own tokens and targets are the last ones of each row.

    Args:
        batches: of any lengths, read without memory (`whole`, `hide`, `blanks_batch` make such).

    Returns:
        A batch with T at least that of the longest and P the most targets of any; `target_weights` are 0 at a target that only fills
        its row, `key_rank == HIDDEN` is true at a token that does.

    Raises:
        ValueError: no batch; one that leaves or shows memory, from whose end padding would part its tokens.
    """
    if not batches:
        raise ValueError("there is no batch to put together; give one or more")
    if any(batch.reuse_len or bool(batch.visible_mem_len.any()) for batch in batches):
        raise ValueError(
            "a batch with reuse_len or visible_mem_len above 0 goes with a memory, which must end where its tokens begin; read it by itself, or "
            "with rows of its own length"
        )
    P = max(batch.targets.size(1) for batch in batches)
    T = max(
        batch.input_ids.size(1) + P - batch.targets.size(1) for batch in batches
    )  # so that targets find places in the padding
    rows = [_padded(batch, T, P) for batch in batches]
    return Batch(**{name: torch.cat([row[name] for row in rows]) for name in SHAPES}, reuse_len=0)


def _padded(batch: Batch, length: int, n_targets: int) -> dict[str, Tensor]:
    """The fields of a batch, of so many tokens and targets."""
    width = {"BT": length, "BP": n_targets}
    found = {}
    for name, (letters, _) in SHAPES.items():
        x = getattr(batch, name)
        found[name] = F.pad(x, (width[letters] - x.size(1), 0), value=PADDING.get(name, 0)) if letters in width else x
    added = n_targets - batch.targets.size(1)
    found["target_positions"][:, :added] = torch.arange(added, device=batch.targets.device)
    found["target_positions"][:, added:] += length - batch.input_ids.size(1)
    return found
