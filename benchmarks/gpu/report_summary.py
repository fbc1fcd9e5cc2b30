"""Print a summary of a report that benchmarks/gpu/report.py wrote, one line per result.

python benchmarks/gpu/report_summary.py report.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def summarize(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the summary: for each part its status, its results, and its last output if it failed."""
    lines = (line for part in parts.values() for line in part.get("lines", []))
    peak_tflops = next((line["product_tflops"] for line in lines if "product_tflops" in line), None)
    for name, part in parts.items():
        if "skipped" in part:
            yield f"{name}: skipped, {part['skipped']}"
            continue
        status = part["status"] if isinstance(part["status"], str) else f"status {part['status']}"
        yield f"{name}: {status if part['status'] else 'done'}, {part.get('seconds', 0):.0f} s"
        yield from (f"    {format_line(line, peak_tflops)}" for line in part["lines"])
        if part["status"] != 0 or not part["lines"]:
            yield from (f"    | {text}" for text in part.get("output", [])[-6:])


def format_line(line: dict[str, Any], peak_tflops: float | None) -> str:
    """Return one line of text that summarizes a result.

    Args:
        line: the result: a JSON line that a part printed.
        peak_tflops: measured TFLOP/s of matrix products, or None if not measured.
    """
    if "failed" in line and isinstance(line["failed"], str):
        return f"{line.get('impl') or line.get('backend')}: FAILED, {line['failed'].strip().splitlines()[-1][:160]}"
    formats = {
        "fused_op": _format_fused_op,
        "impl": _format_step,
        "backend": _format_backend,
        "kernel": _format_tile,
        "phase": _format_pretraining,
    }
    for key, format_of_kind in formats.items():
        if key in line:
            return format_of_kind(line, peak_tflops)
    return ", ".join(f"{key} {value}" for key, value in line.items())


def _format_step(line: dict[str, Any], peak_tflops: float | None) -> str:
    text = f"{line['impl']}{', first turn' if 'first' in line else ''}, {line['config']['rows']} rows: loss {line['loss']}, "
    text += f"{line['wall_ms']} ms, {line['tokens_per_second']:,.0f} tokens/s, {_format_flops(line, peak_tflops)}, "
    text += f"first step {line['first_step_s']} s"
    if "step_mb" in line:
        text += f", peak memory {line['step_mb'] / 1024:.2f} GiB, activations {line['activation_mb']} MiB per row"
    return text + "".join(f", {ratio} x {name}" for name, ratio in line.get("times_as_fast_as", {}).items())


def _format_flops(line: dict[str, Any], peak_tflops: float | None) -> str:
    text = f"{line['tflops']} TFLOP/s"
    if line["mfu"] is not None:
        text += f", MFU {100 * line['mfu']:.1f} % of the stated peak"
    return text + (f" ({100 * line['tflops'] / peak_tflops:.1f} % of measured {peak_tflops})" if peak_tflops else "")


def _format_backend(line: dict[str, Any], peak_tflops: float | None) -> str:
    text = line["backend"]
    if "errors" in line:
        text += _format_errors(line)
    if "forward_ms" in line:
        text += f": forward {line['forward_ms']} ms, backward {line['backward_ms']} ms, {line['time_vs_bare']} x bare"
        text += f", {line['peak_mib']} MiB" if line["peak_mib"] is not None else ""
    return text


def _format_fused_op(line: dict[str, Any], peak_tflops: float | None) -> str:
    text = f"{line['fused_op']} by {line['contender']}"
    if "errors" in line:
        return text + _format_errors(line)
    text += f": forward {line['forward_ms']} ms ({line['forward_gb_s']:,} GB/s), backward {line['backward_ms']} ms "
    return text + f"({line['backward_gb_s']:,} GB/s), {line['time_vs_eager']} x eager"


def _format_errors(line: dict[str, Any]) -> str:
    text = f": {'agrees' if line['agrees'] else 'DOES NOT AGREE'}, error {_format_worst(line['errors'])}"
    if "errors_with_dropout" in line:
        text += f", with dropout {_format_worst(line['errors_with_dropout'])}"
    if "keep_fraction" in line:
        text += f", kept {line['keep_fraction']} ({line['keep_deviations']} deviations)"
    return text + (", reproducible" if line["reproducible"] else ", NOT REPRODUCIBLE")


def _format_worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda key: float("inf") if errors[key] != errors[key] else errors[key])
    return f"{errors[name]} ({name})"


def _format_tile(line: dict[str, Any], peak_tflops: float | None) -> str:
    speedup = (
        " (the current one)"
        if line["best"] == line["current"]
        else f", {line['current_ms'] / line['best_ms']:.2f} x as fast"
    )
    text = f"{line['kernel']}: {line['current']} {line['current_ms']} ms; best {line['best']} {line['best_ms']} ms{speedup}; "
    return text + f"{len(line['tiles'])} ran, {len(line['failed'])} failed; write {line['line']}"


def _format_pretraining(line: dict[str, Any], peak_tflops: float | None) -> str:
    text = f"{line['phase']}: steps {line['first_step']} to {line['last_step']}, loss {line['first_loss']} to {line['last_loss']}, "
    text += f"{line['tokens_per_second']:,} tokens/s, {_format_flops(line, peak_tflops)}, {line['wall_seconds']} s"
    if "val_loss" in line:
        text += f", validation loss {line['val_loss']}, {'passed' if line['passed'] else 'NOT PASSED'}"
    return text


if __name__ == "__main__":
    print("\n".join(summarize(json.loads(Path(sys.argv[1]).read_text("utf-8"))["parts"])))
