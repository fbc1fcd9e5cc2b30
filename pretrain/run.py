"""Pretrain a model on a token store, which pretrain/prepare.py makes.

The run writes metrics, checkpoints and the model into runs/NAME. The same command resumes a stopped run from its latest checkpoint.
`deepspeed` and `torchrun` start one process per GPU; `python` starts a single process.

Examples:
  deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml
  deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml name=mine
  python pretrain/run.py --config configs/pretrain/quickstart.yaml name=no_memory data.store_dir=stores/quickstart model.mem_len=0
  python pretrain/run.py --config configs/pretrain/xlnet_base.yaml --dry-run

See docs/configuration.md for all settings, docs/distributed.md for many GPUs and machines, and docs/small_data.md for what to expect.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from pretrain.config import PretrainConfig
from pretrain.trainer.config_warnings import check_has_preset
from xlpre.common.cli_main import run_main
from xlpre.common.launcher import read_launcher
from xlpre.config.cli import SettingsParser

COMMON = (
    "name",
    "init_from",
    "data.store_dir",
    "data.seq_len",
    "objective.name",
    "model.n_layer",
    "model.d_model",
    "model.n_head",
    "model.mem_len",
    "optim.lr",
    "schedule.warmup_steps",
    "train.steps",
    "train.hours",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.precision",
    "eval.every",
)


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    parser = SettingsParser(PretrainConfig, __doc__, COMMON)
    text = "print the settings, the size of the run and where it starts or resumes; train nothing and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    read_launcher()
    config, explicit_keys, args = build_parser().parse_config(argv)
    check_has_preset(explicit_keys)

    from pretrain.trainer.dry_run import dry_run
    from pretrain.trainer.inputs import describe_finished, is_finished
    from pretrain.trainer.trainer import Trainer
    from xlpre.training.distributed import destroy_process_group, is_rank_zero, world_size
    from xlpre.training.startup import join_processes

    if is_rank_zero():
        _warn_about_restarts()
    if args.dry_run:
        dry_run(config, explicit_keys)
        return
    join = partial(join_processes, config.train) if world_size() > 1 else None
    if not is_finished(config, explicit_keys, join):
        Trainer(config, explicit_keys).train()
    elif is_rank_zero():
        print(
            f"{describe_finished(config)}. To train longer, raise train.steps (and train.hours); or set another name."
        )
    destroy_process_group()


def _warn_about_restarts() -> None:
    """Print a warning if torchrun shares its store with the training: restarted processes then read stale addresses (torch 2.13)."""
    variable = os.environ.get
    if variable("TORCHELASTIC_USE_AGENT_STORE") == "True" and variable("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        print(
            "warning: torchrun's --max-restarts will not work, because restarted processes read the addresses of the "
            "stopped ones. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of "
            "torchrun (docs/distributed.md).",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
