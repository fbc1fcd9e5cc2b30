"""Pretrain a model.

deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml
deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml name=no_memory model.mem_len=0 data.store_dir=stores/quickstart
deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml --dry-run

The same command resumes a stopped run from its latest checkpoint.
"""

from __future__ import annotations

import os

from pretrain.config import PretrainConfig
from pretrain.trainer.dry_run import dry_run
from pretrain.trainer.inputs import describe_finished, is_finished
from pretrain.trainer.trainer import Trainer
from xlpre.common.cli_main import run_main
from xlpre.config.cli import ExplicitKeys, parse_config_and_flags, read_explicit_keys
from xlpre.training.distributed import destroy_process_group, is_rank_zero

FLAGS = {"dry-run": "print the settings, the size and the start of the run, and write nothing"}


def main() -> None:
    """Run the command."""
    config, flags = parse_config_and_flags(PretrainConfig, __doc__ or "", FLAGS)
    explicit_keys = read_explicit_keys(FLAGS)
    _check_has_preset(explicit_keys)
    _warn_about_restarts()
    if "dry-run" in flags:
        dry_run(config, explicit_keys)
    elif not is_finished(config, explicit_keys):
        Trainer(config, explicit_keys).train()
        destroy_process_group()
    elif is_rank_zero():
        print(
            f"{describe_finished(config)}. To train longer, raise train.steps (and train.hours); or set another name."
        )


def _check_has_preset(explicit_keys: ExplicitKeys) -> None:
    """Raise ValueError if neither a config file nor the length of the run is set: the defaults are not a tested preset."""
    if not explicit_keys.file and "train.steps" not in explicit_keys.args:
        raise ValueError(
            "--config is missing: the defaults of the single settings are not a preset. Pass one, such as "
            "`--config configs/pretrain/quickstart.yaml` or `--config configs/pretrain/xlnet_base.yaml`, or set train.steps."
        )


def _warn_about_restarts() -> None:
    """Print a warning if torchrun shares its store with the training: restarted processes read stale addresses (torch 2.13)."""
    variable = os.environ.get
    if (
        is_rank_zero()
        and variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and variable("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        print(
            "warning: torchrun's --max-restarts will not work. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of "
            "torchrun (docs/distributed.md).",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
