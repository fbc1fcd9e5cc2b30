"""Plan a pretraining before anything runs: parameters, memory a GPU, operations, time, communication.

python pretrain/plan.py --config configs/pretrain/xlnet_large_v2.yaml --gpus 8 --device h200
python pretrain/plan.py --config configs/pretrain/xlnet_base.yaml train.steps=500000 --gpus 1024 --device h100 --mfu 0.35

Counts are of the model itself; all else is a prediction. docs/plan.md says how each figure comes about.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from pretrain.config import PretrainConfig
from pretrain.planning.plan import USABLE, Plan
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.training.device_specs import DEVICES

SECONDS_A_DAY = 86_400
REACH = (1, 8, 64, 512, 1024, 4096, 8192)  # GPUs of the last table


def describe(plan: Plan, device: str, tokens: int | None) -> str:
    """The plan as text."""
    stage, micro = plan.choice
    config = plan.config
    head = [
        f"{config.name} on {plan.gpus:,} x {device} ({plan.nodes:,} node{'s' * (plan.nodes > 1)}), "
        f"{plan.precision}. Nothing was measured: counts are of the model, all else is a prediction."
    ]
    sections = [
        head,
        _parameters(plan),
        _memory(plan, stage, micro),
        _operations(plan, micro),
        _time(plan, stage, micro, tokens),
        _communication(plan, micro),
        _reach(plan, stage, micro),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _parameters(plan: Plan) -> list[str]:
    total = plan.n_parameters
    rows = [f"  {part:32}{n:>16,}{n / total:>8.1%}" for part, n in plan.parameters.items() if n]
    pieces = f"{plan.model.vocab_size:,} pieces, of tokenizer.vocab_size unless model.vocab_size is set"
    return [f"PARAMETERS (count; {pieces})", *rows, f"  {'all':32}{total:>16,}"]


def _memory(plan: Plan, stage: int, micro: int) -> list[str]:
    states = [plan.state(number) for number in range(4)]
    kept = plan.activations(micro)
    same = {
        "activations kept for backward": kept.kept,
        "logits kept for backward": kept.logits,
        "working space at the fullest moment": kept.working,
        f"recurrent memory of {plan.rows:,} rows": plan.recurrent_memory,
    }
    unit, name_of_unit = (1e9, "GB") if plan.n_parameters > 1e7 else (1e6, "MB")
    lines = [
        f"MEMORY OF A GPU in {name_of_unit} (prediction; train.micro_batch_size={micro}, {plan.rows // micro:,} micro-steps)",
        f"  {'ZeRO stage':36}" + "".join(f"{number:>10}" for number in range(4)),
    ]
    rows = {
        name: [getattr(state, name) for state in states] for name in ("weights", "gradients", "optimizer", "buffers")
    }
    rows |= {name: [n] * 4 for name, n in same.items()}
    if plan.config.optim.muon:
        rows["the update, in place of activations"] = [plan.updating(number) for number in range(4)]
    rows["all"] = [plan.bytes(number, micro) for number in range(4)]
    if any(plan.offloads.values()):
        rows["besides, in the memory of a node"] = [plan.host(number) for number in range(4)]
    lines += [f"  {name:36}" + "".join(f"{n / unit:>10.2f}" for n in row) for name, row in rows.items()]
    usable = f"fits {USABLE:.0%} of {plan.device.memory / 1e9:.0f} GB"
    answers = ["yes" if plan.fits(number, micro) else "no" for number in range(4)]
    lines.append(f"  {usable:36}" + "".join(f"{answer:>10}" for answer in answers))
    largest = [plan.largest(number) for number in range(4)]
    lines.append(f"  {'largest micro-batch that fits':36}" + "".join(f"{size or '-':>10}" for size in largest))
    if not plan.fits(stage, micro):
        return [*lines, "  Nothing fits: take more GPUs, a smaller model, a shorter window or memory."]
    configured = plan.config.train.micro_batch_size or plan.rows
    configured_size = f" (not train.micro_batch_size={configured}, as configured)" * (configured != micro)
    lines.append(f"  Take stage {stage} and train.micro_batch_size={micro}{configured_size}.")
    return [
        *lines,
        "  Stage 0 is for fp32, and what one process alone takes; training refuses it in bf16 and fp16."
        + " Stage 3 is not for optim.name=muon." * plan.config.optim.muon,
    ]


def _operations(plan: Plan, micro: int) -> list[str]:
    shape, tokens = plan.shape(micro), micro * plan.config.data.seq_len
    needed, executed = plan.operations(micro)
    lines = [
        f"OPERATIONS of matrix products, forward and backward, in MFLOP a window token (count; M {shape.mem_len}, P {shape.targets})",
        f"  {'':32}{'needed':>12}{'executed':>12}",
    ]
    lines += [
        f"  {part:32}{needed[part] / tokens / 1e6:>12,.1f}{executed[part] / tokens / 1e6:>12,.1f}"
        for part in needed
        if executed[part]
    ]
    sums = sum(needed.values()), sum(executed.values())
    lines.append(f"  {'all':32}" + "".join(f"{n / tokens / 1e6:>12,.1f}" for n in sums))
    steps = plan.config.train.global_batch_size / micro / 1e15
    lines.append(f"  {'an update, in PFLOP':32}" + "".join(f"{n * steps:>12,.3f}" for n in sums))
    return lines


def _time(plan: Plan, stage: int, micro: int, tokens: int | None) -> list[str]:
    train, rate, state = plan.config.train, plan.tokens_per_second(micro), plan.state(stage)
    optimizer = state.optimizer + (0 if stage else state.weights)  # which without ZeRO are updated themselves
    steps = plan.steps(tokens) if tokens else train.steps
    in_all = plan.tokens(steps)
    updating = (2 + 1 / 3) * optimizer / plan.device.bandwidth  # reads and writes its share, reads as many gradients
    lines = [
        f"TIME at {plan.mfu:.0%} MFU of {plan.device.flops / 1e12:,g} TFLOP/s (prediction: the MFU is what you said, not what was seen)",
        f"  {'window tokens a second':32}{rate:>16,.0f}",
        f"  {'seconds an update':32}{plan.tokens_per_step / rate:>16,.3f}",
        f"  {'of it, optimizer at least':32}{updating:>16,.4f}"
        if optimizer
        else "  the update runs on the CPU, and is not counted",
        f"  {f'days for {steps:,} updates':32}{in_all / rate / SECONDS_A_DAY:>16,.2f}",
        f"  {'window tokens in all':32}{in_all:>16,}",
        f"  {'tokens of text read':32}{plan.total_rows(steps) * plan.config.data.reuse_len:>16,}",
    ]
    if train.hours and not tokens:
        within = plan.steps(train.hours * 3600 * rate + 1) - 1  # whole ones
        lines.append(f"  {f'updates in train.hours={train.hours:g}':32}{min(within, steps):>16,}")
    return lines


def _communication(plan: Plan, micro: int) -> list[str]:
    compute = plan.tokens_per_step / plan.tokens_per_second(micro)
    over = f"{plan.nodes:,} nodes" if plan.nodes > 1 else "the links of a node"
    speed = plan.slowest_link / 1e9
    lines = [
        f"COMMUNICATION of a GPU and an update over {over}, {speed:,.1f} GB/s (prediction; latency left out)",
        f"  {'ZeRO stage':16}{'GB sent':>12}{'seconds':>12}{'of the update, if none is hidden':>36}",
    ]
    for stage in range(4):
        sent, seconds = plan.communication(stage, micro)
        lines.append(f"  {stage:<16}{sent / 1e9:>12.2f}{seconds:>12.3f}{seconds / (seconds + compute):>36.1%}")
    return lines


def _reach(plan: Plan, stage: int, micro: int) -> list[str]:
    lines = [
        f"REACH on paper with the same train.global_batch_size (prediction: {plan.mfu:.0%} MFU, communication all hidden or not)",
        f"  {'GPUs':>8}{'stage':>8}{'rows each':>12}{'micro-batch':>12}{'k tokens/s hidden':>20}{'not hidden':>14}{'days':>18}{'fits':>6}",
    ]
    for gpus in sorted({plan.gpus, *REACH}):
        nodes = math.ceil(gpus / plan.device.per_node)
        try:
            there = dataclasses.replace(plan, gpus=gpus, nodes=nodes if gpus % nodes == 0 else 1)
        except ValueError:  # so many cannot share the rows
            continue
        size = math.gcd(micro, there.rows)
        taken = there.stage if stage == plan.stage else stage  # a lone process may take another than several
        hidden = there.tokens_per_second(size)
        compute, sent = plan.tokens_per_step / hidden, there.communication(taken, size)[1]
        answer = "yes" if there.bytes(taken, size) <= plan.usable else "no"
        rates = plan.tokens_per_step / max(compute, sent), plan.tokens_per_step / (compute + sent)
        days = [plan.tokens(plan.config.train.steps) / rate / SECONDS_A_DAY for rate in rates]
        lines.append(
            f"  {gpus:>8,}{taken:>8}{there.rows:>12,}{size:>12}{rates[0] / 1e3:>20,.0f}{rates[1] / 1e3:>14,.0f}"
            f"{f'{days[0]:.2f} - {days[1]:.2f}':>18}{answer:>6}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--gpus", type=int, default=1, help="devices in all")
    parser.add_argument("--nodes", type=int, help="machines that they are in (default: as few as hold them)")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--mfu", type=float, default=0.4, help="the share of the peak that you expect")
    parser.add_argument("--tokens", type=int, help="window tokens to train on, in place of train.steps")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, in place of its maker's figure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    words = parser.parse_intermixed_args(argv)
    for flag in ("gpus", "nodes", "tokens", "peak"):
        value = getattr(words, flag)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{flag} ({value:g}) must be a positive number; leave it out for what is usual")
    device = DEVICES[words.device]
    if words.peak is not None:
        device = dataclasses.replace(device, flops=words.peak * 1e12)
    nodes = words.nodes or math.ceil(words.gpus / device.per_node)
    config = load_config(PretrainConfig, words.config, words.overrides)
    print(describe(Plan(config, device, words.gpus, nodes, words.mfu), words.device, words.tokens))


if __name__ == "__main__":
    run_main(main)
