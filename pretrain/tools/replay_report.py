"""Replay of the step at which a run stopped because of non-finite gradients, as text."""

from __future__ import annotations

from pathlib import Path

from pretrain.tools.nonfinite_replay import NonFiniteSite, ReplayResult, format_rows, is_finite, replay
from pretrain.trainer.nonfinite_dump import read_dump
from xlpre.batch import Batch
from xlpre.common.messages import counted
from xlpre.model.memory import Memory
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.deepspeed_engine import PRECISIONS
from xlpre.training.distributed import seed_step, select_device

MAX_ROWS, MAX_CHARS, MAX_NAMES = 4, 200, 3  # limits of the output: batch rows, characters of a row, names of parameters


def print_replay(folder: Path, precision: str | None, device: str | None) -> None:
    """Replay a step and print the first non-finite value.

    Args:
        folder: folder that the run wrote when it stopped, RUN_DIR/nonfinite/step_...
        precision: name of the precision. None: precision of the run.
        device: `cpu` or `cuda`. None: `cuda` if there is a GPU.

    Raises:
        InputError: the folder cannot be read, or there is no GPU.
    """
    torch_device = select_device(device)
    model_folder, rank_dumps = read_dump(folder)
    run = rank_dumps[0]
    dtype = PRECISIONS[precision] if precision else run.precision
    tokenizer = model_folder.require_tokenizer(folder / "model")
    model = model_folder.model().to(torch_device, dtype).train()
    precision_names = {value: key for key, value in PRECISIONS.items()}
    print(
        f"{folder}: step {run.step + 1:,} of {counted(run.world_size, 'process')}, "
        f"{counted(run.n_micro_steps, 'micro-batch')} each; "
        f"run in {precision_names[run.precision]}, replay in {precision_names[dtype]} on {torch_device.type}"
    )
    nonfinite = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    print(f"weights: {f'not finite: {_format_names(nonfinite)}' if nonfinite else 'finite'}")
    first_values = [f"the weights, {_format_names(nonfinite)}"] if nonfinite else []
    results = []
    for dump in rank_dumps:
        seed_step(dump.seed, dump.step, dump.rank)
        for index, (batch, memory) in enumerate(dump.micro_steps()):
            origin = f"rank {dump.rank}, micro-batch {index}"
            memory = Memory(memory.hidden.to(torch_device, dtype), memory.valid.to(torch_device))
            result = replay(model, batch.to(torch_device), memory)
            print(f"\n{origin}: {batch.input_ids.size(0)} rows of {batch.input_ids.size(1)} tokens")
            print("\n".join(f"  {line}" for line in _format_result(result, batch, tokenizer)))
            if result.first:
                first_values.append(f"{result.first} ({origin})")
            results.append(result)
    print(f"\n{_summarize(first_values, results)}")


def _format_result(result: ReplayResult, batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """Return the lines for one micro-batch."""
    lines = [f"memory    {f'not finite in {format_rows(result.memory_rows)}' if result.memory_rows else 'finite'}"]
    otherwise = "not finite, because of the memory" if result.memory_rows else "finite"
    lines.append(f"forward   {_format_site(result.forward, 'input') if result.forward else otherwise}")
    lines.append(f"loss      {result.loss:.4g}")
    lines += _format_backward(result)
    rows = list(range(len(batch.input_ids))) if result.rows is None else result.rows
    lines += [f"row {row:<5} {_row_text(batch, row, tokenizer)}" for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        lines.append(f"          and {len(rows) - MAX_ROWS} more rows")
    return lines


def _format_backward(result: ReplayResult) -> list[str]:
    if result.grad_norm is None:
        return ["backward  skipped, because the loss is not finite"]
    lines = [f"backward  {_format_site(result.backward, 'incoming gradient') if result.backward else 'finite'}"]
    lines.append(f"          global norm {result.grad_norm:.3g}")
    if result.nonfinite_parameters:
        names = _format_names(result.nonfinite_parameters)
        lines.append(f"          not finite for {len(result.nonfinite_parameters)} parameters: {names}")
    if result.max_gradient:
        size, name = result.max_gradient
        others = " of the others" * bool(result.nonfinite_parameters)
        lines.append(f"          largest |gradient|{others} {size:.3g}, of {name}")
    return lines


def _format_site(site: NonFiniteSite, input_name: str) -> str:
    text = f"first non-finite value: {site.description}"
    if site.rows:
        text += f", {format_rows(site.rows)}"
    sizes = [(input_name, site.max_input), ("weight", site.max_weight)]
    known = [f"largest |{name}| {size:.3g}" for name, size in sizes if size is not None]
    return text + (f" ({', '.join(known)})" if known else "")


def _format_names(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _row_text(batch: Batch, row: int, tokenizer: Tokenizer) -> str:
    """Return the text of a row in reading order."""
    ids = batch.input_ids[row].tolist()
    text = tokenizer.decode(reversed(ids) if batch.backward[row] else ids)
    return repr(text[:MAX_CHARS]) + ("..." if len(text) > MAX_CHARS else "")


def _summarize(first_values: list[str], results: list[ReplayResult]) -> str:
    if first_values:
        return f"first non-finite value: {first_values[0]}"
    size, name = max(result.max_gradient for result in results if result.max_gradient)
    return (
        f"all values are finite here: {len(results)} micro-batches, largest |gradient| {size:.3g}, of {name}. In the run they were not: "
        "the cause may be another precision (--precision), another device, or the reduction between processes"
    )
