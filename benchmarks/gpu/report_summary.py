"""A report of gpu.py, line by line, for a person; also of a file: python benchmarks/gpu/report_summary.py report.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def summary(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Every part, and what its lines say."""
    lines = (line for part in parts.values() for line in part.get("lines", []))
    ceiling = next((line["product_tflops"] for line in lines if "product_tflops" in line), None)
    for name, part in parts.items():
        if "left_out" in part:
            yield f"{name}: left out, {part['left_out']}"
            continue
        status = part["status"] if isinstance(part["status"], str) else f"status {part['status']}"
        yield f"{name}: {status if part['status'] else 'done'}, {part.get('seconds', 0):.0f} s"
        yield from (f"    {said(line, ceiling)}" for line in part["lines"])
        if part["status"] != 0 or not part["lines"]:
            yield from (f"    | {text}" for text in part.get("said", [])[-6:])


def said(line: dict[str, Any], ceiling: float | None) -> str:
    """One line of a part."""
    if "failed" in line and isinstance(line["failed"], str):
        return f"{line.get('impl') or line.get('backend')}: FAILED, {line['failed'].strip().splitlines()[-1][:160]}"
    for key, words in {
        "fused_op": _fused_op,
        "impl": _step,
        "backend": _backend,
        "kernel": _tile,
        "what": _pretraining,
    }.items():
        if key in line:
            return words(line, ceiling)
    return ", ".join(f"{key} {value}" for key, value in line.items())


def _step(line: dict[str, Any], ceiling: float | None) -> str:
    rows = line["config"]["rows"]
    text = line["impl"] + (", the first turn" if "first" in line else "")
    text += f", {rows} rows: loss {line['loss']}, {line['wall_ms']} ms, {line['tokens_per_second']:,.0f} tokens/s, "
    text += _share(line, ceiling) + f", first step {line['first_step_s']} s"
    if "step_mb" in line:
        text += f", peak of a step {line['step_mb'] / 1024:.2f} GiB, activations {line.get('activation_mb')} MiB a row"
    ratios = line.get("times_as_fast_as", {})
    return text + "".join(f", {ratio} x {name}" for name, ratio in ratios.items())


def _share(line: dict[str, Any], ceiling: float | None) -> str:
    text = f"{line['tflops']} TFLOP/s"
    if line["mfu"] is not None:
        text += f", MFU {100 * line['mfu']:.1f} % of the maker's peak"
    return text + (f" ({100 * line['tflops'] / ceiling:.1f} % of the {ceiling} measured)" if ceiling else "")


def _backend(line: dict[str, Any], ceiling: float | None) -> str:
    text = line["backend"]
    if "errors" in line:
        text += _numbers(line)
    if "forward_ms" in line:
        text += f": {line['forward_ms']} ms forward, {line['backward_ms']} backward, {line['time_vs_bare']} x bare"
        text += f", {line['peak_mib']} MiB" if line["mb"] is not None else ""
    return text


def _fused_op(line: dict[str, Any], ceiling: float | None) -> str:
    text = f"{line['fused_op']} by {line['contender']}"
    if "errors" in line:
        return text + _numbers(line)
    text += f": {line['forward_ms']} ms forward ({line['forward_gb_s']:,} GB/s), {line['backward_ms']} backward "
    return text + f"({line['backward_gb_s']:,} GB/s), {line['time_vs_eager']} x eager"


def _numbers(line: dict[str, Any]) -> str:
    text = f": {'agrees' if line['agrees'] else 'DOES NOT AGREE'}, off by {_worst(line['errors'])}"
    text += f", with dropout {_worst(line['errors_with_dropout'])}" if "errors_with_dropout" in line else ""
    text += f", kept {line['keep_fraction']} ({line['keep_deviations']} deviations)" if "keep_fraction" in line else ""
    return text + (", same bits twice" if line["reproducible"] else ", other bits each time")


def _worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda key: float("inf") if errors[key] != errors[key] else errors[key])
    return f"{errors[name]} ({name})"


def _tile(line: dict[str, Any], ceiling: float | None) -> str:
    kept = (
        " (as it stands)"
        if line["best"] == line["current"]
        else f", {line['current_ms'] / line['best_ms']:.2f} x as fast"
    )
    text = (
        f"{line['kernel']}: {line['current']} {line['current_ms']} ms; best {line['best']} {line['best_ms']} ms{kept}; "
    )
    return text + f"{len(line['tiles'])} ran, {len(line['failed'])} failed; write {line['line']}"


def _pretraining(line: dict[str, Any], ceiling: float | None) -> str:
    text = f"{line['what']}: steps {line['first_step']} to {line['last_step']}, loss {line['first_loss']} to {line['last_loss']}, "
    text += f"{line['tokens_per_second']:,} tokens/s, {_share(line, ceiling)}, {line['wall_seconds']} s"
    if "val_loss" in line:
        text += f", held out {line['val_loss']}, {'passed' if line['passed'] else 'NOT PASSED'}"
    return text


if __name__ == "__main__":
    print("\n".join(summary(json.loads(Path(sys.argv[1]).read_text("utf-8"))["parts"])))
