"""Joint predictions for the blanks of a text: beam search, sampling, and ranking of given answers.

The missing pieces are filled in one after the other. The joint log-probability of a filling is the sum of the log-probabilities of its
pieces, each given the text and the pieces that were filled in before:

    permutation   The text has the lowest rank, then come the filled pieces in their order, as targets in training. No token sees a piece
                  that is not filled in yet. This is the chain rule (XLNet, section 2.2): in each order, the probabilities of all fillings
                  of given lengths sum to 1.
    denoising     A piece that is not filled in yet is <mask>, which all tokens see, and a filled piece is part of the text. The sum of
                  the log-probabilities is a pseudo-joint: the model was trained to predict its targets independently of each other.

Orders:

    left-to-right   the order of the text
    confident       at each step, the piece whose most likely token has the highest probability, given what is filled in already
    random          one order for all candidates, drawn from the seed

Special tokens, such as <eop>, are never filled in. Log-probabilities are those of the model, over the whole vocabulary.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from xlpre.batch import HIDDEN_RANK, Batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.common.messages import counted
from xlpre.common.tables import to_text
from xlpre.inference.batches import collate, split_rows, text_batch
from xlpre.inference.cloze import (
    ClozeResult,
    ClozeText,
    check_lengths,
    continues_word,
    encode_cloze,
    format_result,
    readable_piece,
)
from xlpre.inference.scoring import BATCH_TOKENS
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES, resolve_objective
from xlpre.text import special_tokens
from xlpre.text.blanks import BLANK
from xlpre.text.special_tokens import WORD_BOUNDARY
from xlpre.text.tokenizer import Tokenizer, as_token_ids, check_list, check_vocab_size

ORDERS = ("left-to-right", "confident", "random")
BEAM = 20  # fillings that beam search keeps
MAX_LENGTHS = 256  # combinations of the lengths of all blanks
MAX_FILLINGS = 10_000  # combinations of the options of all blanks

Options = Sequence[Sequence[str] | Sequence[np.ndarray]]


@dataclass(frozen=True)
class Filling:
    """Text whose N blanks are filled in with P pieces.

    Attributes:
        text: the text.
        answers: N texts of the blanks. A hyphen marks an answer that continues the word before it.
        tokens: N arrays of token ids.
        token_log_probabilities: N arrays of float64: log-probability of each piece, given the text and the pieces before it in the order.
        independent_log_probability: sum over the pieces of the log-probability given the text and no other piece of a blank.
        order: (P,) indices of the pieces, in the order in which they were filled in.
    """

    text: str
    answers: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    token_log_probabilities: tuple[np.ndarray, ...]
    independent_log_probability: float
    order: tuple[int, ...]

    @property
    def log_probability(self) -> float:
        """Joint log-probability of the pieces in nats."""
        return float(sum(values.sum() for values in self.token_log_probabilities))

    @property
    def n_pieces(self) -> int:
        """P."""
        return len(self.order)


def fill(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    objective: str | None = None,
    order: str = "left-to-right",
    beam: int = BEAM,
    length_penalty: float = 1.0,
    num_samples: int | None = None,
    temperature: float = 1.0,
    options: Options | None = None,
    seed: int = 1,
    batch_tokens: int = BATCH_TOKENS,
) -> list[list[Filling]]:
    """Fill in the blanks of texts jointly: by beam search, by sampling, or with given answers.

    If a blank has several possible lengths, such as `____{1,4}`, each combination of lengths is searched. Longer fillings have lower
    probabilities, so fillings of different lengths are compared by `log_probability / n_pieces ** length_penalty`.

    Args:
        model: permutation or denoising model, on any device.
        tokenizer: its vocabulary.
        texts: texts with blanks (xlpre/text/blanks.py).
        objective: objective of the model, `ModelFolder.objective`. None: `permutation` if the model has two streams; other models need it.
        order: `left-to-right`, `confident` or `random`, see the module.
        beam: number of fillings that beam search keeps, and returns for each text. The number of all fillings makes it exhaustive.
        length_penalty: exponent of the number of pieces. 1 compares the mean log-probability of a piece, 0 the joint log-probability.
        num_samples: sample this number of fillings instead of searching. The lengths of the blanks are drawn uniformly.
        temperature: divides the logits of sampling. It does not affect the log-probabilities of the result.
        options: answers to rank instead of searching, for each blank a list of texts or of token id arrays (each of any number of pieces).
            All combinations are ranked by their joint log-probability.
        seed: seed of samples and of the random order.
        batch_tokens: largest number of content and query rows of a forward pass. A single text may have more.

    Returns:
        The fillings of each text: the best first, or the samples as drawn.

    Raises:
        InputError: a causal model; a text that is invalid (see `encode_cloze`) or too long; options that do not fit the blanks or the
            vocabulary; or another argument is invalid.
    """
    check_objective(resolve_objective(objective, model.backbone.two_streams))
    check_list("texts", texts)
    if order not in ORDERS:
        raise InputError(f"order={order!r} is invalid: it must be one of {', '.join(ORDERS)}.")
    for name, value in (("beam", beam), ("num_samples", num_samples), ("batch_tokens", batch_tokens)):
        check_minimum(name, value, 1, "Correct it or leave it out.")
    check_minimum("seed", seed, 0)
    if not 0 < temperature < math.inf:
        raise InputError(
            f"temperature={temperature} is invalid: it must be above 0 and finite. Set 1 for the probabilities of the model."
        )
    if not 0 <= length_penalty < math.inf:
        raise InputError(
            f"length_penalty={length_penalty} is invalid: it must be at least 0. Set 1 for the mean log-probability of a piece."
        )
    if options is not None and not all(len(answers) for answers in options):
        raise InputError("options is invalid: a blank has no answers. Give at least one for each blank.")
    if options is not None and num_samples is not None:
        raise InputError(f"num_samples={num_samples} is invalid with options: these are ranked. Leave one of them out.")
    check_vocab_size(tokenizer, model.config.vocab_size)
    filler = _Filler(model, order, seed, batch_tokens)
    results = []
    with without_dropout(model), torch.no_grad():
        for text in texts:
            cloze = encode_cloze(text, tokenizer)
            if options is not None:
                states = filler.score(_fill_in_options(cloze, options, tokenizer))
                states.sort(key=lambda state: -state.log_probability)
            elif num_samples is not None:
                states = filler.sample(_lengths(cloze, tokenizer), cloze, num_samples, temperature)
            else:
                found = [filler.search(_State.empty(cloze, lengths), beam) for lengths in _lengths(cloze, tokenizer)]
                states = heapq.nsmallest(
                    beam,
                    itertools.chain.from_iterable(found),
                    key=lambda state: -state.log_probability / len(state.filled) ** length_penalty,
                )
            independent = filler.independent(states)
            results.append([_filling(cloze, *pair, tokenizer) for pair in zip(states, independent, strict=True)])
    return results


def check_objective(objective: str) -> None:
    """Raise InputError if models of an objective cannot fill in blanks."""
    if not OBJECTIVES[objective].sees_ahead:
        raise InputError(
            f"objective={objective} is invalid: a {objective} model does not see the text after a blank. Continue a text with "
            "pretrain/generate.py, compare complete texts with pretrain/score.py, or use a permutation or denoising model."
        )


def format_pieces(text: str, fillings: Sequence[Filling], tokenizer: Tokenizer) -> str:
    """Format the fillings of a text that lacks a single piece for a terminal, with percentages."""
    predictions = [
        (readable_piece(tokenizer.pieces[filling.tokens[0][0]]), math.exp(filling.log_probability))
        for filling in fillings
    ]
    return format_result(ClozeResult(text, [predictions], []))


def format_fillings(text: str, fillings: Sequence[Filling]) -> str:
    """Format the fillings of a text for a terminal, as a table with log-probabilities in nats."""
    rows = [
        {
            "    filling": "    " + " | ".join(filling.answers),
            "probability": f"{math.exp(filling.log_probability):.2g}",
            "log-probability": f"{filling.log_probability:.2f}",
            "per piece": f"{filling.log_probability / filling.n_pieces:.2f}",
            "independent": f"{filling.independent_log_probability:.2f}",
        }
        for filling in fillings
    ]
    return f"{text}\n{to_text(rows)}"


@dataclass(frozen=True)
class _State:
    """Text that is filled in partly.

    Attributes:
        tokens: (T,) token ids, <mask> where a piece is missing.
        blanks: positions of the pieces of each blank.
        filled: positions of the pieces that are filled in, in this order.
        log_probabilities: their log-probabilities.
    """

    tokens: np.ndarray
    blanks: tuple[np.ndarray, ...]
    filled: tuple[int, ...]
    log_probabilities: tuple[float, ...]

    @classmethod
    def empty(cls, cloze: ClozeText, lengths: Sequence[int]) -> _State:
        """Return the text without any missing piece filled in."""
        tokens, blanks = cloze.masked_tokens(lengths)
        return cls(tokens, tuple(blanks), (), ())

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Positions of the missing pieces, from left to right."""
        return tuple(position for position in np.concatenate(self.blanks).tolist() if position not in self.filled)

    @property
    def log_probability(self) -> float:
        """Joint log-probability of the filled pieces."""
        return math.fsum(self.log_probabilities)

    @property
    def key(self) -> tuple[bytes, tuple[int, ...]]:
        """Value that is equal for states with the same predictions."""
        return self.tokens.tobytes(), self.filled

    def fill_in(self, position: int, token: int, log_probability: float) -> _State:
        """Return the state after the next step."""
        tokens = self.tokens.copy()
        tokens[position] = token
        log_probabilities = (*self.log_probabilities, log_probability)
        return replace(self, tokens=tokens, filled=(*self.filled, position), log_probabilities=log_probabilities)

    def erased(self) -> _State:
        """Return the state before the first step."""
        tokens = self.tokens.copy()
        tokens[list(self.filled)] = special_tokens.MASK
        return replace(self, tokens=tokens, filled=(), log_probabilities=())


class _Step(NamedTuple):
    """Prediction of the next piece.

    Attributes:
        indices: indices of the states with this prediction.
        position: position of the next piece.
        log_probabilities: (V,) float64.
    """

    indices: list[int]
    position: int
    log_probabilities: np.ndarray


class _Filler:
    """Fills in missing pieces step by step. For the arguments, see `fill`."""

    def __init__(self, model: LanguageModel, order: str, seed: int, batch_tokens: int) -> None:
        self._model, self._order, self._seed, self._batch_tokens = model, order, seed, batch_tokens

    def search(self, empty: _State, beam: int) -> list[_State]:
        """Return the `beam` most likely fillings that beam search finds."""
        states = [empty]
        while states[0].missing:
            candidates: list[tuple[float, _State, int, int, float]] = []
            for step in self._steps(states):
                n_best = min(beam, len(step.log_probabilities) - special_tokens.N_SPECIAL)
                tokens = (
                    special_tokens.N_SPECIAL
                    + np.argpartition(-step.log_probabilities[special_tokens.N_SPECIAL :], n_best - 1)[:n_best]
                )
                for state in (states[index] for index in step.indices):
                    for token, value in zip(tokens.tolist(), step.log_probabilities[tokens].tolist(), strict=True):
                        candidates.append((state.log_probability + value, state, step.position, token, value))
            best = heapq.nlargest(beam, candidates, key=lambda candidate: candidate[0])
            states = [state.fill_in(position, token, value) for _, state, position, token, value in best]
        return states

    def sample(
        self, lengths: Sequence[Sequence[int]], cloze: ClozeText, num_samples: int, temperature: float
    ) -> list[_State]:
        """Return fillings that are drawn from the joint distribution."""
        rng = np.random.default_rng(self._seed)
        empty = [_State.empty(cloze, each) for each in lengths]
        states = [empty[i] for i in rng.integers(len(empty), size=num_samples)]
        while any(state.missing for state in states):
            numbers = rng.random(num_samples)
            for step in self._steps(states):
                scaled = step.log_probabilities[special_tokens.N_SPECIAL :] / temperature
                cumulative = np.exp(scaled - scaled.max()).cumsum()
                drawn = cumulative.searchsorted(numbers[step.indices] * cumulative[-1], side="right")
                for index, choice in zip(step.indices, drawn.tolist(), strict=True):
                    token = special_tokens.N_SPECIAL + min(choice, len(scaled) - 1)
                    value = float(step.log_probabilities[token])
                    states[index] = states[index].fill_in(step.position, token, value)
        return states

    def score(self, answers: Iterable[tuple[_State, np.ndarray]]) -> list[_State]:
        """Return the states with given tokens filled in.

        Args:
            answers: pairs of an empty state and the (T,) token ids of the complete text.
        """
        pairs = list(answers)
        states, complete = [state for state, _ in pairs], [tokens for _, tokens in pairs]
        while any(state.missing for state in states):
            for step in self._steps(states):
                for index in step.indices:
                    token = int(complete[index][step.position])
                    value = float(step.log_probabilities[token])
                    states[index] = states[index].fill_in(step.position, token, value)
        return states

    def independent(self, states: Sequence[_State]) -> list[float]:
        """Return the sum of the log-probabilities of the pieces of each complete state, each given the text only."""
        erased = [state.erased() for state in states]
        sums = [0.0] * len(states)
        for indices, positions, log_probabilities in self._predict(erased, all_missing=True):
            for index in indices:
                sums[index] = math.fsum(log_probabilities[np.arange(len(positions)), states[index].tokens[positions]])
        return sums

    def _steps(self, states: Sequence[_State]) -> Iterator[_Step]:
        """Yield the predictions of the next pieces of the states that are not complete."""
        for indices, positions, log_probabilities in self._predict(states, all_missing=self._order == "confident"):
            target = int(log_probabilities[:, special_tokens.N_SPECIAL :].max(1).argmax())
            yield _Step(indices, int(positions[target]), log_probabilities[target])

    def _predict(
        self, states: Sequence[_State], all_missing: bool
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        """Predict missing pieces. Equal states share a batch row.

        Args:
            states: states; complete ones are left out.
            all_missing: predict all missing pieces of a state, each from what is filled in. False: only the next in the order.

        Yields:
            Indices of equal states, positions of the predicted pieces (P,), and their log-probabilities (P, V) float64.
        """
        indices: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        for index, state in enumerate(states):
            if state.missing:
                indices.setdefault(state.key, []).append(index)
        rows, backbone = [*indices.values()], self._model.backbone
        two_streams = backbone.two_streams
        n_tokens = [len(states[equal[0]].tokens) * (2 if two_streams else 1) for equal in rows]
        for batch_rows in split_rows(n_tokens, self._batch_tokens):
            part = [rows[row] for row in batch_rows]
            positions = [self._targets(states[equal[0]], all_missing) for equal in part]
            batch = collate(
                [_batch(states[equal[0]], each, two_streams) for equal, each in zip(part, positions, strict=True)]
            )
            memory = backbone.initial_memory(len(part), mem_len=0)
            logits = self._model.logits(batch.to(backbone.device), memory)[0]
            for equal, each, row in zip(part, positions, logits, strict=True):
                yield equal, each, row[len(row) - len(each) :].double().log_softmax(-1).cpu().numpy()

    def _targets(self, state: _State, all_missing: bool) -> np.ndarray:
        """Return the positions to predict, increasing."""
        missing = np.array(state.missing)
        if all_missing:
            return missing
        if self._order == "random":
            positions = np.sort(np.concatenate(state.blanks))
            shuffled = np.random.default_rng([self._seed, len(positions)]).permutation(positions)
            return shuffled[len(state.filled)][None]
        return missing[:1]


def _batch(state: _State, positions: np.ndarray, two_streams: bool) -> Batch:
    """Build a batch of one row that predicts missing pieces at `positions` (P,) from the text and the filled pieces."""
    query_rank, key_rank = np.ones(len(state.tokens)), np.zeros(len(state.tokens))
    if two_streams:
        filled, missing = list(state.filled), list(state.missing)
        query_rank[filled] = key_rank[filled] = np.arange(1, len(filled) + 1)
        query_rank[missing], key_rank[missing] = len(filled) + 1, HIDDEN_RANK
    return text_batch(state.tokens, query_rank, key_rank, positions)


def _lengths(cloze: ClozeText, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return all combinations of the lengths of the blanks."""
    check_lengths(cloze, tokenizer)
    ranges = [range(blank.shortest, blank.longest + 1) for blank in cloze.blanks]
    if (n_combinations := math.prod(map(len, ranges))) > MAX_LENGTHS:
        raise InputError(
            f"text={cloze.text!r} is invalid: its blanks have {n_combinations:,} combinations of lengths, and the limit is {MAX_LENGTHS}. "
            "Write shorter ranges."
        )
    return list(itertools.product(*ranges))


def _fill_in_options(cloze: ClozeText, options: Options, tokenizer: Tokenizer) -> Iterator[tuple[_State, np.ndarray]]:
    """Yield, for each combination of options, the empty state and the (T,) token ids of the complete text."""
    if len(options) != len(cloze.blanks) or isinstance(options, str) or any(isinstance(each, str) for each in options):
        raise InputError(
            f"options={options!r:.60} is invalid: it must have one list of answers for each blank, and {cloze.text!r} has "
            f"{counted(len(cloze.blanks), 'blank')}. On the command line, separate the answers for a blank by commas, and repeat "
            "--options for each blank."
        )
    if any(blank.has_length for blank in cloze.blanks):
        raise InputError(
            f"text={cloze.text!r} is invalid with options, which have their own lengths. Write {BLANK} for each blank."
        )
    if (n_combinations := math.prod(map(len, options))) > MAX_FILLINGS:
        raise InputError(
            f"options are invalid: they have {n_combinations:,} combinations, and the limit is {MAX_FILLINGS:,}."
        )
    encoded = [
        [_encode_option(cloze, blank, option, tokenizer) for option in each] for blank, each in enumerate(options)
    ]
    for answers in itertools.product(*encoded):
        state = _State.empty(cloze, [len(answer) for answer in answers])
        tokens = state.tokens.copy()
        tokens[np.concatenate(state.blanks)] = np.concatenate(answers)
        yield state, tokens


def _encode_option(cloze: ClozeText, blank: int, option: str | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids of an answer for a blank."""
    if isinstance(option, str):
        follows_word = tokenizer.kind == "sentencepiece" and not _follows_space(cloze, blank)
        # after another symbol, SentencePiece does not start a word
        prefix = special_tokens.SPECIAL_TOKENS[special_tokens.EOP] if follows_word else ""
        ids = np.array(tokenizer.encode(prefix + option.strip()), np.int64)
        ids = ids[int(np.argmax(ids == special_tokens.EOP)) + 1 :] if follows_word else ids
    else:
        ids = as_token_ids("options", option, tokenizer)
    if not ids.size:
        raise InputError(f"options={option!r} is invalid: it has no tokens. Correct or remove it.")
    if isinstance(option, str) and (ids == special_tokens.UNK).any():
        part = "word" if tokenizer.kind == "words" else "character"
        raise InputError(
            f"options={option!r} is invalid: the vocabulary does not have a {part} of it. Correct or remove it."
        )
    return ids


def _follows_space(cloze: ClozeText, blank: int) -> bool:
    """Return True if a blank is at the start of the text or after white space."""
    start = cloze.blanks[blank].start
    return start == 0 or cloze.text[start - 1].isspace()


def _filling(cloze: ClozeText, state: _State, independent: float, tokenizer: Tokenizer) -> Filling:
    """Return the result for a complete state."""
    text, end, answers = "", 0, []
    for blank, positions in zip(cloze.blanks, state.blanks, strict=True):
        tokens = state.tokens[positions]
        before, answer, first = cloze.text[end : blank.start], tokenizer.decode(tokens), tokenizer.pieces[tokens[0]]
        if tokenizer.kind == "sentencepiece":
            before = before.rstrip() if not first.startswith(WORD_BOUNDARY) else before
            answers.append(f"-{answer}" if continues_word(first) else answer)
        else:
            answers.append(answer)
        if first.startswith(WORD_BOUNDARY) and (text or before) and not (text + before)[-1].isspace():
            before += " "
        text, end = text + before + answer, blank.end
    step_of = {position: step for step, position in enumerate(state.filled)}
    ordered = sorted(step_of)
    return Filling(
        text + cloze.text[end:],
        tuple(answers),
        tuple(state.tokens[positions] for positions in state.blanks),
        tuple(
            np.array([state.log_probabilities[step_of[position]] for position in positions.tolist()])
            for positions in state.blanks
        ),
        independent,
        tuple(ordered.index(position) for position in state.filled),
    )
