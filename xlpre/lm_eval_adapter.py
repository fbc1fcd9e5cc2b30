"""Adapter for the Language Model Evaluation Harness, `lm-eval`. Install it with `pip install -c constraints.txt -e ".[lm-eval]"`.

Importing this module registers the model `xlpre`. As a command, it runs the harness with that model:

    python -m xlpre.lm_eval_adapter --model xlpre --model_args path=runs/mine --tasks lambada_openai

Causal and permutation models are supported. A log-likelihood is that of the chain rule from left to right. Texts are encoded as in
generation: `<eod>` precedes them, and line breaks are `<eop>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.conversion.model_folder import load_folder
from xlpre.inference.generation import (
    BATCH_SIZE,
    GenerationConfig,
    build_reader,
    check_objective,
    encode_prompt,
    generate,
    group_equal,
)
from xlpre.inference.scoring import score
from xlpre.inference.token_sampling import never_generated
from xlpre.model.dropout import without_dropout
from xlpre.text import special_tokens
from xlpre.training.distributed import device_type

MAX_NEW_TOKENS = 256  # of tasks that set no limit
# settings of a task: those of GenerationConfig
RENAMED = {"max_gen_toks": "max_new_tokens", "until": "stop"}
SETTINGS = ("max_new_tokens", "stop", "temperature", "top_k", "top_p", "repetition_penalty")


@register_model("xlpre")
class HarnessModel(LM):
    """Model of the harness.

    Args:
        path: run folder or model folder.
        mem_len: see GenerationConfig.
        free_len: see GenerationConfig.
        seed: seed of the samples of tasks that sample.
        batch_size: texts computed together; `auto` or None: the default.
        max_batch_size: not used.
        device: `cpu` or `cuda`. None: a GPU if there is one. Without a GPU, it is always the CPU.

    Raises:
        InputError: a folder that cannot be read or has no vocabulary, or a denoising model.
    """

    def __init__(
        self,
        path: str,
        mem_len: int | None = None,
        free_len: int = GenerationConfig.free_len,
        seed: int = 1,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        folder = load_folder(path)
        check_objective(folder.objective)
        self._objective, self._tokenizer = folder.objective, folder.require_tokenizer(path)
        if str(device).startswith("cuda") and not torch.cuda.is_available():  # lm-eval's default is cuda:0
            device = "cpu"
        self._device = torch.device(device or device_type())
        self._model = folder.model().to(self._device)
        is_auto = batch_size is None or str(batch_size).startswith("auto")  # also auto:N
        self._batch_size = BATCH_SIZE if is_auto else int(batch_size)  # type: ignore[arg-type]
        self._settings: dict[str, Any] = {"mem_len": mem_len, "free_len": free_len, "seed": seed}

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return, for each pair of a context and its continuation, the log-likelihood of the continuation in nats, and whether each of its
        tokens is the most likely one.
        """
        pairs = [self._encode_pair(*request.args) for request in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        is_scored = [index for index, (_, continuation) in enumerate(pairs) if len(continuation)]
        with without_dropout(self._model), torch.no_grad():
            lengths = [(len(pairs[index][0]), len(pairs[index][1])) for index in is_scored]
            for rows in group_equal(lengths, self._batch_size):
                rows = [is_scored[row] for row in rows]
                for row, result in zip(rows, self._score_continuations([pairs[row] for row in rows]), strict=True):
                    results[row] = result
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-likelihood of each text in nats. Each token is scored once; memory connects the windows of a long text."""
        ids = [encode_prompt(self._tokenizer, request.args[0])[1:] for request in requests]
        texts = [tokens for tokens in ids if len(tokens)]
        mode = "causal" if self._objective == "causal" else "any-order"
        settings: dict[str, Any] = {"objective": self._objective, "n_orders": 1, "mem_len": self._settings["mem_len"]}
        if mode == "any-order":  # causal scores begin with <eod> by themselves
            settings["prefix"] = np.array([special_tokens.EOD])
        scores = iter(score(self._model, self._tokenizer, texts, mode, **settings))
        results = [next(scores).log_likelihood if len(tokens) else 0.0 for tokens in ids]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the continuation of each context up to the first of the strings in `until`."""
        by_config: dict[GenerationConfig, list[int]] = {}
        for index, request in enumerate(requests):
            by_config.setdefault(self._generation_config(request.args[1]), []).append(index)
        results = [""] * len(requests)
        for config, rows in by_config.items():
            outputs = generate(
                self._model,
                self._tokenizer,
                [requests[row].args[0] for row in rows],
                config,
                objective=self._objective,
                batch_size=self._batch_size,
            )
            for row, output in zip(rows, outputs, strict=True):
                results[row] = output.text
                self.cache_hook.add_partial("generate_until", requests[row].args, output.text)
        return results

    def _encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a context and of its continuation. Tokens that contain characters of both belong to the continuation."""
        whole = encode_prompt(self._tokenizer, context + continuation)
        prefix = encode_prompt(self._tokenizer, context)[: len(whole)]
        differing = np.flatnonzero(prefix != whole[: len(prefix)])
        return tuple(np.split(whole, [differing[0] if len(differing) else len(prefix)]))  # type: ignore[return-value]

    def _score_continuations(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[float, bool]]:
        """Score pairs in which the contexts have the same number of tokens, and the continuations, too."""
        contexts, targets = (torch.from_numpy(np.stack(ids)).to(self._device) for ids in zip(*pairs, strict=True))
        reader = build_reader(self._model, self._objective, GenerationConfig(**self._settings))
        logits = reader.continuation_logits(contexts, targets).float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").double()
        most_likely = logits.masked_fill(never_generated(logits.size(2), logits.device), -torch.inf).argmax(2)
        is_most_likely = (most_likely == targets).all(1)
        return [*zip((-losses.sum(1)).tolist(), is_most_likely.tolist(), strict=True)]

    def _generation_config(self, kwargs: dict[str, Any]) -> GenerationConfig:
        """Return the settings of a task as a GenerationConfig.

        Raises:
            InputError: a setting that generation does not have.
        """
        settings = {RENAMED.get(name, name): value for name, value in kwargs.items() if value is not None}
        samples = settings.pop("do_sample", settings.get("temperature", 0) > 0)
        stop = settings.get("stop") or ()
        settings = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "top_p": 1.0,
            **settings,
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        }
        if not samples:
            settings["temperature"] = 0.0
        if unknown := settings.keys() - {*SETTINGS}:
            name = min(unknown)
            raise InputError(
                f"generation_kwargs {name}={settings[name]} is invalid: the settings are do_sample, max_gen_toks, until, "
                f"{', '.join(SETTINGS[2:])}. Remove it from the task."
            )
        return GenerationConfig(**settings, **self._settings)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    run_main(cli_evaluate)
