"""Replay the last step of a run that stopped because of non-finite gradients, and report the first non-finite value.

FOLDER is the folder that the run printed when it stopped. Each micro-batch is run forward and backward separately. The dropout masks
are the same as in the run if device and precision are the same.

Examples:
  python pretrain/replay.py runs/xlnet_base/nonfinite/step_00012345
  python pretrain/replay.py runs/xlnet_base/nonfinite/step_00012345 --precision fp32 --device cpu

See docs/reliability.md for what a run does when gradients are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.config.cli import CommandParser

AS_RUN = "as-run"


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="RUN_DIR/nonfinite/step_..., as printed by the run")
    choices = [AS_RUN, "fp32", "bf16", "fp16"]
    text = f"precision of the replay (default: {AS_RUN})"
    parser.add_argument("--precision", choices=choices, default=AS_RUN, help=text)
    parser.add_device_option()
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)

    from pretrain.tools.replay_report import print_replay

    print_replay(args.folder, None if args.precision == AS_RUN else args.precision, args.device)


if __name__ == "__main__":
    run_main(main)
