"""From a golden file of the original XLNet (TensorFlow) to a model and batches of ours, and the comparisons."""

import numpy as np
import pytest
import torch

from xlpre.batch import HIDDEN_RANK, Batch
from xlpre.conversion.tf import from_arrays
from xlpre.model.config import ModelConfig
from xlpre.model.lm_head import target_losses
from xlpre.model.memory import Memory

TOLERANCE = 2e-5  # of outputs, memory, losses
GRADIENT_TOLERANCE = 5e-6  # of the largest gradient


def part_of(arrays, prefix: str) -> dict[str, np.ndarray]:
    """The arrays under `prefix/`, without it."""
    return {name.removeprefix(f"{prefix}/"): a for name, a in arrays.items() if name.startswith(f"{prefix}/")}


def same_length(config) -> bool:
    """Whether every query looks back equally far, which the original heeds in causal models only."""
    return bool(config.get("same_length")) and config["attn_type"] == "uni"


def shape_of(arrays, config) -> ModelConfig:
    return ModelConfig(
        vocab_size=config["n_token"],
        n_layer=config["n_layer"],
        d_model=config["d_model"],
        n_head=config["n_head"],
        d_head=config["d_head"],
        d_inner=config["d_inner"],
        feed_forward=config["ff_activation"],
        # the original's same_length counts the columns that are there
        mem_len=(config.get("mems_given", 0) if same_length(config) else config.get("mem_len")) or 0,
        clamp_len=config.get("clamp_len", -1),
        untie_r=config["untie_r"],
        relative_segments="param/model/transformer/seg_embed" in arrays,
        attention_span="same_length" if same_length(config) else "all",
        dropout=0.0,
        dropatt=0.0,
    )


@torch.no_grad()
def put(model, weights: dict[str, torch.Tensor], spared: tuple[str, ...] = ()) -> None:
    """Copy all weights; those of the model that are not there must be `spared`."""
    own = dict(model.named_parameters())
    assert own.keys() - weights.keys() <= set(spared) and weights.keys() <= own.keys()
    for name, array in weights.items():
        own[name].copy_(array)


def visible_pairs(arrays, config) -> tuple[np.ndarray, np.ndarray]:
    """What is masked (B, T, T), by the file's masks and attention type, and its padding (B, T)."""
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
    """Ranks (T,) whose rule gives `masked` (T, T), where a row may or may not see itself; None if there are none."""
    seen_by = (~masked).sum(0)  # how many queries see a key: the more, the lower its rank
    key = np.unique(-seen_by, return_inverse=True)[1]
    off = ~np.eye(len(masked), dtype=bool)
    query = np.array([key[(~masked[i]) & off[i]].max(initial=-1) + 1 for i in range(len(masked))])
    query = np.where(~masked.diagonal(), np.maximum(query, key + 1), query)
    return (query, key) if (~(query[:, None] > key[None]) == masked).all() else None


def outside(arrays, config) -> str | None:
    """Why a case is beyond what is claimed, or None (docs/parity.md)."""
    masked, _ = visible_pairs(arrays, config)
    if any(ranks_of_mask(row) is None for row in masked):
        return "a causal mask on top of a permutation mask: no factorization order gives it"
    blind = masked.all(-1) if "in/mems" not in arrays else np.zeros(masked.shape[:2], bool)
    mapped = arrays["in/target_mapping"].sum(0) if "in/target_mapping" in arrays else arrays.get("in/inp_q", 0)
    if (blind & (np.transpose(mapped) > 0)).any():
        return "a query that sees nothing outputs zero here; the original attends to everything, its answer included"
    return None


def batch_of(arrays, config, positions: np.ndarray, **targets) -> Batch:
    """A batch that reads out `positions` (B, P)."""
    ids = arrays["in/inp_k"].T
    B, T = ids.shape
    masked, padding = visible_pairs(arrays, config)
    ranks = [ranks_of_mask(m) for m in masked]
    key = np.stack([k for _, k in ranks])
    key[padding] = HIDDEN_RANK
    backward = np.arange(B) >= B // 2 if config["bi_data"] else np.zeros(B, bool)
    seg = arrays["in/seg_id"].T if "in/seg_id" in arrays else np.zeros_like(ids)
    t = lambda a: torch.from_numpy(np.ascontiguousarray(a))  # noqa: E731
    return Batch(
        input_ids=t(ids).long(),
        segment_ids=t(seg).long(),
        query_rank=t(np.stack([q for q, _ in ranks])).int(),
        key_rank=t(key).int(),
        target_positions=t(positions).long(),
        targets=t(targets.get("targets", np.zeros(positions.shape))).long(),
        target_weights=t(targets.get("weights", np.ones(positions.shape))).float(),
        backward=t(backward),
        visible_mem_len=torch.full((B,), 10**6),
        pair_label=torch.ones(B, dtype=torch.long),
        reuse_len=config["reuse_len"] or T,
    )


def first_memory_of(arrays, config) -> Memory:
    """The file's memory in the last columns, as many of them valid; where queries look back equally far no others, as they count."""
    rows, length = arrays["in/inp_k"].shape[1], config["mem_len"] or 0
    mems = arrays.get("in/mems")
    given = 0 if mems is None else mems.shape[1]
    columns = given if same_length(config) else max(length, given)
    hidden = torch.zeros(config["n_layer"], rows, columns, config["d_model"])
    if given:
        hidden[:, :, -given:] = torch.from_numpy(mems).transpose(1, 2)
    return Memory(hidden, torch.full((rows,), given))


def read(model, arrays, config, memory):
    """Read a window as the file does.

    Returns:
        (T or P, B, D) output, the losses of its rows, whether a row is real, and the new memory.

    With a target mapping the query stream is read at its targets. Without one, the original's query stream has a row for every
    token, which starts from the token itself where that is no target: there it is the content stream.
    """
    T, B = arrays["in/inp_k"].shape
    everywhere = np.tile(np.arange(T), (B, 1))
    targets = {"targets": arrays["in/target"].T, "weights": arrays["in/target_mask"].T}
    if "in/inp_q" not in arrays:
        output, new_memory = model.backbone(batch_of(arrays, config, everywhere, **targets), memory)
        return (
            output,
            target_losses(model.lm_head(output), torch.from_numpy(targets["targets"].copy()).long()),
            new_memory,
        )
    if "in/target_mapping" in arrays:
        positions = arrays["in/target_mapping"].transpose(2, 0, 1).argmax(-1)
        batch = batch_of(arrays, config, positions, **targets)
        output, new_memory = model.backbone(batch, memory)
    else:
        batch = batch_of(arrays, config, everywhere, **targets)
        predicted = torch.from_numpy(arrays["in/inp_q"].T.copy()) > 0
        from_queries, new_memory = model.backbone(batch, memory)
        model.backbone.two_streams = False
        from_content, _ = model.backbone(batch, memory)
        model.backbone.two_streams = True
        output = torch.where(predicted[:, :, None], from_queries, from_content)
    return output, target_losses(model.lm_head(output), batch.targets), new_memory


def check_window(model, arrays, config, memory) -> tuple[torch.Tensor, Memory]:
    """Read one window, compare everything it gives with the file, return its loss and memory."""
    output, losses, new_memory = read(model, arrays, config, memory)
    weights = torch.from_numpy(arrays["in/target_mask"].T.copy()).float()
    loss = (losses * weights).sum() / weights.sum()
    # a padded target (weight 0) is an all-zero row of the original's target mapping, which reads no place at all; without a mapping its
    # query stream has a row for padding, too, which does not see itself
    real = weights > 0
    if "in/target_mapping" not in arrays:
        padding = torch.from_numpy(visible_pairs(arrays, config)[1])
        real = real | ~padding if "in/inp_q" in arrays else torch.ones_like(real)
    np.testing.assert_allclose(output[real].detach(), arrays["out/output"].swapaxes(0, 1)[real.numpy()], atol=TOLERANCE)
    np.testing.assert_allclose(losses[real].detach(), arrays["out/lm_loss"].T[real.numpy()], atol=TOLERANCE)
    np.testing.assert_allclose(loss.item(), arrays["out/total_loss"], atol=TOLERANCE)
    if "out/new_mems" in arrays:
        theirs = arrays["out/new_mems"].swapaxes(1, 2)
        kept = min(theirs.shape[2], new_memory.hidden.size(2))
        assert (new_memory.valid.clamp(max=kept) == kept).all()
        np.testing.assert_allclose(
            new_memory.hidden[:, :, new_memory.hidden.size(2) - kept :],
            theirs[:, :, theirs.shape[2] - kept :],
            atol=TOLERANCE,
        )
    return loss, new_memory


def check_gradients(
    model, shape, gradients: dict[str, np.ndarray], names: dict[str, torch.Tensor] | None = None
) -> None:
    """Gradients of the model against the file's, by the original's names; one that the file has not is None or zero here."""
    theirs = {**from_arrays(shape, gradients), **(names or {})}
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    for name, parameter in model.named_parameters():
        ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected = theirs.get(name, torch.zeros_like(parameter))
        np.testing.assert_allclose(ours, expected, atol=GRADIENT_TOLERANCE * largest, rtol=0, err_msg=name)


def skip_outside(arrays, config) -> None:
    if reason := outside(arrays, config):
        pytest.skip(reason)
