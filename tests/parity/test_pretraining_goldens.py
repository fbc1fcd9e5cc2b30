"""The two-stream model equals the original's own numbers (zihangdai/xlnet run in TensorFlow), forward and backward."""

import json

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from xlpre.batch import Batch
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel, target_losses
from xlpre.model.memory import Memory
from xlpre.model.visibility import HIDDEN

# what a rule of ranks cannot say, or what is left out on purpose
OUTSIDE = {
    "full_mask_row_nomem": "a query that sees nothing outputs zero here; the original attends to everything, its answer included",
    "attn_uni_biData": "a causal mask on top of a permutation mask",
    "attn_uni_nomem": "a causal mask on top of a permutation mask",
    "attn_uni_same_length": "a causal mask on top of a permutation mask",
    "attn_uni_same_length_nomem": "a causal mask on top of a permutation mask",
    "attn_uni": "a causal mask on top of a permutation mask",
    "attn_uni_no_perm": "positions of a causal model: belongs to the Transformer-XL goldens",
    "no_target_mapping": "its query stream starts from the token itself wherever that is no target, which no batch of targets asks for",
    "two_segments_attn_uni_same_length": "a causal mask on top of a permutation mask",
}


def load_parameters(model: LanguageModel, arrays, prefix: str) -> dict[str, tuple[torch.Tensor, np.ndarray]]:
    """Pairs (our parameter or a slice of it, the original's array), by the original's name."""
    backbone, pairs = model.backbone, {}
    root = f"{prefix}/model/transformer/"

    def pair(name, ours, change=lambda a: a):
        if root + name in arrays:
            pairs[name] = (ours, change(arrays[root + name]))

    pair("word_embedding/lookup_table", backbone.embedding.weight)
    pair("mask_emb/mask_emb", backbone.mask_embedding, lambda a: a[0, 0])
    if f"{prefix}/model/lm_loss/bias" in arrays:
        pairs["lm_loss/bias"] = (model.output.bias, arrays[f"{prefix}/model/lm_loss/bias"])
    flat = lambda a: a.reshape(a.shape[0], -1)  # noqa: E731
    for i, layer in enumerate(backbone.layers):
        attention, ff = layer.attention, layer.feed_forward
        at = f"layer_{i}/rel_attn/"
        for name, linear in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            pair(at + f"{name}/kernel", linear.weight, lambda a: flat(a).T)
        pair(at + "r/kernel", attention.terms["position"].key.weight, lambda a: flat(a).T)
        pair(at + "o/kernel", attention.output.weight, flat)
        for scope, norm in ((at, layer.attention_norm), (f"layer_{i}/ff/", layer.feed_forward_norm)):
            pair(scope + "LayerNorm/gamma", norm.weight)
            pair(scope + "LayerNorm/beta", norm.bias)
        for name, linear in (("layer_1", ff.inner), ("layer_2", ff.outer)):
            pair(f"layer_{i}/ff/{name}/kernel", linear.weight, lambda a: a.T)
            pair(f"layer_{i}/ff/{name}/bias", linear.bias)
        if "segment" in attention.terms:
            name = "seg_embed"
            if root + name in arrays:
                pairs[f"{name}/{i}"] = (attention.terms["segment"].same_different, arrays[root + name][i])
        for name, term in (("r_w_bias", "content"), ("r_r_bias", "position"), ("r_s_bias", "segment")):
            if term in attention.terms and root + name in arrays:
                array = arrays[root + name]
                pairs[f"{name}/{i}"] = (attention.terms[term].r_bias, array[i] if array.ndim == 3 else array)
    return pairs


def ranks_of_mask(masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranks (T,) whose rule gives `masked` (T, T), where a row may or may not see itself."""
    seen_by = (~masked).sum(0)  # how many queries see a key: the more, the lower its rank
    key = np.unique(-seen_by, return_inverse=True)[1]
    off = ~np.eye(len(masked), dtype=bool)
    query = np.array([key[(~masked[i]) & off[i]].max(initial=-1) + 1 for i in range(len(masked))])
    query = np.where(~masked.diagonal(), np.maximum(query, key + 1), query)
    rebuilt = ~(query[:, None] > key[None])
    assert (rebuilt == masked).all()
    return query, key


def batch_of(arrays, config) -> Batch:
    ids = arrays["in/inp_k"].T
    B, T = ids.shape
    masked = np.zeros((B, T, T), bool)
    if "in/perm_mask" in arrays:
        masked |= arrays["in/perm_mask"].transpose(2, 0, 1) > 0
    padding = arrays["in/input_mask"].T > 0 if "in/input_mask" in arrays else np.zeros((B, T), bool)
    masked |= padding[:, None, :]
    ranks = [ranks_of_mask(m) for m in masked]
    key = np.stack([k for _, k in ranks])
    key[padding] = HIDDEN
    mapping = arrays["in/target_mapping"].transpose(2, 0, 1)
    backward = np.arange(B) >= B // 2 if config["bi_data"] else np.zeros(B, bool)
    seg = arrays["in/seg_id"].T if "in/seg_id" in arrays else np.zeros_like(ids)
    t = torch.from_numpy
    return Batch(
        input_ids=t(np.ascontiguousarray(ids)).long(),
        segment_ids=t(np.ascontiguousarray(seg)).long(),
        query_rank=t(np.stack([q for q, _ in ranks])).int(),
        key_rank=t(key).int(),
        target_positions=t(mapping.argmax(-1)).long(),
        targets=t(np.ascontiguousarray(arrays["in/target"].T)).long(),
        target_weights=t(np.ascontiguousarray(arrays["in/target_mask"].T)).float(),
        backward=t(backward),
        continues=torch.ones(B, dtype=torch.bool),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=config["reuse_len"] or T,
    )


def model_of(arrays, config) -> LanguageModel:
    """A model of the file's shape with the file's parameters."""
    shape = ModelConfig(
        vocab_size=config["n_token"],
        n_layer=config["n_layer"],
        d_model=config["d_model"],
        n_head=config["n_head"],
        d_head=config["d_head"],
        d_inner=config["d_inner"],
        feed_forward=config["ff_activation"],
        mem_len=config["mem_len"] or 0,
        clamp_len=config["clamp_len"],
        untie_r=config["untie_r"],
        relative_segments=any(name.endswith("in/seg_id") for name in arrays),
        dropout=0.0,
        dropatt=0.0,
    )
    model = LanguageModel(shape, two_streams=True)
    with torch.no_grad():
        for ours, theirs in load_parameters(model, arrays, "param").values():
            ours.copy_(torch.from_numpy(np.ascontiguousarray(theirs)))
    return model


def first_memory_of(arrays, config) -> Memory:
    """The file's memory in the last columns, as many of them valid."""
    rows, length = arrays["in/inp_k"].shape[1], config["mem_len"] or 0
    mems = arrays.get("in/mems")
    given = 0 if mems is None else mems.shape[1]
    hidden = torch.zeros(config["n_layer"], rows, max(length, given), config["d_model"])
    if given:
        hidden[:, :, -given:] = torch.from_numpy(mems).transpose(1, 2)
    return Memory(hidden, torch.full((rows,), given))


def check_window(model, arrays, config, memory) -> tuple[torch.Tensor, Memory]:
    """Read one window, compare everything it gives with the file, return its loss and memory."""
    batch = batch_of(arrays, config)
    output, new_memory = model.backbone(batch, memory)
    losses = target_losses(model.output(output), batch.targets)
    loss = (losses * batch.target_weights).sum() / batch.target_weights.sum()
    # a padded target (weight 0) is an all-zero row of the original's target mapping, which reads no place at all
    real = batch.target_weights > 0
    np.testing.assert_allclose(output[real].detach(), arrays["out/output"].swapaxes(0, 1)[real], atol=2e-5)
    np.testing.assert_allclose(losses[real].detach(), arrays["out/lm_loss"].T[real], atol=2e-5)
    np.testing.assert_allclose(loss.item(), arrays["out/total_loss"], atol=2e-5)
    if config["mem_len"]:
        kept = arrays["out/new_mems"].shape[1]
        assert (new_memory.valid == kept).all()
        np.testing.assert_allclose(new_memory.hidden[:, :, -kept:].swapaxes(1, 2), arrays["out/new_mems"], atol=2e-5)
    return loss, new_memory


def check_gradients(model, arrays, prefix="grad"):
    pairs = load_parameters(model, arrays, prefix)
    largest = max(np.abs(theirs).max() for _, theirs in pairs.values())
    for name, (ours, theirs) in pairs.items():
        np.testing.assert_allclose(ours.grad, theirs, atol=5e-6 * largest, err_msg=name)


@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz", outside=OUTSIDE))
def test_outputs_memory_losses_and_gradients_equal_the_originals(path):
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    model = model_of(arrays, config)
    windows = sorted({name.split("/")[0] for name in arrays if name.startswith("seg")}) or [None]
    memory, prefix = None, "grad"
    for window in windows:  # two windows in a row, the second with the memory of the first, or a single one
        part = arrays
        if window is not None:
            prefix = f"{window}/grad"
            part = {name.removeprefix(f"{window}/"): array for name, array in arrays.items() if name.startswith(window)}
        memory = memory or first_memory_of(part, config)
        loss, memory = check_window(model, part, config, memory)
    loss.backward()
    if any(name.startswith(prefix) for name in arrays):  # some files hold the forward pass alone
        check_gradients(model, arrays, prefix)
