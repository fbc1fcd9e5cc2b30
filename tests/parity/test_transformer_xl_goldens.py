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
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory

pytestmark = pytest.mark.usefixtures("by_each_backend")

POSITIONS = ["relative", "shaw", "sinusoidal", "learned"]  # attn_type 0 to 3


def build_config(config) -> ModelConfig:
    positions = POSITIONS[config["attn_type"]]
    absolute = positions in ("sinusoidal", "learned")
    length = config["tgt_len"] + config["ext_len"] + config["mem_len"]
    return ModelConfig(
        vocab_size=config["n_token"],
        n_layer=config["n_layer"],
        d_model=config["d_model"],
        n_head=config["n_head"],
        d_head=config["d_head"],
        d_inner=config["d_inner"],
        feed_forward="relu",
        norm=("pre_keys" if absolute else "pre") if config["pre_lnorm"] else "post",
        norm_eps=1e-5,
        mem_len=config["mem_len"],
        attention_span="exclude_self_slot" if config["same_length"] else "all",
        positions=positions,
        n_positions=length if positions in ("shaw", "learned") else None,
        clamp_len=None
        if positions == "learned" or config["clamp_len"] < 1
        else config["clamp_len"],  # the original's type 3 ignores it
        relative_segments=False,
        untie_r=positions == "shaw",
        cutoffs=config["cutoffs"],
        div_value=config["div_val"],
        d_embed=config["d_embed"],
        scale_embedding=True,
        tie_embedding=config["tie_weight"],
        tie_projections=config["tie_projs"] if len(config["tie_projs"]) == len(config["cutoffs"]) + 1 else [],
        dropout=0.0,
        dropatt=0.0,
    )


def by_distance(rows: torch.Tensor) -> torch.Tensor:
    """Convert a table (N, ...) whose last row is distance 0 to one that also has rows for later keys."""
    return torch.cat([torch.zeros_like(rows[1:]), rows.flip(0)])


def from_txl(shape: ModelConfig, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Convert weights or gradients."""
    external = {name: torch.from_numpy(array) for name, array in arrays.items()}
    native: dict[str, torch.Tensor] = {}

    def take(name, external_name, transform=lambda w: w):
        if external_name in external:
            native[name] = transform(external[external_name])

    if shape.has_plain_embedding:
        take("backbone.word_embedding.weight", "word_emb.emb_layers.0.weight")
        take("lm_head.bias", "crit.out_layers.0.bias")
    else:
        for i, (low, high, _) in enumerate(shape.clusters):
            scores = f"lm_head.clusters.{i}"
            take(f"backbone.word_embedding.clusters.{i}.table", f"word_emb.emb_layers.{i}.weight")
            take(f"backbone.word_embedding.clusters.{i}.projection", f"word_emb.emb_projs.{i}")
            take(f"{scores}.projection", f"crit.out_projs.{i}")
            if not shape.tie_embedding:
                take(f"{scores}.table", f"crit.out_layers.{i}.weight")
            if shape.div_value > 1:
                take(f"{scores}.bias", f"crit.out_layers.{i}.bias")
            else:  # one layer for all clusters
                take(f"{scores}.bias", "crit.out_layers.0.bias", lambda b: b[low:high])  # noqa: B023
        # the PyTorch code assigns the last entry of the head to the first cluster of rare words
        take("lm_head.clusters.0.cluster_logits.weight", "crit.cluster_weight", lambda w: w.flip(0))
        take("lm_head.clusters.0.cluster_logits.bias", "crit.cluster_bias", lambda w: w.flip(0))
    if shape.positions == "relative":
        take("backbone.shared_biases.content", "r_w_bias")
        take("backbone.shared_biases.position", "r_r_bias")
    for i in range(shape.n_layer):
        layer, external_layer = f"backbone.layers.{i}", f"layers.{i}"
        width = shape.n_head * shape.head_width
        for n, name in enumerate(("query", "key", "value")):
            transform = lambda w, n=n, width=width: w.split(width)[n]  # noqa: E731
            take(f"{layer}.attention.{name}.weight", f"{external_layer}.dec_attn.qkv_net.weight", transform)
        take(f"{layer}.attention.query.weight", f"{external_layer}.dec_attn.q_net.weight")
        take(f"{layer}.attention.key.weight", f"{external_layer}.dec_attn.kv_net.weight", lambda w: w.chunk(2)[0])
        take(f"{layer}.attention.value.weight", f"{external_layer}.dec_attn.kv_net.weight", lambda w: w.chunk(2)[1])
        take(f"{layer}.attention.output.weight", f"{external_layer}.dec_attn.o_net.weight")
        take(f"{layer}.attention.terms.position.key.weight", f"{external_layer}.dec_attn.r_net.weight")
        for norm, scope in (("attention_norm", "dec_attn"), ("feed_forward_norm", "pos_ff")):
            for part in ("weight", "bias"):
                take(f"{layer}.{norm}.{part}", f"{external_layer}.{scope}.layer_norm.{part}")
        for part in ("weight", "bias"):
            take(f"{layer}.feed_forward.inner.{part}", f"{external_layer}.pos_ff.CoreNet.0.{part}")
            take(f"{layer}.feed_forward.outer.{part}", f"{external_layer}.pos_ff.CoreNet.3.{part}")
        if shape.positions == "shaw":
            native[f"{layer}.attention.terms.content.r_bias"] = external["r_w_bias"][i]
            native[f"{layer}.attention.terms.position.keys"] = by_distance(external["r_emb"][i])
            native[f"{layer}.attention.terms.position.offsets"] = by_distance(external["r_bias"][i])
        if shape.positions == "learned":
            native[f"{layer}.position_embedding.table"] = by_distance(external["r_emb"][i].flatten(1))
    return native


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
    shape = build_config(config)
    model = LanguageModel(shape, two_streams=False)
    copy_weights(model, from_txl(shape, select(arrays, "param")), unused=("backbone.mask_embedding",))
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
        check_gradients(model, from_txl(shape, select(arrays, "grad")))


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
