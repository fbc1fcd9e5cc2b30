"""Predictions of a trained model for an explained window: the probabilities of the targets, and attention maps as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.config import PretrainConfig
from pretrain.tools.explanation import GREY, INK, MIN_FONT_SIZE, TARGET_COLOR, Explanation, Predictions, TargetPair
from pretrain.tools.run_record import find_pretraining_run
from xlpre.batch import FIELD_SPECS, HIDDEN_RANK, Batch
from xlpre.common.errors import InputError
from xlpre.common.plots import new_figure, save_figure
from xlpre.config.loader import load_config
from xlpre.conversion.model_folder import load_folder
from xlpre.data_loader import batch_from_inputs
from xlpre.inference.attention_maps import attention_maps
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import Tokenizer

UNSEEN = "#eceff3"
CELL = 0.16  # inches of a token in an attention map, in small figures
MAX_SIZE = 24, 16  # inches of all maps, width and height


def load_model(
    path: Path, config_file: str | None, overrides: Sequence[str]
) -> tuple[PretrainConfig, LanguageModel, Tokenizer]:
    """Load a model, its vocabulary, and the settings of its windows.

    Args:
        path: folder of a run or of a model.
        config_file: file with settings. None: those of the run that the model belongs to, or else the defaults.
        overrides: `key=value` strings, which override the file.

    Raises:
        InputError: the model cannot be read, has no vocabulary, or was trained with another objective.
    """
    folder = load_folder(path)
    tokenizer = folder.require_tokenizer(path)
    run_dir = find_pretraining_run(path)
    file = config_file or (run_dir and run_dir / "config.yaml")

    def fit_defaults(config: PretrainConfig) -> list[str]:
        reuse_len = [f"data.reuse_len={config.data.seq_len}"] if folder.objective == "causal" else []
        return [f"objective.name={folder.objective}", *reuse_len]

    config = load_config(PretrainConfig, file, overrides, None if file else fit_defaults)
    if config.objective.name != folder.objective:
        raise InputError(
            f"objective.name={config.objective.name} is invalid with --model {path}: the model was trained with "
            f"objective.name={folder.objective}. Set objective.name={folder.objective}."
        )
    return config, folder.model(), tokenizer


def predict_targets(model: LanguageModel, explanation: Explanation) -> Predictions:
    """Compute the probabilities of the targets of an explanation, and of pairs of neighboring targets."""
    batch = _batch(explanation)
    in_order = _log_probabilities(model, batch)[0]
    if not explanation.two_streams:
        return Predictions(in_order, None)
    key_rank = batch.key_rank.scatter(1, batch.target_positions, HIDDEN_RANK)
    independent = _log_probabilities(model, dataclasses.replace(batch, key_rank=key_rank))[0]
    return Predictions(in_order, independent, _predict_pairs(model, explanation, in_order))


def _predict_pairs(model: LanguageModel, explanation: Explanation, in_order: np.ndarray) -> list[TargetPair]:
    """Compute the probabilities of neighboring targets. Pairs of equal rank, which do not see each other, are left out.

    The second of a pair gets the query rank of the first, so that it sees the same tokens, or a rank above, so that it also sees the first.
    """
    positions, ranks = explanation.target_positions, explanation.query_rank[explanation.target_positions]
    left = np.flatnonzero((np.diff(positions) == 1) & (np.diff(ranks) != 0))
    if not len(left):
        return []
    is_left_first = ranks[left] < ranks[left + 1]
    first, second = np.where(is_left_first, left, left + 1), np.where(is_left_first, left + 1, left)
    rows = np.arange(2 * len(left))  # for each pair, a row without and a row with the first of the pair
    batch = _batch(explanation)
    fields = {name: getattr(batch, name).repeat_interleave(len(rows), 0) for name in FIELD_SPECS}
    for name in ("target_positions", "targets", "target_weights"):
        fields[name] = fields[name][rows, np.repeat(second, 2)][:, None]
    new_ranks = np.stack([ranks[first], ranks[first] + 1], 1).ravel()
    fields["query_rank"].scatter_(1, fields["target_positions"], torch.from_numpy(new_ranks)[:, None])
    predicted = _log_probabilities(model, Batch(**fields, reuse_len=batch.reuse_len)).reshape(-1, 2)
    joint, independent = in_order[first] + predicted[:, 1], in_order[first] + predicted[:, 0]
    return [
        TargetPair((i, i + 1), *pair)
        for i, *pair in zip(left.tolist(), joint.tolist(), independent.tolist(), strict=True)
    ]


def draw_attention(model: LanguageModel, explanation: Explanation) -> Any:
    """Return a matplotlib figure with the attention of the targets: a row for each layer, a column for each head."""
    from matplotlib.colors import PowerNorm
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    batch = _batch(explanation)
    maps = attention_maps(model, batch, model.backbone.initial_memory(1, 0))[:, 0].numpy()  # (L, H, P, T)
    L, H, P, T = maps.shape
    width, height = max(min(CELL * T, MAX_SIZE[0] / H), 0.8), max(min(CELL * P, MAX_SIZE[1] / L), 0.5)  # of a map
    layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.04)
    figure = new_figure(H * (width + 0.1) + 1.8, L * (height + 0.25) + 2, layout)
    panels = figure.subplots(L, H, squeeze=False, sharex=True, sharey=True)
    sees = (maps > 0).any((0, 1))
    is_target = explanation.is_target & (P < T)
    size = min(72 * 0.8 * width / T, 10.0)
    for layer, row in enumerate(panels):
        for head, axes in enumerate(row):
            axes.set_facecolor(UNSEEN)
            shown = np.ma.masked_array(maps[layer, head], ~sees)
            image = axes.pcolormesh(shown, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
            axes.set(xlim=(0, T), ylim=(P, 0))
            axes.tick_params(length=0)
            axes.spines[:].set_color(GREY)
            axes.spines[:].set_linewidth(0.4)
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=11, color=INK)
            if head == 0:
                axes.set_ylabel(f"layer {layer + 1}", fontsize=11, color=INK)
    if size >= MIN_FONT_SIZE:
        pieces = [explanation.pieces[i] for i in explanation.target_positions]
        for axes in panels[:, 0]:
            axes.set_yticks(np.arange(P) + 0.5, pieces, size=min(72 * 0.8 * height / P, 10.0))
        for axes in panels[-1]:
            axes.set_xticks(np.arange(T) + 0.5, explanation.input_pieces, rotation=90, size=size)
            for position, label in enumerate(axes.get_xticklabels()):
                label.set_color(TARGET_COLOR if is_target[position] else INK)
    else:
        panels[0, 0].set(xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=panels, shrink=min(1.0, 3 / (L * height)), pad=0.01, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.ax.set_yticklabels(["0", "5 %", "20 %", "50 %", "100 %"])
    bar.outline.set_linewidth(0.4)
    figure.suptitle(
        f"{explanation.title}\nattention of the rows that predict the targets, by layer and head; orange: targets; grey: not visible",
        fontsize=11,
        color=GREY,
        x=0.012,
        ha="left",
    )
    return figure


def save_attention(model: LanguageModel, explanation: Explanation, path: Path) -> None:
    """Draw the attention of the targets into a file; its suffix decides the format."""
    save_figure(draw_attention(model, explanation), path, dpi=130)


def _batch(explanation: Explanation) -> Batch:
    return batch_from_inputs(explanation.windows, explanation.inputs)


def _log_probabilities(model: LanguageModel, batch: Batch) -> np.ndarray:
    """Return the log-probability of each target, (B, P) float64."""
    with without_dropout(model), torch.no_grad():
        logits = model.logits(batch, model.backbone.initial_memory(len(batch.input_ids), 0))[0]
    return logits.double().log_softmax(-1).gather(2, batch.targets[:, :, None])[:, :, 0].numpy()
