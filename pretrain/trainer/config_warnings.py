"""Warnings about text, vocabulary and warm-up. This module imports no torch, so that preparation starts quickly."""

from __future__ import annotations

import dataclasses

from pretrain.config import PretrainConfig
from xlpre.common.errors import InputError
from xlpre.common.messages import as_yaml, counted
from xlpre.config.cli import ExplicitKeys
from xlpre.data.store import TokenStore
from xlpre.text.corpus import TextConfig

MIN_VAL_DOCUMENTS = 16  # validation documents below which a warning is printed
INEFFECTIVE = {  # settings without effect, by the value of another setting
    ("objective.name", "causal"): (
        *("objective.partial_k", "objective.perm_size", "objective.max_span", "objective.span_ends"),
        *("eval.partial_k", "eval.sentences"),
    ),
    ("objective.name", "denoising"): ("objective.perm_size",),
    ("optim.name", "adamw"): ("optim.matrix_lr", "optim.momentum"),
}


def check_has_preset(explicit_keys: ExplicitKeys) -> None:
    """Raise InputError if neither a config file nor the length of the run is set: the defaults are not a tested preset."""
    if not explicit_keys.file and "train.steps" not in explicit_keys.args:
        raise InputError(
            "--config is missing. Pass a preset, such as `--config configs/pretrain/quickstart.yaml` or "
            "`--config configs/pretrain/xlnet_base.yaml`. To train with the untested default settings, set train.steps."
        )


def check_has_text(explicit_keys: ExplicitKeys) -> None:
    """Raise InputError if neither a config file nor the source of the text is set."""
    if not explicit_keys.file and not any(
        key.startswith(("text.source", "text.mixture")) for key in explicit_keys.args
    ):
        raise InputError(
            "--config is missing. Pass a preset, such as `--config configs/pretrain/quickstart.yaml`, or name your text, as in "
            "text.source='my_texts/*.txt'."
        )


def small_validation_text_warning(config: PretrainConfig, store: TokenStore) -> str:
    """Return a warning if the validation text is too small for a stable loss; else an empty string.

    Args:
        config: settings of the run, with the `text` settings of the store.
        store: the token store.
    """
    n_documents, n_tokens, evaluation = len(store.validation.document_ends), len(store.validation), config.eval
    n_needed = evaluation.batch_size * evaluation.num_windows * config.data.reuse_len + config.data.lookahead
    problems = []
    if n_documents < MIN_VAL_DOCUMENTS and config.text.line_type != "verbatim":  # a text of benchmarks is one document
        problems.append(f"{counted(n_documents, 'document')} (at least {MIN_VAL_DOCUMENTS} are recommended)")
    if n_tokens < n_needed:
        windows = f"eval.batch_size={evaluation.batch_size} and eval.num_windows={evaluation.num_windows}"
        problems.append(f"{n_tokens:,} tokens ({windows} need {n_needed:,})")
    if not problems:
        return ""
    remedy = "Name more text in text.val_source"
    if config.text.val_source is None:
        remedy = f"Raise text.val_fraction, which is {config.text.val_fraction:g}"
    return f"warning: the validation text has {' and '.join(problems)}; val loss will be noisy. {remedy}, and set another data.store_dir."


def backward_text_warning(config: PretrainConfig) -> str:
    """Return a warning if a causal model reads half of its text from right to left; else an empty string."""
    if config.objective.name != "causal" or not config.data.bidirectional:
        return ""
    return (
        "warning: every second row of the batch is read from right to left, so this causal model also learns reversed text. "
        "Set data.bidirectional=false to train it on the text as it is."
    )


def long_warmup_warning(config: PretrainConfig) -> str:
    """Return a warning if all steps of the run are warm-up steps; else an empty string."""
    warmup_steps, steps = config.schedule.warmup_steps, config.train.steps
    if warmup_steps < steps:
        return ""
    return (
        f"warning: all {steps:,} steps are in the warm-up (schedule.warmup_steps={warmup_steps}): the learning rate never reaches "
        "optim.lr. Raise train.steps or lower schedule.warmup_steps."
    )


def ignored_vocab_size(config: PretrainConfig, n_pieces: int, explicit_keys: ExplicitKeys) -> str:
    """Return a note if the command line sets another size than that of the existing vocabulary; else an empty string.

    Args:
        config: settings of the run.
        n_pieces: size of the existing vocabulary.
        explicit_keys: keys that the user set. If only the config file sets another size, there is no note.
    """
    size = config.tokenizer.vocab_size
    if "tokenizer.vocab_size" not in explicit_keys.args or size == n_pieces:
        return ""
    return (
        f"note: tokenizer.vocab_size={size} is ignored: the existing vocabulary has {n_pieces} pieces. Leave it out, or make a "
        "vocabulary and a store under another name."
    )


def ignored_text_settings(config: PretrainConfig, built: TextConfig, explicit_keys: ExplicitKeys) -> str:
    """Return a note if the command line sets other `text` settings than those of the token store; else an empty string.

    Args:
        config: settings of the run.
        built: settings of the text with which the store was built.
        explicit_keys: keys that the user set. If only the config file sets other text, there is no note.
    """
    for field in dataclasses.fields(TextConfig):
        key, value, before = f"text.{field.name}", getattr(config.text, field.name), getattr(built, field.name)
        if key in explicit_keys.args and value != before and field.name != "num_processes":
            return (
                f"note: {key}={as_yaml(value)} is ignored: the token store was built with {key}={as_yaml(before)}. Leave it out, or "
                "prepare another store."
            )
    return ""


def ineffective_settings(config: PretrainConfig, explicit_keys: ExplicitKeys) -> list[str]:
    """Return notes about settings of the command line that have no effect with the objective or the optimizer of the run."""
    notes = []
    for (key, value), ineffective in INEFFECTIVE.items():
        group, _, name = key.partition(".")
        keys = [each for each in ineffective if each in explicit_keys.args]
        if keys and getattr(getattr(config, group), name) == value:
            verb = "has" if len(keys) == 1 else "have"
            notes.append(f"note: {', '.join(keys)} {verb} no effect with {key}={value}.")
    return notes
