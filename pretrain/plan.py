"""Plan a pretraining before it runs: parameters, memory per GPU, FLOPs, time, communication.

python pretrain/plan.py --config configs/pretrain/xlnet_large_v2.yaml --gpus 8 --device h200
python pretrain/plan.py --config configs/pretrain/xlnet_base.yaml train.steps=500000 --gpus 1024 --device h100 --mfu 0.35

Parameters and FLOPs are counts; all other figures are predictions. docs/plan.md explains each figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from pretrain.config import PretrainConfig
from pretrain.planning.plan import Plan, describe
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.training.device_specs import DEVICES


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--gpus", type=int, default=1, help="total number of devices (default: 1)")
    parser.add_argument("--nodes", type=int, help="number of machines (default: the fewest that hold all devices)")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--mfu", type=float, default=0.4, help="expected model FLOPs utilization (default: 0.4)")
    parser.add_argument("--tokens", type=int, help="window tokens to train on (default: train.steps steps)")
    parser.add_argument("--peak", type=float, help="peak TFLOP/s of the device (default: from its data sheet)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of the file")
    args = parser.parse_intermixed_args(argv)
    for flag in ("gpus", "nodes", "tokens", "peak"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(
                f"--{flag}={value:g} is invalid: it must be a positive number. Leave it out for the default."
            )
    device = DEVICES[args.device]
    if args.peak is not None:
        device = dataclasses.replace(device, flops=args.peak * 1e12)
    nodes = args.nodes or math.ceil(args.gpus / device.per_node)
    config = load_config(PretrainConfig, args.config, args.overrides)
    print(describe(Plan(config, device, args.gpus, nodes, args.mfu), args.device, args.tokens))


if __name__ == "__main__":
    run_main(main)
