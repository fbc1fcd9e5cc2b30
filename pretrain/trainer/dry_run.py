"""Dry run: print the resolved settings, the size of a run and where it starts or resumes, without training or writing."""

from __future__ import annotations

import torch

from pretrain.config import PretrainConfig
from pretrain.planning.flops import batch_shape, count_parameters
from pretrain.trainer.config_warnings import backward_text_warning, long_warmup_warning
from pretrain.trainer.evaluator import read_minimal_pairs, val_lanes
from pretrain.trainer.inputs import RunInputs, checkpoints_dir, is_finished
from pretrain.trainer.samples import Samples
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import to_yaml
from xlpre.training import checkpoint
from xlpre.training.deepspeed_engine import resolve_precision
from xlpre.training.deepspeed_overrides import zero_stage
from xlpre.training.distributed import device_type, is_rank_zero, world_size
from xlpre.training.metrics_writer import check_wandb_installed


def open_inputs(config: PretrainConfig, explicit_keys: ExplicitKeys) -> RunInputs:
    """Open all inputs of a run, and check also those of its evaluations.

    Raises:
        InputError: the run could not start.
    """
    check_wandb_installed(config.train.wandb)
    inputs = RunInputs(config, explicit_keys)
    val_lanes(config, inputs.store)
    Samples(config, inputs.store, inputs.tokenizer)
    read_minimal_pairs(config.eval, inputs.tokenizer)
    return inputs


def dry_run(config: PretrainConfig, explicit_keys: ExplicitKeys) -> None:
    """Print the settings as YAML, with all other information in comments.

    Raises:
        InputError: the run could not start. Only what a single process can check is checked, without the settings of DeepSpeed.
    """
    inputs = open_inputs(config, explicit_keys)
    config.train.batch_schedule(world_size())
    start = inputs.weight_init.description
    folder, finished = checkpoints_dir(config), is_finished(config, explicit_keys)
    saved = checkpoint.list_complete(folder)[-1] if finished else checkpoint.find_latest_valid(folder)
    if saved:
        step = inputs.read_manifest(saved)["step"]
        start = f"already finished at step {step:,}" if finished else f"resumes from {saved} at step {step:,}"
    if is_rank_zero():
        resolved = inputs.weight_init.resolve_config()
        sizes = _describe_sizes(resolved, len(inputs.store.train))
        notes = [*inputs.notes, backward_text_warning(config), long_warmup_warning(config)]
        lines = "".join(f"# {note}\n" for note in notes if note)
        print(f"{to_yaml(resolved)}{sizes}{_describe_processes(config)}{lines}# {start}", flush=True)


def _describe_sizes(config: PretrainConfig, n_text_tokens: int) -> str:
    train, data = config.train, config.data
    shape = batch_shape(config, train.global_batch_size)
    n_read = train.batch_schedule(world_size()).total_rows(train.steps) * data.reuse_len
    limit = f", at most {train.hours:g} hours" if train.hours else ""
    return (
        f"# {sum(count_parameters(config.model, shape.next_sentence).values()):,} parameters\n"
        f"# a step: {shape.rows:,} windows of {shape.seq_len:,} tokens, of which {data.reuse_len:,} are new text; "
        f"{shape.rows * shape.n_targets:,} targets\n"
        f"# {train.steps:,} steps{limit}: {n_read:,} text tokens, {n_read / n_text_tokens:.2f} times the training text\n"
    )


def _describe_processes(config: PretrainConfig) -> str:
    """Describe device, precision, ZeRO stage and batch on this machine, which need not be the one that trains."""
    device, configured = device_type(), config.train.precision
    precision = resolve_precision(torch.device(device), configured) if configured == "auto" else configured
    stage = zero_stage(config.deepspeed, precision, world_size())
    batch = config.train.batch_schedule(world_size())
    return f"# here: {batch}; {device}, {precision}, ZeRO stage {stage}\n"
