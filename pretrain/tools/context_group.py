"""Relative effective context length of a group of models: losses, table and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.tools.held_out import open_model, read_run_config, read_text, text_config
from xlpre.common.errors import InputError
from xlpre.common.plots import COLORS, legend_label, new_axes, save_figure
from xlpre.inference.context_losses import context_losses
from xlpre.inference.effective_context import MIN_GAIN, effective_contexts
from xlpre.text import special_tokens


def measure_contexts(
    models: Sequence[str],
    text: Sequence[str],
    contexts: Sequence[int],
    n_tokens: int,
    seed: int,
    device: torch.device,
    report_progress: Callable[[int, int], None],
) -> np.ndarray:
    """Compute the losses of all models with all contexts.

    Args:
        models: M folders of causal models.
        text: sources of the text, see `read_text`.
        contexts: C lengths of the context, increasing.
        n_tokens: number of tokens to predict; fewer if the text is short.
        seed: seed of their positions.
        device: device of the models.
        report_progress: called after each context with the number of contexts done and the number of all contexts.

    Returns:
        (M, C, S) float64 losses in nats.

    Raises:
        InputError: a model is not causal, has no vocabulary or another one than the first model; or the text is too short.
    """
    folders = [open_model(path, {}) for path in models]
    pieces = folders[0].require_tokenizer(models[0]).pieces
    for path, folder in zip(models, folders, strict=True):
        if folder.objective != "causal":
            raise InputError(
                f"MODEL={path} is invalid: it is a {folder.objective} model, and RECL is a property of causal models. Give causal models."
            )
        if folder.require_tokenizer(path).pieces != pieces:
            raise InputError(
                f"MODEL={path} is invalid: its vocabulary is not that of {models[0]}, so their tokens differ. Compare models with one "
                "vocabulary."
            )
    config, tokenizer = read_run_config(models[0]), folders[0].require_tokenizer(models[0])
    held_out = read_text(text, tokenizer, models[0], text_config(config), None)
    tokens = np.concatenate([[special_tokens.EOD], np.asarray(held_out.data.tokens, np.int64)])
    if len(tokens) <= contexts[-1]:
        raise InputError(
            f"--max-context={contexts[-1]} is invalid: the text has only {len(tokens) - 1:,} tokens. Give more text, or a shorter context."
        )
    n_positions = min(n_tokens, len(tokens) - contexts[-1])
    positions = np.random.default_rng(seed).choice(np.arange(contexts[-1], len(tokens)), n_positions, replace=False)
    losses = np.empty((len(models), len(contexts), n_positions))
    for m, folder in enumerate(folders):
        model = folder.model().to(device)
        for c, context in enumerate(contexts):
            losses[m, c] = context_losses(model, tokens, positions, context)
            report_progress(m * len(contexts) + c + 1, len(models) * len(contexts))
    return losses


def to_rows(
    models: Sequence[str], losses: np.ndarray, contexts: Sequence[int], fractions: Sequence[float]
) -> list[dict[str, str]]:
    """Return a table with one row per model. `losses` is the result of `measure_contexts`."""
    lengths = {fraction: effective_contexts(losses, contexts, fraction) for fraction in fractions}
    rows = []
    for m, model in enumerate(models):
        cells = {
            f"RECL, r = {fraction:g}": f"{'at least ' if each[m].is_at_least else ''}{each[m].length:,}"
            for fraction, each in lengths.items()
        }
        mean = losses[m].mean(-1)
        ends = {f"loss, {contexts[index]:,} tokens of context": f"{mean[index]:.3f}" for index in (0, -1)}
        rows.append({"model": model, **cells, **ends})
    return rows


def to_records(
    models: Sequence[str], losses: np.ndarray, contexts: Sequence[int], fractions: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield the results of each model as JSON values. `losses` is the result of `measure_contexts`."""
    lengths = {fraction: effective_contexts(losses, contexts, fraction) for fraction in fractions}
    for m, model in enumerate(models):
        yield {
            "model": model,
            "contexts": list(contexts),
            "losses": losses[m].mean(-1).tolist(),
            "n_tokens": losses.shape[2],
            "recl": [
                {
                    "fraction": fraction,
                    "length": each[m].length,
                    "is_at_least": each[m].is_at_least,
                    "gains": list(each[m].gains),
                }
                for fraction, each in lengths.items()
            ],
        }


def draw_contexts(
    models: Sequence[str], losses: np.ndarray, contexts: Sequence[int], fraction: float, path: Path
) -> None:
    """Draw the mean loss, and the gain of each step, over the context. `losses` is the result of `measure_contexts`."""
    figure, (loss, gain) = new_axes(8.5, 3.6, 2)
    for m, (model, result) in enumerate(zip(models, effective_contexts(losses, contexts, fraction), strict=True)):
        color, label = COLORS[m % len(COLORS)], legend_label(model)
        loss.plot(contexts, losses[m].mean(-1), "o-", markersize=4, color=color, label=label)
        gain.plot(contexts[:-1], [100 * value for value in result.gains], "o-", markersize=4, color=color, label=label)
    gain.axhline(100 * MIN_GAIN, color="#b4442c", linestyle="--", linewidth=1.2, label="threshold")
    loss.set(xlabel="tokens of context", ylabel="loss in nats, all tokens")
    gain.set(xlabel="tokens of context", ylabel=f"gain of the next step in %, r = {fraction:g}")
    for axes in (loss, gain):
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
