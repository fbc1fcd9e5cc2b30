"""The causal model equals Transformer-XL's own numbers (kimiyoung/transformer-xl pytorch/mem_transformer.py), forward and backward.

Outside: segments after the first for absolute positions (attn_type 2, 3), where the original adds places to its cached memory again and
again; here memory is kept without places.
"""

import json

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from tests.parity.xlnet import GRADIENT_TOLERANCE, TOLERANCE, part_of, put
from xlpre.batch import Batch
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory

pytestmark = pytest.mark.usefixtures("by_each_backend")

POSITIONS = ["relative", "shaw", "sinusoidal", "learned"]  # attn_type 0 to 3


def shape_of(config) -> ModelConfig:
    kind = POSITIONS[config["attn_type"]]
    absolute = kind in ("sinusoidal", "learned")
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
        positions=kind,
        n_positions=length if kind in ("shaw", "learned") else 0,
        clamp_len=-1 if kind == "learned" else config["clamp_len"],  # the original's type 3 ignores it
        relative_segments=False,
        untie_r=kind == "shaw",
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
    """Their (N, ...) table, whose last row is distance 0, as ours, which also has rows for keys to come."""
    return torch.cat([torch.zeros_like(rows[1:]), rows.flip(0)])


def from_txl(shape: ModelConfig, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Our weights (or gradients) from theirs by name."""
    theirs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ours: dict[str, torch.Tensor] = {}

    def take(name, found, change=lambda w: w):
        if found in theirs:
            ours[name] = change(theirs[found])

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
        # their PyTorch code gives the last entry of the head to the first cluster of rare words
        take("lm_head.clusters.0.cluster_logits.weight", "crit.cluster_weight", lambda w: w.flip(0))
        take("lm_head.clusters.0.cluster_logits.bias", "crit.cluster_bias", lambda w: w.flip(0))
    if shape.positions == "relative":
        take("backbone.shared_biases.content", "r_w_bias")
        take("backbone.shared_biases.position", "r_r_bias")
    for i in range(shape.n_layer):
        mine, layer = f"backbone.layers.{i}", f"layers.{i}"
        width = shape.n_head * shape.head_width
        for n, name in enumerate(("query", "key", "value")):
            take(f"{mine}.attention.{name}.weight", f"{layer}.dec_attn.qkv_net.weight", lambda w: w.split(width)[n])  # noqa: B023
        take(f"{mine}.attention.query.weight", f"{layer}.dec_attn.q_net.weight")
        take(f"{mine}.attention.key.weight", f"{layer}.dec_attn.kv_net.weight", lambda w: w.chunk(2)[0])
        take(f"{mine}.attention.value.weight", f"{layer}.dec_attn.kv_net.weight", lambda w: w.chunk(2)[1])
        take(f"{mine}.attention.output.weight", f"{layer}.dec_attn.o_net.weight")
        take(f"{mine}.attention.terms.position.key.weight", f"{layer}.dec_attn.r_net.weight")
        for norm, scope in (("attention_norm", "dec_attn"), ("feed_forward_norm", "pos_ff")):
            for part in ("weight", "bias"):
                take(f"{mine}.{norm}.{part}", f"{layer}.{scope}.layer_norm.{part}")
        for part in ("weight", "bias"):
            take(f"{mine}.feed_forward.inner.{part}", f"{layer}.pos_ff.CoreNet.0.{part}")
            take(f"{mine}.feed_forward.outer.{part}", f"{layer}.pos_ff.CoreNet.3.{part}")
        if shape.positions == "shaw":
            ours[f"{mine}.attention.terms.content.r_bias"] = theirs["r_w_bias"][i]
            ours[f"{mine}.attention.terms.position.keys"] = by_distance(theirs["r_emb"][i])
            ours[f"{mine}.attention.terms.position.offsets"] = by_distance(theirs["r_bias"][i])
        if shape.positions == "learned":
            ours[f"{mine}.position_embedding.table"] = by_distance(theirs["r_emb"][i].flatten(1))
    return ours


def batch_of(part, ext_len: int) -> Batch:
    ids, targets = (torch.from_numpy(part[f"in/{name}"].T.copy()) for name in ("data", "target"))
    B, T = ids.shape
    places = torch.arange(T).expand(B, -1)
    return Batch(
        input_ids=ids,
        segment_ids=torch.zeros_like(ids),
        query_rank=(places + 1).int(),
        key_rank=places.int(),
        target_positions=places,
        targets=targets,
        target_weights=torch.ones(B, T),
        backward=torch.zeros(B, dtype=torch.bool),
        visible_mem_len=torch.full((B,), 10**6),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=T - ext_len,  # "extended context": the last tokens do not enter memory
    )


@pytest.mark.parametrize("path", files("txl_*.npz"))
def test_losses_memory_and_gradients_equal_transformer_xls(path):
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    shape = shape_of(config)
    model = LanguageModel(shape, two_streams=False)
    put(model, from_txl(shape, part_of(arrays, "param")), spared=("backbone.mask_embedding",))
    segments = sorted({name.split("/")[0] for name in arrays if name.startswith("seg")})
    absolute = shape.positions in ("sinusoidal", "learned")
    adds_places = absolute and config["mem_len"] > 0  # to what it has cached, whenever it reads it
    compared = segments[:1] if adds_places else segments
    memory = initial_memory(shape, arrays["seg0/in/data"].shape[1])
    for segment in compared:
        part = part_of(arrays, segment)
        # the original swaps two lengths there, so that its first segment ignores ext_len
        batch = batch_of(part, config["ext_len"] if segment != segments[0] else 0)
        hidden, memory = model.backbone(batch, memory)
        losses = model.lm_head(hidden, batch.targets)
        np.testing.assert_allclose(losses.detach(), part["out/loss"].T, atol=TOLERANCE, err_msg=segment)
        log_probabilities = model.lm_head(hidden).log_softmax(-1)
        by_hand = -log_probabilities.gather(2, batch.targets[:, :, None]).squeeze(2)
        np.testing.assert_allclose(by_hand.detach(), part["out/loss"].T, atol=TOLERANCE)
        if "out/new_mems" in part:
            kept = part["out/new_mems"].shape[1]
            theirs = torch.from_numpy(part["out/new_mems"][: shape.n_layer]).transpose(1, 2)
            np.testing.assert_allclose(
                with_places(model, memory.hidden[:, :, memory.hidden.size(2) - kept :]).detach(), theirs, atol=TOLERANCE
            )
    if not adds_places and any(name.startswith("grad/") for name in arrays):
        # the recorded gradient is of the last segment read once more, with the memory after it
        hidden, _ = model.backbone(batch, memory)
        model.lm_head(hidden, batch.targets).mean().backward()
        theirs = from_txl(shape, part_of(arrays, "grad"))
        largest = max(gradient.abs().max().item() for gradient in theirs.values())
        for name, parameter in model.named_parameters():
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = theirs.get(name, torch.zeros_like(parameter))
            np.testing.assert_allclose(ours, expected, atol=GRADIENT_TOLERANCE * largest, rtol=0, err_msg=name)


def with_places(model, remembered: torch.Tensor) -> torch.Tensor:
    """Memory (L, B, M, D) as the original caches it after its first segment: with the places of that segment in it."""
    shape = model.config
    if shape.positions not in ("sinusoidal", "learned"):
        return remembered
    length = remembered.size(2)
    codes = model.backbone.pos_encoding(length, length, remembered)[0, 1 : length + 1]
    if shape.positions == "sinusoidal":
        return torch.cat([remembered[:1] + codes, remembered[1:]])
    return torch.stack(
        [hidden + layer.position_embedding.table[codes] for hidden, layer in zip(remembered, model.backbone.layers, strict=True)]
    )
