"""Description of a plan as text, by section."""

from __future__ import annotations

import dataclasses
import math

from pretrain.planning.plan import SECONDS_PER_DAY, STAGES, USABLE_FRACTION, Plan
from xlpre.common.errors import InputError
from xlpre.common.messages import as_yaml, counted
from xlpre.model.kernels.backend import HAS_TRITON
from xlpre.training.metrics_writer import format_duration

GPU_COUNTS = (1, 8, 64, 512, 1024, 4096, 8192)  # numbers of GPUs in the scaling table


def describe(plan: Plan, device: str, n_tokens: int | None) -> str:
    """Return a plan as text.

    Args:
        plan: the plan.
        device: name of the device.
        n_tokens: window tokens to train on; None: `train.steps` steps.
    """
    stage, micro_batch_size = plan.recommendation
    n_steps = plan.steps_for(n_tokens) if n_tokens else plan.config.train.steps
    head = [
        f"{plan.config.name} on {plan.gpus:,} x {device} ({counted(plan.nodes, 'node')}), "
        f"{plan.precision}. Nothing is measured: parameters and FLOPs are counts, all other figures are predictions."
    ]
    sections = [
        head,
        _describe_parameters(plan),
        _describe_checkpoint(plan),
        _describe_memory(plan, stage, micro_batch_size),
        _describe_flops(plan, micro_batch_size),
        _describe_time(plan, stage, micro_batch_size, n_steps),
        _describe_communication(plan, micro_batch_size),
        _describe_scaling(plan, stage, micro_batch_size, n_steps),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _describe_parameters(plan: Plan) -> list[str]:
    total = plan.n_parameters
    rows = [f"  {part:32}{n:>16,}{n / total:>8.1%}" for part, n in plan.parameters.items() if n]
    vocabulary = f"vocabulary of {plan.model.vocab_size:,}: model.vocab_size, or else tokenizer.vocab_size"
    return [f"PARAMETERS (count; {vocabulary})", *rows, f"  {'total':32}{total:>16,}"]


def _describe_checkpoint(plan: Plan) -> list[str]:
    parts, train = plan.checkpoint_parts, plan.config.train
    unit, unit_name = (1e9, "GB") if sum(parts.values()) > 1e9 else (1e6, "MB")
    rows = {**parts, "total": sum(parts.values()), "on disk while one is written, at most": plan.checkpoints_on_disk}
    return [
        f"CHECKPOINT in {unit_name} (count; train.save_memory={train.save_memory}, train.keep_last_checkpoints="
        f"{train.keep_last_checkpoints})",
        *(f"  {part:40}{size / unit:>16,.2f}" for part, size in rows.items()),
    ]


def _describe_memory(plan: Plan, stage: int, micro_batch_size: int) -> list[str]:
    by_stage = [plan.zero_memory(s) for s in STAGES]
    activations = plan.activation_memory(micro_batch_size)
    same_in_all_stages = {
        "activations saved for backward": activations.saved,
        "logits saved for backward": activations.logits,
        "workspace at the peak": activations.workspace,
        f"recurrent memory of {plan.rows_per_gpu:,} rows": plan.recurrent_memory,
    }
    unit, unit_name = (1e9, "GB") if plan.n_parameters > 1e7 else (1e6, "MB")
    micro_steps = plan.rows_per_gpu // micro_batch_size
    lines = [
        f"MEMORY PER GPU in {unit_name} (prediction; train.micro_batch_size={micro_batch_size}, {counted(micro_steps, 'micro-step')})",
        f"  {'ZeRO stage':36}" + "".join(f"{s:>10}" for s in STAGES),
    ]
    rows: dict[str, list[float]] = {
        name: [getattr(memory, name) for memory in by_stage]
        for name in ("weights", "gradients", "optimizer", "buffers")
    }
    rows |= {name: [n] * 4 for name, n in same_in_all_stages.items()}
    if any(copies := [plan.graph_memory(s, micro_batch_size) for s in STAGES]):
        rows["copies for CUDA graphs"] = [float(n) for n in copies]
    if plan.config.optim.muon:
        instead_of = "" if plan.uses_cuda_graphs(stage) else ", instead of activations"
        rows[f"Muon's update{instead_of}"] = [plan.muon_workspace(s) for s in STAGES]
    rows["peak"] = [plan.peak_memory(s, micro_batch_size) for s in STAGES]
    if any(plan.offloads.values()):
        rows["host memory per node"] = [plan.host_memory(s) for s in STAGES]
    lines += [f"  {name:36}" + "".join(f"{n / unit:>10.2f}" for n in row) for name, row in rows.items()]
    usable = f"fits {USABLE_FRACTION:.0%} of {plan.device.memory / 1e9:.0f} GB"
    lines.append(f"  {usable:36}" + "".join(f"{'yes' if plan.fits(s, micro_batch_size) else 'no':>10}" for s in STAGES))
    largest = [plan.largest_micro_batch(s) for s in STAGES]
    lines.append(f"  {'largest micro-batch that fits':36}" + "".join(f"{size or '-':>10}" for size in largest))
    if not plan.fits(stage, micro_batch_size):
        return [*lines, "  Nothing fits: use more GPUs, a smaller model, or a shorter data.seq_len or model.mem_len."]
    configured = plan.config.train.micro_batch_size
    instead = f" (configured: train.micro_batch_size={as_yaml(configured)})" * (
        (configured or plan.rows_per_gpu) != micro_batch_size
    )
    if configured and plan.rows_per_gpu % configured:
        lines.append(
            f"  train.micro_batch_size={configured} is invalid: it must divide the {plan.rows_per_gpu} rows of a GPU."
        )
    backend, configured_backend = plan.model.attention_backend, plan.config.model.attention_backend
    if backend != configured_backend:
        reason = "" if HAS_TRITON else "; with the package triton it would be `triton`, which needs less"
        lines.append(f"  model.attention_backend={configured_backend} is {backend} on this device{reason}.")
    return [
        *lines,
        f"  Recommended: ZeRO stage {stage}, train.micro_batch_size={micro_batch_size}{instead}.",
        "  Stage 0 is the default of a single process in fp32; training refuses it in bf16 and fp16."
        + " Stage 3 does not support optim.name=muon." * plan.config.optim.muon,
    ]


def _describe_flops(plan: Plan, micro_batch_size: int) -> list[str]:
    shape, n_tokens = plan.batch_shape(micro_batch_size), micro_batch_size * plan.config.data.seq_len
    of_model, hardware = plan.flops(micro_batch_size)
    lines = [
        f"FLOPS of matrix products, forward and backward, in MFLOP per window token (count; {shape.mem_len:,} memory columns and "
        f"{counted(shape.n_targets, 'target')} per row)",
        f"  {'':32}{'model':>12}{'hardware':>12}",
    ]
    lines += [
        f"  {part:32}{of_model[part] / n_tokens / 1e6:>12,.1f}{hardware[part] / n_tokens / 1e6:>12,.1f}"
        for part in of_model
        if hardware[part]
    ]
    sums = sum(of_model.values()), sum(hardware.values())
    lines.append(f"  {'total':32}" + "".join(f"{n / n_tokens / 1e6:>12,.1f}" for n in sums))
    per_step = [n * plan.config.train.global_batch_size / micro_batch_size for n in sums]
    name, unit = ("PFLOP", 1e15) if per_step[0] > 1e13 else ("GFLOP", 1e9)
    lines.append(f"  {f'{name} per step':32}" + "".join(f"{n / unit:>12,.3f}" for n in per_step))
    return lines


def _describe_time(plan: Plan, stage: int, micro_batch_size: int, n_steps: int) -> list[str]:
    train, data = plan.config.train, plan.config.data
    rate, memory = plan.tokens_per_second(micro_batch_size), plan.zero_memory(stage)
    optimizer = memory.optimizer + (0 if stage else memory.weights)  # stage 0 in fp32 updates the weights themselves
    total_tokens = plan.total_tokens(n_steps)
    # the update reads and writes three fp32 numbers per parameter (weight and moments), and reads one gradient
    update_seconds = (2 + 1 / 3) * optimizer / plan.device.bandwidth
    lines = [
        f"TIME at {plan.mfu:.0%} MFU of {plan.device.flops / 1e12:,g} TFLOP/s (prediction; the MFU is your assumption)",
        f"  {'window tokens per second':32}{rate:>16,.0f}",
        f"  {'seconds per step':32}{plan.tokens_per_step / rate:>16,.3f}",
        f"  {'part of the optimizer, at least':32}{update_seconds:>16,.4f}"
        if optimizer
        else "  the optimizer runs on the CPU and is not counted",
        f"  {f'time for {n_steps:,} steps':32}{format_duration(total_tokens / rate):>16}",
        f"  {'GPU-hours':32}{plan.gpus * total_tokens / rate / 3600:>16,.1f}",
        f"  {'window tokens in total':32}{total_tokens:>16,}",
        f"  {'text tokens in total':32}{plan.total_rows(n_steps) * data.reuse_len:>16,}",
    ]
    if train.hours and n_steps == train.steps:
        complete_steps = plan.steps_for(train.hours * 3600 * rate + 1) - 1
        lines.append(f"  {f'steps in train.hours={train.hours:g}':32}{min(complete_steps, n_steps):>16,}")
    return [
        *lines,
        f"  A window has data.seq_len={data.seq_len:,} tokens, of which data.reuse_len={data.reuse_len:,} are new text.",
    ]


def _describe_communication(plan: Plan, micro_batch_size: int) -> list[str]:
    if plan.gpus == 1:
        return ["COMMUNICATION (prediction): none, because there is a single GPU"]
    compute_seconds = plan.tokens_per_step / plan.tokens_per_second(micro_batch_size)
    network = f"{plan.nodes:,} nodes" if plan.nodes > 1 else "the links of a node"
    lines = [
        f"COMMUNICATION per GPU and step over {network}, {plan.link_bandwidth / 1e9:,.1f} GB/s (prediction; without latency)",
        f"  {'ZeRO stage':16}{'GB sent':>12}{'seconds':>12}{'share of a step without overlap':>36}",
    ]
    for stage in STAGES:
        sent, seconds = plan.communication(stage, micro_batch_size)
        fraction = seconds / (seconds + compute_seconds)
        lines.append(f"  {stage:<16}{sent / 1e9:>12.2f}{seconds:>12.3f}{fraction:>36.1%}")
    return lines


def _describe_scaling(plan: Plan, stage: int, micro_batch_size: int, n_steps: int) -> list[str]:
    """Describe the same pretraining on other numbers of GPUs, once with all communication overlapped by computation and once with none."""
    lines = [
        f"SCALING with the same train.global_batch_size (prediction; {plan.mfu:.0%} MFU, communication overlapped or not)",
        f"  {'GPUs':>8}{'stage':>8}{'rows each':>12}{'micro-batch':>12}{'k window tokens/s':>24}{'not overlapped':>16}"
        f"{'days':>18}{'fits':>6}",
    ]
    has_full_nodes = plan.nodes == math.ceil(plan.gpus / plan.device.per_node)
    per_node = plan.device.per_node if has_full_nodes else plan.gpus // plan.nodes
    for gpus in sorted({plan.gpus, *GPU_COUNTS}):
        nodes = next(n for n in range(math.ceil(gpus / per_node), gpus + 1) if gpus % n == 0)
        try:
            scaled = dataclasses.replace(plan, gpus=gpus, nodes=nodes)
        except InputError:  # this number of GPUs cannot share the batch
            continue
        size = math.gcd(micro_batch_size, scaled.rows_per_gpu)
        # a single process may have another default stage than several
        scaled_stage = scaled.configured_stage if stage == plan.configured_stage else stage
        compute = plan.tokens_per_step / scaled.tokens_per_second(size)
        communication = scaled.communication(scaled_stage, size)[1]
        rates = (
            plan.tokens_per_step / max(compute, communication),
            plan.tokens_per_step / (compute + communication),
        )
        days = [plan.total_tokens(n_steps) / rate / SECONDS_PER_DAY for rate in rates]
        fits = "yes" if scaled.fits(scaled_stage, size) else "no"
        lines.append(
            f"  {gpus:>8,}{scaled_stage:>8}{scaled.rows_per_gpu:>12,}{size:>12}{rates[0] / 1e3:>24,.0f}{rates[1] / 1e3:>16,.0f}"
            f"{f'{days[0]:.2f} - {days[1]:.2f}':>18}{fits:>6}"
        )
    return lines
