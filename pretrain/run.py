"""Pretrain.

deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml
deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml name=no_memory model.mem_len=0 data.store_dir=stores/quickstart
deepspeed pretrain/run.py --config configs/pretrain/quickstart.yaml --dry-run

Stopped at any time, the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import os

from pretrain.config import PretrainConfig
from pretrain.trainer.dry_run import dry_run
from pretrain.trainer.inputs import finished, is_finished
from pretrain.trainer.loop import pretrain
from xlpre.common.cli_main import run_main
from xlpre.config.cli import parse_config_and_flags, read_explicit_keys
from xlpre.training.distributed import is_rank_zero, destroy_process_group

FLAGS = {"dry-run": "print what the run would be, and write nothing"}


def main() -> None:
    """The command."""
    config, flags = parse_config_and_flags(PretrainConfig, __doc__ or "", FLAGS)
    given = read_explicit_keys(FLAGS)
    _warn_of_restarts()
    if "dry-run" in flags:
        dry_run(config, given)
    elif not is_finished(config, given):
        pretrain(config, given)
        destroy_process_group()
    elif is_rank_zero():
        print(f"{finished(config)}; raise train.steps (and train.hours) to go on, or give the run another name")


def _warn_of_restarts() -> None:
    """Say so if torchrun shares its store with the training: what restarts then reads the addresses of the dead (torch 2.13)."""
    said = os.environ.get
    if (
        is_rank_zero()
        and said("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and said("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        print(
            "warning: torchrun's --max-restarts will not work; start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            "environment (docs/clusters.md)",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
