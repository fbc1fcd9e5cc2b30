"""Collation of single texts into one batch, padded on the left as in XLNet's fine-tuning, so that <cls> stays the last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import FIELD_SPECS, HIDDEN_RANK, Batch
from xlpre.common.errors import InputError
from xlpre.text import special_tokens

# all other fields are padded with 0, so padding sees only itself, and its targets have weight 0
PADDING = {"input_ids": special_tokens.PAD, "key_rank": HIDDEN_RANK}


def collate(batches: Sequence[Batch]) -> Batch:
    """Join batches of different lengths into one. In each row, the padding comes first, then the tokens of its text; likewise for targets.

    Args:
        batches: batches without memory, from `unmasked_batch`, `masked_batch` or `cloze_batch` (xlpre/inference/cloze.py).

    Returns:
        Batch in which P is the largest number of targets, and T is large enough to hold every text and its padding targets.
        Padding tokens have `key_rank == HIDDEN_RANK`, padding targets have weight 0.

    Raises:
        InputError: there are no batches, or a batch reads or writes memory: padding would come between the memory and the tokens.
    """
    if not batches:
        raise InputError("batches=[] is invalid: there must be at least one batch.")
    if any(batch.reuse_len or bool(batch.visible_mem_len.any()) for batch in batches):
        raise InputError(
            "a batch with reuse_len or visible_mem_len above 0 is invalid here: padding would come between its memory and its "
            "tokens. Run it without `collate`."
        )
    P = max(batch.targets.size(1) for batch in batches)
    # padding targets need padding tokens as positions
    T = max(batch.input_ids.size(1) + P - batch.targets.size(1) for batch in batches)
    rows = [_pad(batch, T, P) for batch in batches]
    return Batch(**{name: torch.cat([row[name] for row in rows]) for name in FIELD_SPECS}, reuse_len=0)


def _pad(batch: Batch, length: int, n_targets: int) -> dict[str, Tensor]:
    """Return the fields of a batch, padded to `length` tokens and `n_targets` targets."""
    width = {"BT": length, "BP": n_targets}
    fields = {}
    for name, (letters, _) in FIELD_SPECS.items():
        x = getattr(batch, name)
        fields[name] = F.pad(x, (width[letters] - x.size(1), 0), value=PADDING.get(name, 0)) if letters in width else x
    n_padding = n_targets - batch.targets.size(1)
    fields["target_positions"][:, :n_padding] = torch.arange(n_padding, device=batch.targets.device)
    fields["target_positions"][:, n_padding:] += length - batch.input_ids.size(1)
    return fields
