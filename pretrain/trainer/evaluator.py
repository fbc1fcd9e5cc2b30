"""Measuring on held-out lanes: the same windows and targets for every run with the same store and `data`, memory carried along."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config import PretrainConfig
from xlpre.data.lanes import Lanes
from xlpre.data.store import TokenStore
from xlpre.data_loader import Loader
from xlpre.model.dropout import without_dropout
from xlpre.model.kv_cache import cached
from xlpre.model.language_model import LanguageModel
from xlpre.model.lm_head import target_losses
from xlpre.model.memory import initial_memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import Comm, rank, world_size

SEED = 20190619  # of the held-out windows and targets: the same for every run, so that runs compare


@dataclass(frozen=True)
class EvalResult:
    """Means over the held-out targets, in nats: the model's loss, the loss of the training text's word frequencies.

    `bits_per_byte` is the model's loss in bits over the bytes of the targets: what vocabularies compare by. `auxiliary` is, for each
    of the model's auxiliary heads by name, the share of rows whose label it finds; no part of the loss.
    """

    loss: float
    unigram: float
    accuracy: float
    bits_per_byte: float
    n_targets: int
    auxiliary: Mapping[str, float]


class Evaluator:
    """Held-out batches and how a model does on them.

    Raises:
        ValueError: the held-out text is shorter than a window.
    """

    def __init__(self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer, comm: Comm) -> None:
        self._config, self._comm = config, comm
        partial_k = config.eval.partial_k or config.objective.partial_k
        # spans as by default, whatever is trained on, so that runs are measured on the same targets
        wanted = ObjectiveConfig(name=config.objective.name, partial_k=partial_k, perm_size=config.objective.perm_size)
        objective = build_objective(wanted, config.data, tokenizer.starts_word)
        lanes, self._windows = val_lanes(config, store)
        self._loader = Loader(lanes, config.data, objective, SEED)
        mine = range(rank(), config.eval.batch_size, world_size())
        # ZeRO-3 gathers weights together: a process that no lane is left for reads along, and its sums do not count
        self._mine, self._counts = mine or range(1), bool(mine)
        seen = np.asarray(store.unigram) + 1.0  # a token never seen in training has been seen once
        self._n_bytes = torch.from_numpy(tokenizer.n_bytes)
        self._unigram = torch.from_numpy(-np.log(seen / seen.sum())).float()

    @torch.no_grad()
    def __call__(self, model: LanguageModel) -> EvalResult:
        """Measure `model`; every process must call it."""
        with without_dropout(model):
            sums = self._sums(model)
        loss, unigram, right, n_bytes, count, rows, *others = self._comm.all_reduce_sum(*(sums * self._counts))
        auxiliary = {name: n_right / rows for name, n_right in zip(model.auxiliary_heads, others, strict=True)}
        return EvalResult(
            loss / count, unigram / count, right / count, loss / math.log(2) / n_bytes, int(count), auxiliary
        )

    def _sums(self, model: LanguageModel) -> np.ndarray:
        """Of this process: losses, those of word frequencies, targets found, bytes, targets, rows, and rows that heads find right."""
        weight = model.backbone.mask_embedding
        mem_len = self._config.eval.mem_len
        start = initial_memory(model.config, len(self._mine), mem_len=mem_len, device=weight.device, dtype=weight.dtype)
        memory = cached(start, model.backbone)
        sums = np.zeros(6 + len(model.auxiliary_heads))
        for step in range(self._windows):
            batch = self._loader.batch(step, self._mine)
            logits, memory, *scores = model.logits(batch.to(weight.device), memory)
            losses = target_losses(logits, batch.targets.to(weight.device))
            n_right = _n_right(logits, batch.targets)
            n_bytes = self._n_bytes[batch.targets].sum().item()
            unigram = self._unigram[batch.targets].sum().item()
            sums += [
                *(losses.sum().item(), unigram, n_right, n_bytes, losses.numel(), len(batch.pair_label)),
                *(_n_right(of_rows, batch.pair_label) for of_rows in scores),
            ]
        return sums


def eval_protocol(config: PretrainConfig) -> dict[str, Any]:
    """The settings that two held-out losses of a run must share to compare."""
    asked = config.eval
    return {
        "batch_size": asked.batch_size,
        "num_windows": asked.num_windows,
        "mem_len": asked.mem_len,
        "partial_k": asked.partial_k,
    }


def val_lanes(config: PretrainConfig, store: TokenStore) -> tuple[Lanes, int]:
    """Lanes over the held-out text and how many windows of each are measured: no text twice.

    Raises:
        ValueError: the held-out text is shorter than a window.
    """
    n_lanes = config.eval.batch_size
    available = (len(store.validation) - config.data.lookahead) // config.data.reuse_len // n_lanes
    windows = max(1, min(config.eval.num_windows, available))
    lanes = Lanes(
        store.validation,
        n_lanes,
        stride=config.data.reuse_len,
        lookahead=config.data.lookahead,
        windows_per_run=windows,
        bidirectional=config.data.bidirectional,
        seed=SEED,
        at_document_end=config.memory.at_document_end,
        origin=f"the held-out part of {store.path} (text.val_fraction)",
    )
    return lanes, windows


def _n_right(scores: Tensor, truth: Tensor) -> int:
    """How often the highest of the scores (..., n) is that of `truth` (...), which is on the CPU."""
    return int((scores.argmax(-1).cpu() == truth).sum())
