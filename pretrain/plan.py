"""Plan a pretraining run before you start it: parameters, memory per GPU, FLOPs, time and communication.

The command takes seconds and needs no GPU, text or vocabulary. Parameters and FLOPs are counts; all other figures are predictions.

Examples:
  python pretrain/plan.py --config configs/pretrain/xlnet_large_v2.yaml --gpus 8 --device h200
  python pretrain/plan.py --config configs/pretrain/xlnet_base.yaml --gpus 256 --device h100 --mfu 0.35 train.steps=500000

See docs/plan.md, which explains each figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.config.cli import SettingsParser
from xlpre.training.device_specs import DEVICES

COMMON = (
    "tokenizer.vocab_size",
    "data.seq_len",
    "model.n_layer",
    "model.d_model",
    "model.n_head",
    "model.mem_len",
    "optim.name",
    "train.steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.precision",
    "train.activation_checkpointing",
    "deepspeed",
)


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    parser = SettingsParser(PretrainConfig, __doc__, COMMON)
    parser.add_argument("--gpus", metavar="N", type=int, default=1, help="total number of devices (default: 1)")
    text = "number of machines (default: the fewest that hold all devices)"
    parser.add_argument("--nodes", metavar="N", type=int, help=text)
    text = f"type of device: {', '.join(DEVICES)} (default: h200)"
    parser.add_argument("--device", metavar="NAME", choices=DEVICES, default="h200", help=text)
    text = "expected model FLOPs utilization, as a fraction of the peak (default: 0.15)"
    parser.add_argument("--mfu", metavar="X", type=float, default=0.15, help=text)
    text = "number of window tokens to train on (default: those of train.steps)"
    parser.add_argument("--tokens", metavar="N", type=int, help=text)
    text = "peak TFLOP/s of the device (default: from its data sheet)"
    parser.add_argument("--peak", metavar="X", type=float, help=text)
    text = "memory of the device in GB (default: from its data sheet)"
    parser.add_argument("--memory", metavar="X", type=float, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    config, _, args = build_parser().parse_config(argv)
    for flag in ("gpus", "nodes", "tokens", "peak", "memory"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < math.inf:
            raise InputError(
                f"--{flag}={value:g} is invalid: it must be a positive number. Leave it out for the default."
            )
    device = DEVICES[args.device]
    if args.peak is not None:
        device = dataclasses.replace(device, flops=args.peak * 1e12)
    if args.memory is not None:
        device = dataclasses.replace(device, memory=args.memory * 1e9)
    nodes = args.nodes or math.ceil(args.gpus / device.per_node)

    from pretrain.planning.plan import Plan
    from pretrain.planning.plan_report import describe

    print(describe(Plan(config, device, args.gpus, nodes, args.mfu), args.device, args.tokens))


if __name__ == "__main__":
    run_main(main)
