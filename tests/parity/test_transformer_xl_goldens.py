"""Causal models equal Transformer-XL (kimiyoung/transformer-xl pytorch/mem_transformer.py), forward and backward.

Not claimed: segments after the first with absolute positions (attn_type 2, 3). The original adds positions to its cached memory in every
segment; here memory is stored without positions.
"""

import json

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from tests.parity.xlnet import TOLERANCE, check_gradients, copy_weights, select
from xlpre.batch import Batch, make_batch
from xlpre.conversion.transformer_xl import config_from, native_weights
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory

pytestmark = pytest.mark.usefixtures("by_each_backend")


def tensors(arrays, prefix: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in select(arrays, prefix).items()}


def batch_of(part, ext_len: int) -> Batch:
    ids, targets = (torch.from_numpy(part[f"in/{name}"].T.copy()) for name in ("data", "target"))
    B, T = ids.shape
    positions = torch.arange(T).expand(B, -1)
    return make_batch(
        ids,
        query_rank=(positions + 1).int(),
        key_rank=positions.int(),
        target_positions=positions,
        targets=targets,
        visible_mem_len=torch.full((B,), 10**6),
        reuse_len=T - ext_len,  # "extended context": the last tokens do not enter memory
    )


@pytest.mark.parametrize("path", files("txl_*.npz"))
def test_losses_memory_and_gradients_equal_transformer_xl(path):
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    shape = config_from(config)
    model = LanguageModel(shape, two_streams=False)
    copy_weights(model, native_weights(shape, tensors(arrays, "param")), unused=("backbone.mask_embedding",))
    segments = sorted({name.split("/")[0] for name in arrays if name.startswith("seg")})
    absolute = shape.positions in ("sinusoidal", "learned")
    changes_memory = absolute and config["mem_len"] > 0  # the original adds positions to it again
    compared = segments[:1] if changes_memory else segments
    memory = initial_memory(shape, arrays["seg0/in/data"].shape[1])
    for segment in compared:
        part = select(arrays, segment)
        # the original swaps two lengths, so that its first segment ignores ext_len
        batch = batch_of(part, config["ext_len"] if segment != segments[0] else 0)
        hidden, memory = model.backbone(batch, memory)
        losses = model.lm_head(hidden, batch.targets)
        np.testing.assert_allclose(losses.detach(), part["out/loss"].T, atol=TOLERANCE, err_msg=segment)
        log_probabilities = model.lm_head(hidden).log_softmax(-1)
        reference_losses = -log_probabilities.gather(2, batch.targets[:, :, None]).squeeze(2)
        np.testing.assert_allclose(reference_losses.detach(), part["out/loss"].T, atol=TOLERANCE)
        if "out/new_mems" in part:
            n_columns = part["out/new_mems"].shape[1]
            expected = torch.from_numpy(part["out/new_mems"][: shape.n_layer]).transpose(1, 2)
            np.testing.assert_allclose(
                add_positions(model, memory.hidden[:, :, memory.mem_len - n_columns :]).detach(),
                expected,
                atol=TOLERANCE,
            )
    if not changes_memory and any(name.startswith("grad/") for name in arrays):
        # the recorded gradient is of the last segment read once more, with the memory after it
        hidden, _ = model.backbone(batch, memory)
        model.lm_head(hidden, batch.targets).mean().backward()
        check_gradients(model, native_weights(shape, tensors(arrays, "grad")))


def add_positions(model, hidden: torch.Tensor) -> torch.Tensor:
    """Memory (L, B, M, D) as the original caches it after its first segment: with the positions of that segment."""
    shape = model.config
    if shape.positions not in ("sinusoidal", "learned"):
        return hidden
    length = hidden.size(2)
    encoding = model.backbone.pos_encoding(length, length, hidden)[0, 1 : length + 1]
    if shape.positions == "sinusoidal":
        return torch.cat([hidden[:1] + encoding, hidden[1:]])
    tables = [layer.position_embedding.table for layer in model.backbone.layers]
    return torch.stack([x + table[encoding] for x, table in zip(hidden, tables, strict=True)])
