"""Models and batches from golden files of the original XLNet (TensorFlow), and comparisons with them."""

import numpy as np
import pytest
import torch

from xlpre.batch import HIDDEN_RANK, Batch, make_batch
from xlpre.model.config import ModelConfig
from xlpre.model.lm_head import target_losses
from xlpre.model.memory import Memory

TOLERANCE = 2e-5  # of outputs, memory, losses
GRADIENT_TOLERANCE = 5e-6  # of the largest gradient


def select(arrays, prefix: str) -> dict[str, np.ndarray]:
    """Arrays whose name starts with `prefix/`, by the rest of their name."""
    return {name.removeprefix(f"{prefix}/"): a for name, a in arrays.items() if name.startswith(f"{prefix}/")}


def same_length(config) -> bool:
    """True if every query sees the same number of keys. The original applies the setting in causal models only."""
    return bool(config.get("same_length")) and config["attn_type"] == "uni"


def build_config(arrays, config) -> ModelConfig:
    return ModelConfig(
        vocab_size=config["n_token"],
        n_layer=config["n_layer"],
        d_model=config["d_model"],
        n_head=config["n_head"],
        d_head=config["d_head"],
        d_inner=config["d_inner"],
        feed_forward=config["ff_activation"],
        # same_length of the original counts the existing columns
        mem_len=(config.get("mems_given", 0) if same_length(config) else config.get("mem_len")) or 0,
        clamp_len=config.get("clamp_len", -1) if config.get("clamp_len", -1) > 0 else None,
        untie_r=config["untie_r"],
        relative_segments="param/model/transformer/seg_embed" in arrays,
        attention_span="same_length" if same_length(config) else "all",
        dropout=0.0,
        dropatt=0.0,
    )


@torch.no_grad()
def copy_weights(model, weights: dict[str, torch.Tensor], unused: tuple[str, ...] = ()) -> None:
    """Copy all weights into the model. Parameters without weights must be listed in `unused`."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() - weights.keys() <= set(unused) and weights.keys() <= parameters.keys()
    for name, weight in weights.items():
        parameters[name].copy_(weight)


def masked_pairs(arrays, config) -> tuple[np.ndarray, np.ndarray]:
    """Masked pairs (B, T, T) of the file, from its masks and attention type, and its padding (B, T)."""
    T, B = arrays["in/inp_k"].shape
    masked = np.zeros((B, T, T), bool)
    if "in/perm_mask" in arrays:
        masked |= arrays["in/perm_mask"].transpose(2, 0, 1) > 0
    padding = arrays["in/input_mask"].T > 0 if "in/input_mask" in arrays else np.zeros((B, T), bool)
    masked |= padding[:, None, :]
    if config["attn_type"] == "uni":
        masked |= np.triu(np.ones((T, T), bool), 1)
    return masked, padding


def ranks_of_mask(masked: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Query and key ranks (T,) that give the mask `masked` (T, T), or None if no ranks do. A row may see itself."""
    n_queries = (~masked).sum(0)  # that see each key: the more, the lower its rank
    key = np.unique(-n_queries, return_inverse=True)[1]
    is_other = ~np.eye(len(masked), dtype=bool)
    query = np.array([key[(~masked[i]) & is_other[i]].max(initial=-1) + 1 for i in range(len(masked))])
    query = np.where(~masked.diagonal(), np.maximum(query, key + 1), query)
    return (query, key) if (~(query[:, None] > key[None]) == masked).all() else None


def unsupported_reason(arrays, config) -> str | None:
    """Reason why parity is not claimed for a case (docs/parity.md), or None."""
    masked, _ = masked_pairs(arrays, config)
    if any(ranks_of_mask(row) is None for row in masked):
        return "a causal mask on top of a permutation mask: no factorization order gives it"
    sees_nothing = masked.all(-1) if "in/mems" not in arrays else np.zeros(masked.shape[:2], bool)
    mapped = arrays["in/target_mapping"].sum(0) if "in/target_mapping" in arrays else arrays.get("in/inp_q", 0)
    if (sees_nothing & (np.transpose(mapped) > 0)).any():
        return (
            "a query without visible keys outputs zero here; the original attends to everything, including its target"
        )
    return None


def batch_of(arrays, config, positions: np.ndarray, **targets) -> Batch:
    """Batch of a file with targets at `positions` (B, P)."""
    ids = arrays["in/inp_k"].T
    B, T = ids.shape
    masked, padding = masked_pairs(arrays, config)
    ranks = [ranks_of_mask(mask) for mask in masked]
    query_rank, key_rank = (np.stack(side) for side in zip(*ranks, strict=True))
    key_rank[padding] = HIDDEN_RANK
    backward = np.arange(B) >= B // 2 if config["bi_data"] else np.zeros(B, bool)
    seg = arrays["in/seg_id"].T if "in/seg_id" in arrays else np.zeros_like(ids)
    tensor = lambda a: torch.from_numpy(np.ascontiguousarray(a))  # noqa: E731
    return make_batch(
        tensor(ids).long(),
        query_rank=tensor(query_rank).int(),
        key_rank=tensor(key_rank).int(),
        target_positions=tensor(positions).long(),
        segment_ids=tensor(seg).long(),
        targets=tensor(targets.get("targets", np.zeros(positions.shape))).long(),
        target_weights=tensor(targets.get("weights", np.ones(positions.shape))).float(),
        backward=tensor(backward),
        visible_mem_len=torch.full((B,), 10**6),
        reuse_len=config["reuse_len"] or T,
    )


def initial_memory_of(arrays, config) -> Memory:
    """Memory of a file in the last columns, which are valid. With same_length there are no other columns, because they would count."""
    rows, length = arrays["in/inp_k"].shape[1], config["mem_len"] or 0
    mems = arrays.get("in/mems")
    n_valid = 0 if mems is None else mems.shape[1]
    columns = n_valid if same_length(config) else max(length, n_valid)
    hidden = torch.zeros(config["n_layer"], rows, columns, config["d_model"])
    if n_valid:
        hidden[:, :, -n_valid:] = torch.from_numpy(mems).transpose(1, 2)
    return Memory(hidden, torch.full((rows,), n_valid))


def read(model, arrays, config, memory):
    """Read a window as the original did.

    With a target mapping, the query stream is read at its targets. Without one, the query stream of the original has a row for every
    token. A row that is not a target starts from its token, so it equals the content stream.

    Returns:
        (B, T or P, D) output, its losses, and the new memory.
    """
    T, B = arrays["in/inp_k"].shape
    all_positions = np.tile(np.arange(T), (B, 1))
    targets = {"targets": arrays["in/target"].T, "weights": arrays["in/target_mask"].T}
    if "in/inp_q" not in arrays:
        output, new_memory = model.backbone(batch_of(arrays, config, all_positions, **targets), memory)
        labels = torch.from_numpy(targets["targets"].copy()).long()
        return output, target_losses(model.lm_head(output), labels), new_memory
    if "in/target_mapping" in arrays:
        positions = arrays["in/target_mapping"].transpose(2, 0, 1).argmax(-1)
        batch = batch_of(arrays, config, positions, **targets)
        output, new_memory = model.backbone(batch, memory)
    else:
        batch = batch_of(arrays, config, all_positions, **targets)
        is_target = torch.from_numpy(arrays["in/inp_q"].T.copy()) > 0
        from_queries, new_memory = model.backbone(batch, memory)
        model.backbone.two_streams = False
        from_content, _ = model.backbone(batch, memory)
        model.backbone.two_streams = True
        output = torch.where(is_target[:, :, None], from_queries, from_content)
    return output, target_losses(model.lm_head(output), batch.targets), new_memory


def check_window(model, arrays, config, memory) -> tuple[torch.Tensor, Memory]:
    """Read one window, compare all results with the file, and return loss and memory."""
    output, losses, new_memory = read(model, arrays, config, memory)
    weights = torch.from_numpy(arrays["in/target_mask"].T.copy()).float()
    loss = (losses * weights).sum() / weights.sum()
    # a padding target (weight 0) is an all-zero row of the original's target mapping, which reads no position; without a mapping its
    # query stream also has a row for padding, which does not see itself
    is_compared = weights > 0
    if "in/target_mapping" not in arrays:
        padding = torch.from_numpy(masked_pairs(arrays, config)[1])
        is_compared = is_compared | ~padding if "in/inp_q" in arrays else torch.ones_like(is_compared)
    np.testing.assert_allclose(
        output[is_compared].detach(), arrays["out/output"].swapaxes(0, 1)[is_compared.numpy()], atol=TOLERANCE
    )
    np.testing.assert_allclose(
        losses[is_compared].detach(), arrays["out/lm_loss"].T[is_compared.numpy()], atol=TOLERANCE
    )
    np.testing.assert_allclose(loss.item(), arrays["out/total_loss"], atol=TOLERANCE)
    if "out/new_mems" in arrays:
        expected = arrays["out/new_mems"].swapaxes(1, 2)
        n_columns = min(expected.shape[2], new_memory.mem_len)
        assert (new_memory.valid.clamp(max=n_columns) == n_columns).all()
        np.testing.assert_allclose(
            new_memory.hidden[:, :, new_memory.mem_len - n_columns :],
            expected[:, :, expected.shape[2] - n_columns :],
            atol=TOLERANCE,
        )
    return loss, new_memory


def check_gradients(model, expected: dict[str, torch.Tensor]) -> None:
    """Compare the gradients of the model with those of a file. A gradient that the file lacks must be None or zero."""
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, parameter in model.named_parameters():
        actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = expected.get(name, torch.zeros_like(parameter))
        np.testing.assert_allclose(actual, gradient, atol=GRADIENT_TOLERANCE * largest, rtol=0, err_msg=name)


def skip_unsupported(arrays, config) -> None:
    """Skip the test if parity is not claimed for the case."""
    if reason := unsupported_reason(arrays, config):
        pytest.skip(f"parity is not claimed: {reason}")
