"""Evaluation of a model on held-out text: loss, perplexity, bits per byte and per character, and perplexity per word.

The text is one stream of documents, as in a token store: `<eop>` ends a paragraph and `<eod>` a document. A mode defines which tokens are
predicted, and from what:

    causal      Every token, given all tokens before it, as far as memory and window reach. The first one is predicted from `<eod>`.
    objective   The targets of the training objective: one token in K, in windows laid out as in training. The targets are the same in
                every evaluation with the same windows.
    any-order   Every token of a document by the chain rule in factorization orders, see xlpre/inference/scoring.py.
    pll         Every token of a document, given all others (pseudo-log-likelihood), see the same module.

In the modes `causal` and `objective`, consecutive windows share memory, and the result is that of reading the whole text in one row, from
left to right. For speed, the text is cut into parts of consecutive windows, which are rows of a batch. Each part first reads the
`n_layer * ceil(mem_len / reuse_len)` windows before it again. This fills its memory with the values that it would have had after the whole
text before it: the hidden states of a layer depend on memory of the layer below, so they reach back by `mem_len` tokens per layer. The
result therefore depends neither on the batch size nor on the number of processes, except for rounding.

An evaluation consists of units of work that can be computed in any order and in different processes. Their sums are added in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xlpre.batch import Batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.data import encoded_documents
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData, TokenStore
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.data_loader import batch_from_inputs
from xlpre.inference.modes import EVAL_MODES, resolve_mode
from xlpre.inference.scoring import N_ORDERS, score
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.lm_head import target_losses
from xlpre.model.memory import BaseMemory
from xlpre.objectives.objective import Objective, ObjectiveConfig
from xlpre.objectives.registry import build_objective, resolve_objective
from xlpre.text import special_tokens
from xlpre.text.document import Document, LineType, documents_from_rows
from xlpre.text.tokenizer import Tokenizer, check_list

EVAL_SEED = 20190619  # seed of windows and targets, the same for all evaluations
BATCH_SIZE = 8
MAX_PARTS = 256  # parts of a text, the rows of all batches
MIN_PART_LEN = 8  # length of a part, in multiples of the windows that it reads again
CHUNK_TOKENS = 4096  # documents of at least this many tokens are scored together
BATCH_CHARS = 1 << 20  # characters that are encoded together
MIN_SENTENCE_TOKENS = 5  # of the sentences that measure order consistency
N_SUMS = 4  # loss, correct predictions, bytes of the targets, targets


@dataclass(frozen=True)
class HeldOutText:
    """Text to evaluate on.

    The counts are those of the documents as they are read: lines without repeated spaces. The end of a line counts as one byte and one
    character, and so does the end of a document. Verbatim text has its own line ends, and nothing is added.

    Attributes:
        data: token ids with the ends of sentences and documents.
        n_bytes: UTF-8 bytes.
        n_characters: characters.
        n_words: words, separated by white space. Ends of lines and documents are not words.
        unknown_fraction: fraction of the tokens that are <unk>.
    """

    data: SplitData
    n_bytes: int
    n_characters: int
    n_words: int
    unknown_fraction: float

    def documents(self) -> list[np.ndarray]:
        """Return the (T,) int64 token ids of each document, with <eop> and <eod>."""
        ends = self.data.document_ends
        return [np.asarray(tokens, np.int64) for tokens in np.split(np.asarray(self.data.tokens), ends[:-1])]


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation.

    Attributes:
        mode: see the module.
        data: layout of the windows. `seq_len` is the longest window in all modes.
        mem_len: number of memory columns.
        at_document_end: see MemoryConfig; for the modes `causal` and `objective`.
        partial_k: K in `objective` mode.
        perm_size: see ObjectiveConfig; for `objective` mode.
        n_orders: number of orders in `any-order` mode.
        seed: seed of the orders.
        batch_size: rows of a batch.
    """

    mode: str
    data: DataConfig
    mem_len: int
    at_document_end: Literal["carry", "cut"] = "carry"
    partial_k: float = 6.0
    perm_size: int | None = None
    n_orders: int = N_ORDERS
    seed: int = 1
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        for name, minimum in (("mem_len", 0), ("n_orders", 1), ("seed", 0), ("batch_size", 1)):
            check_minimum(name, getattr(self, name), minimum)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        settings: settings of the evaluation.
        text: the text.
        loss_sum: cross entropy in nats, summed over the targets. In `any-order` mode, it is the mean over the orders.
        n_targets: number of predicted tokens: all tokens, except in `objective` mode.
        n_target_bytes: bytes of the predicted tokens, 1 for each special token.
        n_correct: number of targets to which the model gives the highest probability; None in the modes `any-order` and `pll`.
    """

    settings: EvalSettings
    text: HeldOutText = field(repr=False)
    loss_sum: float
    n_targets: int
    n_target_bytes: int
    n_correct: int | None

    @property
    def predicts_all(self) -> bool:
        """True if every token of the text is predicted exactly once."""
        return self.settings.mode != "objective"

    @property
    def loss(self) -> float:
        """Mean loss in nats per target."""
        return self.loss_sum / self.n_targets

    @property
    def accuracy(self) -> float | None:
        """Fraction of correct predictions."""
        return None if self.n_correct is None else self.n_correct / self.n_targets

    @property
    def perplexity(self) -> float | None:
        """Exponential of the mean loss; in `pll` mode, the pseudo-perplexity. None in `objective` mode."""
        return _exp(self.loss) if self.predicts_all else None

    @property
    def bits_per_byte(self) -> float | None:
        """Total loss in bits per byte of the text. None in `objective` mode."""
        return self.loss_sum / math.log(2) / self.text.n_bytes if self.predicts_all else None

    @property
    def bits_per_character(self) -> float | None:
        """Total loss in bits per character of the text. None in `objective` mode."""
        return self.loss_sum / math.log(2) / self.text.n_characters if self.predicts_all else None

    @property
    def word_perplexity(self) -> float | None:
        """Exponential of the total loss divided by the number of words. None in `objective` mode, and for a text without words."""
        return _exp(self.loss_sum / self.text.n_words) if self.predicts_all and self.text.n_words else None

    @property
    def bits_per_target_byte(self) -> float:
        """Total loss in bits per byte of the targets, like `val_bpb` in the metrics of a run."""
        return self.loss_sum / math.log(2) / self.n_target_bytes

    def to_json(self) -> dict[str, Any]:
        """Return settings, result and counts as JSON values."""
        settings, text = self.settings, self.text
        names = ["loss", "accuracy", "perplexity", "bits_per_byte", "bits_per_character", "word_perplexity"]
        record: dict[str, Any] = {"mode": settings.mode, "mem_len": settings.mem_len, "seq_len": settings.data.seq_len}
        if settings.mode == "any-order":
            record |= {"n_orders": settings.n_orders, "seed": settings.seed}
        if settings.mode == "objective":
            record |= {"partial_k": settings.partial_k}
            names.append("bits_per_target_byte")
        return {
            **record,
            # JSON has no infinity
            **{name: value for name in names if (value := getattr(self, name)) is not None and math.isfinite(value)},
            "n_targets": self.n_targets,
            "n_tokens": len(text.data),
            "n_bytes": text.n_bytes,
            "n_characters": text.n_characters,
            "n_words": text.n_words,
            "n_documents": len(text.data.document_ends),
            "unknown_fraction": text.unknown_fraction,
        }


class Evaluator(ABC):
    """Evaluates a model on a text, in units of work.

    Attributes:
        settings: settings of the evaluation.
        n_units: number of units.
    """

    n_units: int

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, text: HeldOutText, settings: EvalSettings, objective: str
    ) -> None:
        self.settings = settings
        self._model, self._tokenizer, self._text, self._objective_name = model, tokenizer, text, objective
        self._bytes_per_piece = tokenizer.bytes_per_piece

    def evaluate_unit(self, unit: int) -> np.ndarray:
        """Return (4,) float64 sums over the targets of a unit: loss, correct predictions, bytes and targets."""
        with without_dropout(self._model), torch.no_grad():
            return self._sums(unit)

    def result(self, sums: Sequence[np.ndarray]) -> Evaluation:
        """Return the result from the sums of all units, in order."""
        loss, n_correct, n_bytes, n_targets = np.sum(sums, axis=0)
        correct = None if math.isnan(n_correct) else int(n_correct)
        return Evaluation(self.settings, self._text, float(loss), int(n_targets), int(n_bytes), correct)

    @abstractmethod
    def _sums(self, unit: int) -> np.ndarray: ...


class WindowEvaluator(Evaluator):
    """Evaluator of the modes `causal` and `objective`, see the module.

    Raises:
        InputError: the text is shorter than a window of `objective` mode, or a window has too few tokens for its targets.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, text: HeldOutText, settings: EvalSettings, objective: str
    ) -> None:
        super().__init__(model, tokenizer, text, settings, objective)
        data, n_tokens = settings.data, len(text.data)
        self._objective = fixed_objective(objective, settings.partial_k, settings.perm_size, data, tokenizer)
        if settings.mode == "causal":
            self._n_windows = math.ceil(n_tokens / data.seq_len)
            self._directed = DirectedText(_shifted(text.data, self._n_windows * data.seq_len + 1))
        else:
            needed = max(data.lookahead, data.reuse_len)
            if n_tokens < needed:
                others = " or ".join(mode for mode in EVAL_MODES[objective] if mode != "objective")
                raise InputError(
                    f"the text is invalid: it has {n_tokens:,} tokens, but a window of seq_len={data.seq_len} needs {needed:,}. "
                    f"Give more text, a shorter window, or mode {others}, which needs no full window."
                )
            self._n_windows = (n_tokens - needed) // data.reuse_len + 1
            self._directed = DirectedText(text.data)
        self._n_warm = model.config.n_layer * math.ceil(settings.mem_len / data.reuse_len)
        self._part_len = max(math.ceil(self._n_windows / MAX_PARTS), MIN_PART_LEN * self._n_warm, 1)
        self._n_parts = math.ceil(self._n_windows / self._part_len)
        self.n_units = math.ceil(self._n_parts / settings.batch_size)

    def _sums(self, unit: int) -> np.ndarray:
        first_part = unit * self.settings.batch_size
        begins = np.arange(first_part, min(first_part + self.settings.batch_size, self._n_parts)) * self._part_len
        ends = np.minimum(begins + self._part_len, self._n_windows)
        memory = empty_cache(self._model, len(begins), self.settings.mem_len)
        sums = np.zeros(N_SUMS)
        for step in range(-min(self._n_warm, int(begins[-1])), int((ends - begins).max())):
            windows = begins + step
            batch = self._batch(windows.clip(0, self._n_windows - 1))
            if step < 0:
                device = self._model.backbone.device
                _, memory = self._model.backbone(batch.to(device), memory)
                continue
            losses, is_correct, memory, _ = predict_targets(self._model, batch, memory)
            is_target = np.broadcast_to((windows < ends)[:, None], losses.shape)
            if self.settings.mode == "causal":
                positions = windows[:, None] * self.settings.data.seq_len + batch.target_positions.numpy()
                is_target = is_target & (positions < len(self._text.data))
            sums += [
                (losses.double().cpu().numpy() * is_target).sum(),
                (is_correct.numpy() & is_target).sum(),
                self._bytes_per_piece[batch.targets.numpy()[is_target]].sum(),
                is_target.sum(),
            ]
        return sums

    def _batch(self, windows: np.ndarray) -> Batch:
        """Build the batch of `windows` (B,), which count from the start of the text. A window is the same whatever the batch."""
        locations = [self._location(int(window)) for window in windows]
        rng = RowRng(EVAL_SEED, windows.tolist(), 0)
        laid_out = build_windows(locations, self.settings.data, rng)
        return batch_from_inputs(laid_out, self._objective.build_inputs(laid_out, rng))

    def _location(self, window: int) -> WindowLocation:
        text, begin = self._directed, window * self.settings.data.reuse_len
        visible = begin
        if self.settings.at_document_end == "cut":
            visible -= text.documents[text.documents.last_until(begin)]
        return WindowLocation(text, begin, visible)


class ScoreEvaluator(Evaluator):
    """Evaluator of the modes `any-order` and `pll`, which score each document on its own."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, text: HeldOutText, settings: EvalSettings, objective: str
    ) -> None:
        super().__init__(model, tokenizer, text, settings, objective)
        self._documents = text.documents()
        chunk = (np.cumsum([len(tokens) for tokens in self._documents]) - 1) // CHUNK_TOKENS
        starts = np.flatnonzero(np.diff(chunk, prepend=-1))  # a document belongs to the chunk of its last token
        self._bounds = np.append(starts, len(self._documents))
        self.n_units = len(starts)

    def _sums(self, unit: int) -> np.ndarray:
        settings = self.settings
        scores = score(
            self._model,
            self._tokenizer,
            self._documents[self._bounds[unit] : self._bounds[unit + 1]],
            settings.mode,
            objective=self._objective_name,
            n_orders=settings.n_orders,
            seed=settings.seed,
            window=settings.data.seq_len - special_tokens.N_SYMBOLS,
            mem_len=settings.mem_len,
            batch_tokens=settings.batch_size * settings.data.seq_len,
        )
        tokens = np.concatenate([text.tokens for text in scores])
        loss = -sum(text.log_likelihood for text in scores)
        return np.array([loss, math.nan, self._bytes_per_piece[tokens].sum(), len(tokens)])


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] | HeldOutText,
    mode: str | None = None,
    *,
    objective: str | None = None,
    seq_len: int = 512,
    reuse_len: int | None = None,
    pairs: bool = True,
    mem_len: int | None = None,
    partial_k: float = 6.0,
    n_orders: int = N_ORDERS,
    batch_size: int = BATCH_SIZE,
    report_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a model on a text. The result does not depend on the batch size, except for rounding.

    Args:
        model: language model, on any device.
        tokenizer: its vocabulary.
        texts: documents, whose lines are paragraphs; or the result of `encode_text`.
        mode: see the module. None: `causal` for causal models, `objective` for others.
        objective: objective of the model, `ModelFolder.objective`. None: `permutation` if the model has two streams; other models need it.
        seq_len: tokens of a window.
        reuse_len: tokens of a window that enter memory, as in training. None: half of the window, and the whole window of causal models.
        pairs: whether windows have two segments, as in training; for `objective` mode.
        mem_len: number of memory columns. None: `model.config.mem_len`.
        partial_k: one token in K is a target in `objective` mode.
        n_orders: number of orders in `any-order` mode.
        batch_size: rows of a batch.
        report_progress: called after each unit of work with the number of units done and the number of all units.

    Raises:
        InputError: the text is empty or too short, the mode does not fit the objective, or another argument is invalid.
    """
    objective = resolve_objective(objective, model.backbone.two_streams)
    if not isinstance(texts, HeldOutText):
        check_list("texts", texts)
        rows = ((f"texts[{index}]", {"text": text}) for index, text in enumerate(texts))
        texts = encode_text(tokenizer, documents_from_rows(rows, "text", "documents"))
    settings = EvalSettings(
        mode=resolve_mode(mode, objective, EVAL_MODES),
        data=eval_windows(DataConfig(pairs=pairs), objective, seq_len, reuse_len),
        mem_len=model.config.mem_len if mem_len is None else mem_len,
        partial_k=partial_k,
        n_orders=n_orders,
        batch_size=batch_size,
    )
    evaluator = build_evaluator(model, tokenizer, texts, settings, objective)
    sums = []
    for unit in range(evaluator.n_units):
        sums.append(evaluator.evaluate_unit(unit))
        if report_progress:
            report_progress(unit + 1, evaluator.n_units)
    return evaluator.result(sums)


def build_evaluator(
    model: LanguageModel, tokenizer: Tokenizer, text: HeldOutText, settings: EvalSettings, objective: str
) -> Evaluator:
    """Return the evaluator of `settings.mode`, see WindowEvaluator and ScoreEvaluator."""
    evaluator = WindowEvaluator if settings.mode in ("causal", "objective") else ScoreEvaluator
    return evaluator(model, tokenizer, text, settings, objective)


def eval_windows(data: DataConfig, objective: str, seq_len: int, reuse_len: int | None = None) -> DataConfig:
    """Return the layout of windows of `seq_len` tokens. By default, the same fraction of a window as in `data` enters memory.

    Raises:
        InputError: a window is too short.
    """
    minimum = 2 if objective == "causal" else 2 * (2 + DataConfig(pairs=data.pairs).n_symbols)
    if seq_len < minimum:
        raise InputError(
            f"seq_len={seq_len} is invalid: it must be at least {minimum} for a {objective} model with these windows."
        )
    if objective == "causal" and reuse_len is None:
        reuse_len = seq_len
    if reuse_len is None:
        reuse_len = max(1, min(seq_len * data.reuse_len // data.seq_len, seq_len - 2 - data.n_symbols))
        if data.reuse_len == data.seq_len:
            reuse_len = seq_len
    return DataConfig(seq_len=seq_len, reuse_len=reuse_len, pairs=data.pairs, bidirectional=False)


def encode_text(
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    *,
    line_type: LineType = "paragraphs",
    max_tokens: int | None = None,
) -> HeldOutText:
    """Encode documents.

    Args:
        tokenizer: vocabulary of the model.
        documents: lists of lines.
        line_type: content of a line, see `Tokenizer.encode_documents`.
        max_tokens: stop after the first document with which the text has this many tokens.

    Raises:
        InputError: the text is empty.
    """
    dtype = encoded_documents.token_dtype(tokenizer)
    encoded: list[encoded_documents.EncodedDocs] = []
    lines: list[str] = []
    n_tokens = 0
    for batch in encoded_documents.batches((document for document in documents if document), BATCH_CHARS):
        docs = encoded_documents.encode(batch, tokenizer, line_type, dtype, 1)
        if max_tokens is not None:
            n_kept = int(np.searchsorted(np.cumsum(docs.documents), max_tokens - n_tokens)) + 1
            docs, batch = docs.select(np.arange(len(batch)) < n_kept), batch[:n_kept]
        encoded.append(docs)
        lines += [line for document in batch for line in document]
        n_tokens += len(docs.tokens)
        if max_tokens is not None and n_tokens >= max_tokens:
            break
    if not lines:
        raise InputError("the text is invalid: it is empty. Give at least one line of text.")
    data = SplitData(
        np.concatenate([docs.tokens for docs in encoded]),
        np.concatenate([docs.sentences for docs in encoded]).cumsum(),
        np.concatenate([docs.documents for docs in encoded]).cumsum(),
    )
    return _count(data, lines, line_type == "verbatim")


def stored_text(store: TokenStore, tokenizer: Tokenizer, max_tokens: int | None = None) -> HeldOutText:
    """Return the validation part of a store. Its words, characters and bytes are those of the decoded tokens.

    Args:
        store: a store of the vocabulary `tokenizer`.
        tokenizer: vocabulary of the model.
        max_tokens: see `encode_text`.
    """
    data = store.validation
    if max_tokens is not None and max_tokens < len(data):
        n_documents = int(np.searchsorted(data.document_ends, max_tokens)) + 1
        end = int(data.document_ends[n_documents - 1])
        n_sentences = int(np.searchsorted(data.sentence_ends, end)) + 1
        data = SplitData(data.tokens[:end], data.sentence_ends[:n_sentences], data.document_ends[:n_documents])
    tokens = np.asarray(data.tokens)
    ends = np.flatnonzero((tokens == tokenizer.line_end) | (tokens == special_tokens.EOD)) + 1
    lines = [tokenizer.decode_bytes(ids).decode(errors="surrogateescape") for ids in np.split(tokens, ends)]
    is_verbatim = store.meta["source"].get("line_type") == "verbatim"
    if not is_verbatim:
        lines = [line for text in lines if (line := text.removesuffix("\n"))]
    return _count(data, lines, is_verbatim)


def sample_sentences(data: SplitData, count: int, max_tokens: int) -> list[np.ndarray]:
    """Sample up to `count` sentences of a text, without special tokens.

    Args:
        data: text.
        count: number of sentences.
        max_tokens: length of the longest sentence in tokens. The shortest have 5 tokens.

    Returns:
        (T,) int64 token ids of each sentence.
    """
    sentences = data.random_sentences(np.random.default_rng(EVAL_SEED))
    return [*islice((ids for ids in sentences if MIN_SENTENCE_TOKENS <= len(ids) <= max_tokens), count)]


def fixed_objective(
    name: str, partial_k: float, perm_size: int | None, data: DataConfig, tokenizer: Tokenizer
) -> Objective:
    """Return an objective for evaluation, with spans of default lengths, so that all models predict the same targets.

    Raises:
        InputError: a window has too few tokens for its targets.
    """
    config = ObjectiveConfig(name=name, partial_k=partial_k, perm_size=perm_size)  # type: ignore[arg-type]
    return build_objective(config, data, tokenizer.starts_word)


def empty_cache(model: LanguageModel, rows: int, mem_len: int | None) -> BaseMemory:
    """Return empty memory of `mem_len` columns for evaluation. None: as many as in training."""
    return model.backbone.to_kv_cache(model.backbone.initial_memory(rows, mem_len))


def predict_targets(
    model: LanguageModel, batch: Batch, memory: BaseMemory
) -> tuple[Tensor, Tensor, BaseMemory, list[Tensor]]:
    """Predict the targets of a batch on the CPU.

    Returns:
        (B, P) float32 loss of each target in nats; (B, P) bool, on the CPU, True if the target has the highest probability; memory for the
        next window; and the logits of each auxiliary head.
    """
    device = model.backbone.device
    logits, memory, *auxiliary_logits = model.logits(batch.to(device), memory)
    losses = target_losses(logits, batch.targets.to(device))
    return losses, is_correct(logits, batch.targets), memory, auxiliary_logits


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return True for the labels (...) that have the largest of the n logits (..., n). The comparison runs on the CPU."""
    return logits.argmax(-1).cpu() == labels


def _shifted(data: SplitData, length: int) -> SplitData:
    """Return `<eod>` followed by a text, and padded to `length`."""
    tokens = np.full(length, special_tokens.PAD, data.tokens.dtype)
    tokens[0] = special_tokens.EOD
    tokens[1 : len(data) + 1] = data.tokens
    tail = [length] if length > len(data) + 1 else []
    ends = (np.asarray(data.sentence_ends), np.asarray(data.document_ends))
    return SplitData(tokens, *(np.append(x + 1, tail).astype(np.int64) for x in ends))


def _count(data: SplitData, lines: Sequence[str], is_verbatim: bool) -> HeldOutText:
    """Return a text with its counts; `lines` are its lines, without their ends unless it is verbatim."""
    n_ends = 0 if is_verbatim else len(lines) + len(data.document_ends)
    return HeldOutText(
        data,
        n_bytes=sum(len(line.encode(errors="surrogateescape")) for line in lines) + n_ends,
        n_characters=sum(map(len, lines)) + n_ends,
        n_words=sum(len(line.split()) for line in lines),
        unknown_fraction=float((np.asarray(data.tokens) == special_tokens.UNK).mean()),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
