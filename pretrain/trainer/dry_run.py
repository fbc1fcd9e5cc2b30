"""What a pretraining would be: its settings, its size, where it would start. Nothing is trained and nothing written."""

from __future__ import annotations

import torch

from pretrain.config import PretrainConfig
from pretrain.planning.flops import batch_shape, parameters
from pretrain.trainer.evaluator import val_lanes
from pretrain.trainer.inputs import RunInputs, checkpoints_of, is_finished
from pretrain.trainer.samples import Samples
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import to_yaml
from xlpre.training import checkpoint
from xlpre.training.deepspeed_engine import resolve_precision
from xlpre.training.deepspeed_overrides import zero_stage
from xlpre.training.distributed import device_type, is_rank_zero, world_size
from xlpre.training.metrics import check_wandb_installed


def dry_run(config: PretrainConfig, given: ExplicitKeys) -> None:
    """Print the settings as YAML, all else as its comments.

    Raises:
        ValueError: what a start would refuse, as far as one process alone can tell; settings of DeepSpeed's own are not read.
    """
    check_wandb_installed(config.train.wandb)
    foundation = RunInputs(config, given)
    val_lanes(config, foundation.store)
    Samples(config, foundation.store, foundation.tokenizer)
    config.train.batch_schedule(world_size())
    start, about = foundation.start, foundation.start.about
    folder, over = checkpoints_of(config), is_finished(config, given)
    saved = checkpoint.list_complete(folder)[-1] if over else checkpoint.latest_valid(folder)
    if saved:
        step = foundation.facts_of(saved)["step"]
        about = f"finished already at step {step:,}" if over else f"goes on from {saved} at step {step:,}"
    if is_rank_zero():
        sizes = _sizes(start.resolved(), len(foundation.store.train))
        print(to_yaml(start.resolved()) + sizes + _processes(config) + f"# {about}", flush=True)


def _sizes(config: PretrainConfig, text_tokens: int) -> str:
    train, data = config.train, config.data
    shape = batch_shape(config, train.global_batch_size)
    read = train.batch_schedule(world_size()).total_rows(train.steps) * data.reuse_len
    within = f", or what {train.hours:g} hours allow" if train.hours else ""
    return (
        f"# {sum(parameters(config.model, shape.two_streams, shape.next_sentence).values()):,} parameters\n"
        f"# an update: {shape.rows:,} rows, {shape.rows * shape.window:,} window tokens, {shape.rows * shape.targets:,} targets\n"
        f"# {train.steps:,} updates{within}: {read:,} tokens of text read, {read / text_tokens:.2f} times the training text\n"
    )


def _processes(config: PretrainConfig) -> str:
    """What they compute on and in, as far as this machine, which need not be the one that trains, can tell."""
    kind, wanted = device_type(), config.train.precision
    precision = resolve_precision(torch.device(kind), wanted) if wanted == "auto" else wanted
    stage = zero_stage(config.deepspeed, precision, world_size())
    return f"# here {world_size()} process(es) on {kind}, {precision}, ZeRO stage {stage}\n"
