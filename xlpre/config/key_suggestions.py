"""Suggestions for settings that do not exist.

The table holds names of settings in Hugging Face (TrainingArguments, XLNetConfig), Megatron-LM, DeepSpeed and the original XLNet:
`learning_rate=1e-4` is refused with "did you mean 'optim.lr'?".
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

MIN_KEY_SIMILARITY = 0.85  # difflib's ratio of two dotted keys
MIN_NAME_SIMILARITY = 0.91  # the same ratio, of the last components of two keys

# A name has several keys if pretraining and fine-tuning use different ones, or if several settings replace it. A key may include a value.
ALIASES: dict[str, tuple[str, ...]] = {
    # optimizer
    "learning_rate": ("optim.lr",),
    "peak_lr": ("optim.lr",),
    "max_lr": ("optim.lr",),
    "adam_beta1": ("optim.beta1",),
    "adam_beta2": ("optim.beta2",),
    "adam_eps": ("optim.eps",),
    "adam_epsilon": ("optim.eps",),
    "epsilon": ("optim.eps",),
    "clip": ("optim.max_grad_norm",),
    "clip_grad": ("optim.max_grad_norm",),
    "grad_clip": ("optim.max_grad_norm",),
    "gradient_clipping": ("optim.max_grad_norm",),
    "wd": ("optim.weight_decay",),
    "optimizer": ("optim.name",),
    "muon_momentum": ("optim.momentum",),
    "lr_layer_decay_rate": ("optim.layer_decay",),
    "layerwise_lr_decay": ("optim.layer_decay",),
    # schedule
    "lr_scheduler_type": ("schedule.decay",),
    "lr_decay_style": ("schedule.decay",),
    "decay_method": ("schedule.decay",),
    "lr_warmup_iters": ("schedule.warmup_steps",),
    "num_warmup_steps": ("schedule.warmup_steps",),
    "warmup": ("schedule.warmup_steps",),
    "warmup_iters": ("schedule.warmup_steps",),
    "warmup_ratio": ("warmup_ratio", "schedule.warmup_steps"),
    "warmup_fraction": ("warmup_ratio", "schedule.warmup_steps"),
    "lr_warmup_fraction": ("warmup_ratio", "schedule.warmup_steps"),
    "min_lr": ("schedule.min_lr_ratio",),
    "min_lr_rate": ("schedule.min_lr_ratio",),
    # training
    "max_steps": ("train.steps",),
    "train_steps": ("train.steps",),
    "num_train_steps": ("train.steps",),
    "train_iters": ("train.steps",),
    "iterations": ("train.steps",),
    "num_train_epochs": ("epochs", "train.steps"),
    "num_epochs": ("epochs", "train.steps"),
    "epochs": ("epochs", "train.steps"),
    "max_time": ("train.hours",),
    "batch_size": ("train.global_batch_size", "train.micro_batch_size"),
    "train_batch_size": ("train.global_batch_size",),
    "total_batch_size": ("train.global_batch_size",),
    "per_device_train_batch_size": ("train.micro_batch_size",),
    "per_gpu_train_batch_size": ("train.micro_batch_size",),
    "train_micro_batch_size_per_gpu": ("train.micro_batch_size",),
    "gradient_accumulation": ("train.micro_batch_size",),
    "gradient_accumulation_steps": ("train.micro_batch_size",),
    "accumulation": ("train.micro_batch_size",),
    "rampup_batch_size": ("train.batch_warmup_steps",),
    "bf16": ("train.precision=bf16",),
    "fp16": ("train.precision=fp16",),
    "fp32": ("train.precision=fp32",),
    "dtype": ("train.precision",),
    "torch_dtype": ("train.precision",),
    "mixed_precision": ("train.precision",),
    "gradient_checkpointing": ("train.activation_checkpointing",),
    "recompute_granularity": ("train.activation_checkpointing",),
    "torch_compile": ("train.compile",),
    "logging_steps": ("train.log_every",),
    "log_interval": ("train.log_every",),
    "save_steps": ("train.save_every",),
    "save_interval": ("train.save_every",),
    "save_total_limit": ("train.keep_last_checkpoints",),
    "wandb_project": ("train.wandb",),
    "report_to": ("train.wandb",),
    # evaluation
    "eval_steps": ("eval.every",),
    "eval_interval": ("eval.every",),
    "eval_iters": ("eval.num_windows",),
    "eval_batch_size": ("eval.batch_size",),
    "per_device_eval_batch_size": ("eval.batch_size",),
    "early_stopping": ("eval.early_stopping_patience",),
    "patience": ("eval.early_stopping_patience",),
    "load_best_model_at_end": ("eval.keep_weights",),
    # run
    "output_dir": ("run_dir",),
    "model_dir": ("run_dir",),
    "save": ("run_dir",),
    "run_name": ("name",),
    "init": ("init_from",),
    "init_checkpoint": ("init_from",),
    "model_name_or_path": ("init_from",),
    "load": ("init_from",),
    "resume_from_checkpoint": ("run_dir",),
    "task_name": ("task",),
    # text and tokenizer
    "train_file": ("text.source", "data.train"),
    "validation_file": ("data.dev",),
    "test_file": ("data.test",),
    "dataset_name": ("text.source", "data.train"),
    "data_path": ("text.source",),
    "data.path": ("data.store_dir", "data.dir"),
    "text.path": ("text.source",),
    "file": ("text.source", "data.train"),
    "files": ("text.source", "data.train"),
    "corpus": ("text.source",),
    "text_column": ("text.column", "data.text"),
    "label_column": ("data.label",),
    "validation_split_percentage": ("text.val_fraction", "data.val_fraction"),
    "preprocessing_num_workers": ("text.num_processes",),
    "num_proc": ("text.num_processes",),
    "num_workers": ("data.num_threads",),
    "dataloader_num_workers": ("data.num_threads",),
    "tokenizer_name": ("tokenizer.path",),
    "spiece_model_file": ("tokenizer.path",),
    "do_lower_case": ("tokenizer.preprocess=uncased",),
    "uncased": ("tokenizer.preprocess=uncased",),
    "max_train_samples": ("data.max_train_examples",),
    # windows
    "window": ("data.seq_len",),
    "seq_length": ("data.seq_len", "data.max_seq_len"),
    "seq_len": ("data.seq_len", "data.max_seq_len"),
    "max_len": ("data.max_seq_len", "data.seq_len"),
    "maxlen": ("data.max_seq_len", "data.seq_len"),
    "max_seq_length": ("data.seq_len", "data.max_seq_len"),
    "block_size": ("data.seq_len",),
    "context_length": ("data.seq_len",),
    "max_query_length": ("data.max_question_len",),
    "max_answer_length": ("data.max_answer_len",),
    "null_score_diff_threshold": ("data.null_score_threshold",),
    "bi_data": ("data.bidirectional",),
    # objective
    "num_predict": ("objective.partial_k",),
    "mask_alpha": ("objective.partial_k",),
    "mlm_probability": ("objective.partial_k",),
    "max_num_tokens": ("objective.max_span",),
    # model
    "hidden_size": ("model.d_model",),
    "n_embd": ("model.d_model",),
    "embed_dim": ("model.d_model",),
    "hidden_dim": ("model.d_model",),
    "width": ("model.d_model",),
    "num_hidden_layers": ("model.n_layer",),
    "num_layers": ("model.n_layer",),
    "layers": ("model.n_layer",),
    "depth": ("model.n_layer",),
    "n_layers": ("model.n_layer",),
    "num_attention_heads": ("model.n_head",),
    "num_heads": ("model.n_head",),
    "n_heads": ("model.n_head",),
    "kv_channels": ("model.d_head",),
    "head_dim": ("model.d_head",),
    "intermediate_size": ("model.d_inner",),
    "ffn_hidden_size": ("model.d_inner",),
    "ff_activation": ("model.feed_forward",),
    "hidden_act": ("model.feed_forward",),
    "activation": ("model.feed_forward",),
    "layer_norm_eps": ("model.norm_eps",),
    "layernorm_epsilon": ("model.norm_eps",),
    "initializer_range": ("model.init_std",),
    "init_method_std": ("model.init_std",),
    "hidden_dropout": ("model.dropout",),
    "hidden_dropout_prob": ("model.dropout",),
    "attention_dropout": ("model.dropatt",),
    "attention_probs_dropout_prob": ("model.dropatt",),
    "max_position_embeddings": ("model.n_positions",),
    "position_embedding_type": ("model.positions",),
    "attn_implementation": ("model.attention_backend",),
    "tie_word_embeddings": ("model.tie_embedding",),
    "summary_type": ("model.pooling",),
    "vocab_size": ("tokenizer.vocab_size",),
    "vocab": ("tokenizer.vocab_size", "tokenizer.path"),
}


def suggest_key(key: str, known: Sequence[str]) -> str:
    """Return `did you mean ...?` with the settings that `key` probably means, or an empty string if none is similar.

    Args:
        key: dotted key that does not exist.
        known: dotted keys that exist.
    """
    candidates = similar_keys(key, known)
    return f"did you mean {' or '.join(map(repr, candidates))}?" if candidates else ""


def similar_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the settings that `key` probably means; empty if none is similar.

    The first rule that finds a setting is used: settings that another library calls `key`; settings with the same last component; the most
    similar setting, if it is similar enough.

    Args:
        key: dotted key that does not exist.
        known: dotted keys that exist.
    """
    return (
        _from_alias(key, known)
        or [other for other in known if _last_component(other) == _last_component(key)]
        or _most_similar(key, known)
    )


def _from_alias(key: str, known: Sequence[str]) -> list[str]:
    name = key.lower().replace("-", "_")
    targets = ALIASES.get(name) or ALIASES.get(_last_component(name), ())
    if not any("." in other for other in known):  # the settings of a single group
        targets = tuple(map(_last_component, targets))
    return [target for target in targets if target.partition("=")[0] in known]


def _most_similar(key: str, known: Sequence[str]) -> list[str]:
    """Return the known key that is most similar to `key`, or [] if none is similar enough.

    If `key` has no dot, all known keys with the same last component as the most similar one are returned.
    """
    best, best_score = "", 0.0
    for other in known:
        by_key = difflib.SequenceMatcher(None, key, other).ratio()
        by_name = difflib.SequenceMatcher(None, _last_component(key), _last_component(other)).ratio()
        score = max(by_key - MIN_KEY_SIMILARITY, by_name - MIN_NAME_SIMILARITY)
        if score >= 0 and (not best or score > best_score):
            best, best_score = other, score
    if best and "." not in key:
        return [other for other in known if _last_component(other) == _last_component(best)]
    return [best] if best else []


def _last_component(key: str) -> str:
    return key.rpartition(".")[2]
