"""Generation: continue texts token by token.

Causal and permutation models generate from left to right; token_readers.py explains how each of them reads the text.
`<eod>` precedes every prompt, as the end of the document before it, so an empty prompt is the start of a document. A
line break in a prompt is `<eop>`, the end of a paragraph, and a generated `<eop>` is a line break. A generated `<eod>`
ends the text. Other special tokens are never generated, nor are `<eod>` and `<eop>` at the start of a document.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xlpre.common.errors import InputError, check_minimum
from xlpre.inference.token_readers import CausalReader, PermutationReader, TokenReader
from xlpre.inference.token_sampling import TokenSampler
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import resolve_objective
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer, as_token_ids, check_list, check_vocab_size

BATCH_SIZE = 16  # texts generated together; the cache grows with them
MIN_MEM_LEN = 256  # tokens; in training, a token sees its window besides memory; in generation, only memory
PROMPT_WINDOW = 128  # longest window in which a causal model reads the prompt; attention memory grows with its square

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte that is not a printable character

TextCallback = Callable[[int, str], None]


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of generation.

    Attributes:
        max_new_tokens: largest number of generated tokens.
        temperature: below 1, likely tokens become more likely; above 1, all become more equal. 0: always the most likely token (greedy).
        top_k: choose among the k most likely tokens. None: all.
        top_p: choose among the fewest tokens whose probabilities sum to p or more.
        repetition_penalty: above 1, tokens of the text so far become less likely (`penalize_repetition`).
        num_samples: number of continuations of each prompt.
        stop: strings that end a continuation, which excludes them.
        mem_len: M, number of tokens before the window that the model sees. Time per token and memory grow with it, and not with
            the length of the text. None: see `default_mem_len`.
        free_len: F of a permutation model: its context is read again after every F tokens (token_readers.py).
        padding: text of another document before the prompt, which is not part of the result. It improves short prompts of permutation
            models (docs/generation.md).
        seed: seed of the samples. Sample number n of a prompt does not depend on `num_samples` or on other prompts.

    Raises:
        InputError: a value is out of range.
    """

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    num_samples: int = 1
    stop: Sequence[str] = ()
    mem_len: int | None = None
    free_len: int = 32
    padding: str = ""
    seed: int = 1

    def __post_init__(self) -> None:
        minima = {"max_new_tokens": 1, "top_k": 1, "num_samples": 1, "mem_len": 1, "free_len": 1}
        for name, minimum in {**minima, "temperature": 0, "seed": 0}.items():
            check_minimum(name, getattr(self, name), minimum)
        if self.temperature == float("inf"):
            raise InputError("temperature=inf is invalid: it must be finite. Set temperature=1.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} is invalid: it must be above 0 and at most 1.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise InputError(
                f"repetition_penalty={self.repetition_penalty} is invalid: it must be from 0.01 to 100. Set 1 for no penalty."
            )
        if isinstance(self.stop, str) or "" in self.stop:
            raise InputError(f"stop={self.stop!r} is invalid: it must be a list of strings that are not empty.")


@dataclass(frozen=True)
class Continuation:
    """Generated continuation of a prompt.

    Attributes:
        prompt: the prompt.
        text: the text after the prompt, with the space before its first word, unless the prompt ends with one. It excludes the string
            that stopped it.
        tokens: all generated token ids.
        finish_reason: `eod` (the document ended), `stop` (a stop string was generated) or `length` (`max_new_tokens` were generated).
    """

    prompt: str
    text: str
    tokens: list[int]
    finish_reason: str


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str] | Sequence[np.ndarray],
    config: GenerationConfig | None = None,
    *,
    objective: str | None = None,
    batch_size: int = BATCH_SIZE,
    on_text: TextCallback | None = None,
) -> list[Continuation]:
    """Continue texts. A continuation does not depend on the other prompts, except for rounding.

    Prompts with equal numbers of tokens are continued together.

    Args:
        model: causal or permutation model, on any device.
        tokenizer: its vocabulary.
        prompts: texts, or the (n,) token ids of each text. An empty prompt is the start of a document.
        config: settings. None: the defaults.
        objective: objective of the model, `ModelFolder.objective`. None: `permutation` if the model has two streams; other models need it.
        batch_size: largest number of texts generated together.
        on_text: called with the index of a continuation and the next part of its text, as soon as this part is final.

    Returns:
        `num_samples` continuations of the first prompt, then those of the second, and so on.

    Raises:
        InputError: a denoising model; a vocabulary of another size; or a prompt that is neither a text nor token ids of the vocabulary.
    """
    config = config or GenerationConfig()
    objective = resolve_objective(objective, model.backbone.two_streams)
    check_objective(objective)
    check_vocab_size(tokenizer, model.config.vocab_size)
    check_list("prompts", prompts)
    check_minimum("batch_size", batch_size, 1)
    padding = encode_prompt(tokenizer, config.padding) if config.padding else np.empty(0, np.int64)
    encoded = [np.concatenate([padding, encode_prompt(tokenizer, prompt)]) for prompt in prompts]
    texts = [tokenizer.decode(p) if not isinstance(p, str) else p for p in prompts]
    pieces = piece_bytes(tokenizer)
    results: dict[int, Continuation] = {}
    with without_dropout(model), torch.no_grad():
        for rows in group_equal(np.repeat([*map(len, encoded)], config.num_samples).tolist(), batch_size):
            ids = np.stack([encoded[row // config.num_samples] for row in rows])
            outputs = [
                _Output(
                    pieces,
                    hides_space(tokenizer, ids[i], texts[row // config.num_samples]),
                    config.stop,
                    on_text and _bind(on_text, row),
                )
                for i, row in enumerate(rows)
            ]
            seeds = [(config.seed, row % config.num_samples) for row in rows]
            _continue_rows(model, objective, ids, len(padding), seeds, config, outputs)
            for row, output in zip(rows, outputs, strict=True):
                prompt = texts[row // config.num_samples]
                results[row] = Continuation(prompt, output.text, output.tokens, output.finish_reason or "length")
    return [results[row] for row in range(len(encoded) * config.num_samples)]


def check_objective(objective: str) -> None:
    """Raise InputError if models with this objective do not generate text."""
    if objective == "denoising":
        raise InputError(
            "a denoising model cannot continue a text, because it predicts blanks from the text on both sides. "
            "Fill blanks with pretrain/fill.py, or use a model trained with objective.name=causal or permutation."
        )


def default_mem_len(model: LanguageModel) -> int:
    """Return the default of `mem_len`: that of the model, and at least `MIN_MEM_LEN`."""
    return max(model.config.mem_len, MIN_MEM_LEN)


def encode_prompt(tokenizer: Tokenizer, prompt: str | np.ndarray) -> np.ndarray:
    """Return the (n,) int64 token ids of a prompt after `<eod>`. Line breaks are `<eop>`; several line breaks are one.

    With a vocabulary of bytes or characters, in which a line break is a token like any other, the text stays as it is.

    Raises:
        InputError: the prompt is neither a text nor token ids, or cannot be encoded.
    """
    if isinstance(prompt, str) and tokenizer.line_end != special_tokens.EOP:
        return np.array([special_tokens.EOD, *tokenizer.encode(prompt)])
    if isinstance(prompt, str):
        lines = prompt.splitlines()
        paragraphs = [ids for line in lines if (ids := tokenizer.encode(line))]
        joined = [token for ids in paragraphs for token in (*ids, special_tokens.EOP)]
        ends_line = not paragraphs or prompt.endswith("\n")
        return np.array([special_tokens.EOD, *(joined if ends_line else joined[:-1])])
    return np.append(special_tokens.EOD, as_token_ids("prompts", prompt, tokenizer))


def piece_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the UTF-8 bytes of each token: a line break for `<eop>`, nothing for other special tokens.

    In a vocabulary of bytes, a token may be a part of a character.
    """
    contents = [
        bytes([int(match[1], 16)]) if (match := BYTE_PIECE.fullmatch(piece)) else _piece_text(piece).encode()
        for piece in tokenizer.pieces
    ]
    contents[: special_tokens.N_SPECIAL] = [b""] * special_tokens.EOP + [b"\n"]
    return contents


def _piece_text(piece: str) -> str:
    return piece.replace(special_tokens.WORD_BOUNDARY, " ")


def hides_space(tokenizer: Tokenizer, ids: np.ndarray, prompt: str) -> bool:
    """Return True if the space of the token after `ids` (n,) is left out: its word starts a line, or `prompt` ends with a space."""
    # otherwise a space is a character of the text like any other
    marks_words = tokenizer.line_end == special_tokens.EOP
    return marks_words and (int(ids[-1]) in (special_tokens.EOD, special_tokens.EOP) or prompt.endswith(" "))


class _Output:
    """Text of a row while it is generated.

    Args:
        pieces: result of `piece_bytes`.
        hides_space: True if the space of the first token is left out.
        stop: strings that end the text.
        on_text: called with each part of the text that is final.
    """

    def __init__(
        self, pieces: list[bytes], hides_space: bool, stop: Sequence[str], on_text: Callable[[str], None] | None
    ) -> None:
        self.pieces, self._hides_space, self._stop, self._on_text = pieces, hides_space, stop, on_text
        self.text, self.tokens, self.finish_reason = "", list[int](), ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_reported = 0

    def append(self, token: int) -> None:
        """Append a token, unless the text is finished."""
        if self.finish_reason:
            return
        self.tokens.append(token)
        if token == special_tokens.EOD:
            self.finish("eod")
            return
        piece = self.pieces[token]
        n_before = len(self.text)
        self.text += self._decoder.decode(piece.removeprefix(b" ") if self._hides_space else piece)
        self._hides_space = token == special_tokens.EOP
        # a stop string may have begun in earlier tokens
        found = [
            start for string in self._stop if (start := self.text.find(string, max(0, n_before - len(string)))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.finish("stop")
        elif self._on_text:
            self._report(len(self.text) - self._n_undecided())

    def finish(self, reason: str) -> None:
        """End the text."""
        self.finish_reason = self.finish_reason or reason
        if self.finish_reason != "stop":
            self.text += self._decoder.decode(b"", final=True)
        self._report(len(self.text))

    def _n_undecided(self) -> int:
        """Return the number of characters at the end of the text with which a stop string may begin."""
        longest = max(map(len, self._stop), default=1) - 1
        lengths = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self.text[-n:]) for s in self._stop)), 0)

    def _report(self, end: int) -> None:
        if self._on_text and end > self._n_reported:
            self._on_text(self.text[self._n_reported : end])
            self._n_reported = end


def _continue_rows(
    model: LanguageModel,
    objective: str,
    prompts: np.ndarray,
    n_padding: int,
    seeds: Sequence[Sequence[int]],
    config: GenerationConfig,
    outputs: Sequence[_Output],
) -> None:
    """Continue prompts (B, n), whose first `n_padding` tokens are another text, and append the tokens to `outputs`."""
    ids = torch.from_numpy(prompts).to(model.backbone.device)
    sampler = TokenSampler(
        ids[:, n_padding:],
        seeds,
        len(outputs[0].pieces),
        config.temperature,
        config.top_k,
        config.top_p,
        config.repetition_penalty,
    )
    tokens = ids
    reader = build_reader(model, objective, config)
    for n_generated in range(config.max_new_tokens):
        logits = reader.step(tokens) if n_generated else reader.start(ids)
        tokens = sampler.next_tokens(logits)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)
        if all(output.finish_reason for output in outputs):
            return
    for output in outputs:
        output.finish("length")


def build_reader(model: LanguageModel, objective: str, config: GenerationConfig) -> TokenReader:
    """Return the reader that computes the logits of a causal or permutation model.

    Raises:
        InputError: the model has absolute positions: cached states hold those of earlier windows.
    """
    if model.config.has_absolute_positions:
        raise InputError(
            f"model.positions={model.config.positions} is invalid for generation: the next token is read with cached states, which hold "
            "positions of earlier windows. Use a model with model.positions=relative or shaw."
        )
    mem_len = default_mem_len(model) if config.mem_len is None else config.mem_len
    if objective == "causal":
        return CausalReader(model, mem_len, PROMPT_WINDOW)
    free_len = min(config.free_len, config.max_new_tokens)  # no more columns than needed
    return PermutationReader(model, model.config.mem_len, max(mem_len, 2), free_len)


def group_equal(keys: Sequence[Hashable], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of equal keys, at most `batch_size` at a time."""
    by_key: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        by_key.setdefault(key, []).append(index)
    for group in by_key.values():
        yield from (group[start : start + batch_size] for start in range(0, len(group), batch_size))


def _bind(on_text: TextCallback, row: int) -> Callable[[str], None]:
    return lambda part: on_text(row, part)
