"""Evaluation on validation text, with memory. Windows and targets do not depend on the seed of the run, so that runs are comparable.

A lane is a row of the batch that reads consecutive windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pretrain.config import EvalConfig, PretrainConfig
from xlpre.common.errors import InputError
from xlpre.data.lanes import Lanes, max_lanes
from xlpre.data.store import TokenStore
from xlpre.data_loader import Loader
from xlpre.inference.evaluation import (
    EVAL_SEED,
    empty_cache,
    fixed_objective,
    is_correct,
    predict_targets,
    sample_sentences,
)
from xlpre.inference.minimal_pairs import MinimalPair, encode_pairs, pair_accuracies, read_pairs
from xlpre.inference.scoring import WINDOW, order_consistency, score
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import Comm, rank, world_size
from xlpre.training.lr_schedule import format_lr

MIN_PLATEAU_TOKENS = 500_000  # number of window tokens before which there is no warning of a plateau
MIN_PLATEAU_GAIN = 0.1  # nats below the unigram baseline at which a model has left the plateau


@dataclass(frozen=True)
class EvalResult:
    """Means over the targets of an evaluation.

    Attributes:
        loss: cross-entropy in nats per target.
        unigram_loss: loss of predicting each target by its frequency in the training text, in nats per target.
        accuracy: fraction of targets to which the model gives the highest probability.
        bits_per_byte: loss in bits, summed over the targets and divided by their bytes. It is comparable between vocabularies.
        n_targets: number of targets.
        auxiliary_accuracy: fraction of rows that each auxiliary head classifies correctly, by the name of the head.
        order_std: standard deviation of the log-likelihood of sentences over factorization orders, in nats per token. None if
            `eval.order_consistency` is 0.
        minimal_pairs: accuracy on `eval.minimal_pairs` in percent, the mean over the paradigms. None if there are no pairs.
    """

    loss: float
    unigram_loss: float
    accuracy: float
    bits_per_byte: float
    n_targets: int
    auxiliary_accuracy: Mapping[str, float]
    order_std: float | None = None
    minimal_pairs: float | None = None


class Evaluator:
    """Evaluates models on the validation text of a store.

    Args:
        config: settings of the run.
        store: the token store.
        tokenizer: the vocabulary of the store.
        comm: collective operations on small values.

    Raises:
        InputError: the validation text is shorter than a window, or a file of minimal pairs is invalid.
    """

    def __init__(self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer, comm: Comm) -> None:
        self._config, self._comm = config, comm
        partial_k = config.eval.partial_k or config.objective.partial_k
        objective = fixed_objective(
            config.objective.name, partial_k, config.objective.perm_size, config.data, tokenizer
        )
        lanes, self._n_windows = val_lanes(config, store)
        self._loader = Loader(lanes, config.data, objective, EVAL_SEED)
        local_lanes = range(rank(), lanes.n_lanes, world_size())
        # ZeRO-3 needs all processes to gather weights: a process without a lane evaluates lane 0, and its sums are ignored
        self._lanes, self._is_counted = local_lanes or range(1), bool(local_lanes)
        self._tokenizer = tokenizer
        self._sentences = sample_sentences(store.validation, config.eval.order_consistency, WINDOW)
        self._pairs, self._pair_ids = read_minimal_pairs(config.eval, tokenizer)
        counts = np.asarray(store.unigram) + 1.0  # add-one smoothing
        self._bytes_per_piece = torch.from_numpy(tokenizer.bytes_per_piece)
        self._unigram_losses = torch.from_numpy(-np.log(counts / counts.sum())).float()

    @torch.no_grad()
    def evaluate(self, model: LanguageModel) -> EvalResult:
        """Evaluate `model` without dropout. Every process must call it."""
        with without_dropout(model):
            sums = self._sum_over_windows(model)
        loss, unigram, n_correct, n_bytes, n_targets, n_rows, *auxiliary = self._comm.all_reduce_sum(
            *(sums * self._is_counted)
        )
        return EvalResult(
            loss / n_targets,
            unigram / n_targets,
            n_correct / n_targets,
            loss / math.log(2) / n_bytes,
            int(n_targets),
            {name: count / n_rows for name, count in zip(model.auxiliary_heads, auxiliary, strict=True)},
            self._order_std(model),
            self._minimal_pair_accuracy(model),
        )

    def _order_std(self, model: LanguageModel) -> float | None:
        """Return the spread of the log-likelihood over orders. Every process computes all sentences, because ZeRO-3 needs all of them."""
        if not self._sentences:
            return None
        return order_consistency(model, self._tokenizer, self._sentences).std_per_token

    def _minimal_pair_accuracy(self, model: LanguageModel) -> float | None:
        """Return the accuracy on minimal pairs in percent. Every process computes all pairs, because ZeRO-3 needs all of them."""
        if not self._pairs:
            return None
        objective, prefix = self._config.objective.name, self._config.eval.minimal_pairs_prefix
        scores = score(model, self._tokenizer, self._pair_ids, objective=objective, prefix=prefix)
        return pair_accuracies(self._pairs, scores).overall.percent

    def _sum_over_windows(self, model: LanguageModel) -> np.ndarray:
        """Evaluate the lanes of this process, and return sums over their targets and rows.

        Returns:
            (6 + number of auxiliary heads,): loss, unigram loss, correct predictions, bytes, targets, rows, and the rows that each
            auxiliary head classifies correctly.
        """
        memory = empty_cache(model, len(self._lanes), self._config.eval.mem_len)
        sums = np.zeros(6 + len(model.auxiliary_heads))
        for step in range(self._n_windows):
            batch = self._loader.batch(step, self._lanes)
            losses, correct, memory, auxiliary_logits = predict_targets(model, batch, memory)
            n_bytes = self._bytes_per_piece[batch.targets].sum().item()
            unigram = self._unigram_losses[batch.targets].sum().item()
            sums += [
                *(losses.sum().item(), unigram, int(correct.sum()), n_bytes, losses.numel(), len(batch.pair_label)),
                *(int(is_correct(logits, batch.pair_label).sum()) for logits in auxiliary_logits),
            ]
        return sums


def read_minimal_pairs(config: EvalConfig, tokenizer: Tokenizer) -> tuple[list[MinimalPair], list[np.ndarray]]:
    """Return the pairs of `eval.minimal_pairs` and their token ids, see `encode_pairs`.

    Raises:
        InputError: a file cannot be read, or a sentence or the prefix has no tokens.
    """
    if not config.minimal_pairs:
        return [], []
    prefix = config.minimal_pairs_prefix
    if prefix and not len(tokenizer.encode(prefix)):
        raise InputError(
            f"eval.minimal_pairs_prefix={prefix!r} is invalid: it needs at least one token. Leave it out for no prefix."
        )
    try:
        pairs = read_pairs(config.minimal_pairs)
        return pairs, encode_pairs(tokenizer, pairs)
    except InputError as error:
        raise InputError(f"eval.minimal_pairs: {error}") from None


def eval_protocol(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that two evaluations of a run must share to be comparable."""
    return {name: getattr(config.eval, name) for name in ("batch_size", "num_windows", "mem_len", "partial_k")}


def target_fraction_note(config: PretrainConfig) -> str:
    """Return a note if validation and training predict different fractions of the tokens, which makes their losses differ; else ""."""
    val_k, train_k = config.eval.partial_k or config.objective.partial_k, config.objective.partial_k
    if val_k == train_k or not OBJECTIVES[config.objective.name].sees_ahead:  # a causal model predicts all tokens
        return ""
    effect = (
        "Fewer targets leave more context visible, so the validation loss can be below the training loss."
        if val_k > train_k
        else "More targets leave less context visible, so the validation loss can be above the training loss."
    )
    return f"Validation predicts 1 in {val_k:g} tokens, training 1 in {train_k:g}. {effect}"


def plateau_warning(config: PretrainConfig, result: EvalResult, step: int, tokens: int) -> str:
    """Return a warning if the model is no better than the unigram baseline after the warm-up and MIN_PLATEAU_TOKENS; else "".

    Args:
        config: settings of the run.
        result: result of the evaluation.
        step: number of steps so far.
        tokens: number of window tokens that the run has read.
    """
    is_early = tokens < MIN_PLATEAU_TOKENS or step <= config.schedule.warmup_steps
    if is_early or result.loss < result.unigram_loss - MIN_PLATEAU_GAIN:
        return ""
    remedies = []
    if not config.init_from and config.model.init_scheme != "local" and config.model.positions == "relative":
        remedies.append("model.init_scheme=local")
    if not config.init_from and config.model.norm == "post":
        remedies.append("model.norm=pre")
    remedies.append(f"optim.lr={format_lr(config.optim.lr / 2)}")
    return (
        f"warning: after {tokens / 1e6:.1f} M window tokens the model is no better than the unigram baseline. "
        f"Under another name, try {', then '.join(remedies)}."
    )


def val_lanes(config: PretrainConfig, store: TokenStore) -> tuple[Lanes, int]:
    """Return the lanes that read the validation text, and the number of windows of each lane.

    Each lane reads one passage (a sequence of consecutive windows), and no two lanes read the same passage. If the text is short, there
    are fewer lanes or windows than configured.

    Raises:
        InputError: the validation text is shorter than a window.
    """
    stride, lookahead = config.data.reuse_len, config.data.lookahead
    lanes = Lanes(
        store.validation,
        min(config.eval.batch_size, max_lanes(len(store.validation), stride, lookahead)),
        stride=stride,
        lookahead=lookahead,
        windows_per_run=config.eval.num_windows,
        bidirectional=config.data.bidirectional,
        seed=EVAL_SEED,
        at_document_end=config.memory.at_document_end,
        origin=f"the validation part of {store.path} ({'text.val_fraction' if config.text.val_source is None else 'text.val_source'})",
    )
    return lanes, lanes.windows_per_run
