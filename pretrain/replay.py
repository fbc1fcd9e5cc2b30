"""Make an update again whose gradients were not finite, and say where the first such value appears.

python pretrain/replay.py runs/xlnet_base/not_finite/step_00012345
python pretrain/replay.py runs/xlnet_base/not_finite/step_00012345 --precision fp32

A run that stops because of such gradients leaves the folder. Each micro-batch goes forward and backward by itself, with the dropout
that it had in the run if the device and the precision are the run's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pretrain  # noqa: F401  before torch

# isort: split
import torch

from pretrain.tools import nan_dump
from pretrain.tools.nan_detector import NonFiniteDetector, Place, is_finite, largest
from xlpre.batch import Batch
from xlpre.common.cli_main import run_main
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.deepspeed_engine import PRECISIONS
from xlpre.training.distributed import seed_step

SHOWN_ROWS, SHOWN_CHARACTERS, SHOWN_NAMES = 4, 200, 3


@dataclass(frozen=True)
class Replay:
    """What one micro-batch did.

    Attributes:
        memory: rows whose memory was not finite when it met it.
        forward: see Watch.
        loss: all that is minimised, not divided by the number of micro-batches.
        backward: see Watch; None also if the loss was not finite, for then there is no backward pass.
        norm: of the gradients of all parameters; None without a backward pass.
        bad: parameters whose gradient is not finite.
        largest: the largest absolute value of a gradient that is finite, and whose it is.
    """

    memory: list[int]
    forward: Place | None
    loss: float
    backward: Place | None
    norm: float | None
    bad: list[str]
    largest: tuple[float, str] | None

    @property
    def first(self) -> str | None:
        """In words, what was not finite first; None if all was finite."""
        if self.memory:
            return f"the memory of {_rows(self.memory)}"
        if place := self.forward or self.backward:
            return place.what + (f", {_rows(place.rows)}" if place.rows else "")
        if self.norm is not None and self.norm**2 > torch.finfo(torch.float32).max:
            return f"the global gradient norm, {self.norm:.3g}: finite, but its square is not in fp32"
        return None

    @property
    def rows(self) -> list[int] | None:
        """Rows of the batch that are involved; None if that is not known."""
        if self.memory:
            return self.memory
        place = self.forward or self.backward
        return place.rows if place else []


def replay(model: LanguageModel, batch: Batch, memory: Memory) -> Replay:
    """One micro-batch forward, and backward if its loss is finite. All on the device and in the precision of `model`."""
    model.zero_grad()
    bad_rows = (~memory.finite_rows()).nonzero().flatten().tolist()
    with NonFiniteDetector(model, batch.input_ids.size(0)) as watch:
        targets, _, *others = model(batch, memory)
        loss = sum(others, start=targets)
        if is_finite(loss):
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sizes = [(size, name) for name, gradient in gradients.items() if (size := largest(gradient)) is not None]
    bad = [name for name, gradient in gradients.items() if not is_finite(gradient)]
    norms = [gradient.double().norm() for gradient in gradients.values()]
    return Replay(
        memory=bad_rows,
        forward=watch.forward,
        loss=loss.item(),
        backward=watch.backward,
        norm=torch.stack(norms).norm().item() if norms else None,
        bad=bad,
        largest=max((entry for entry in sizes if entry[1] not in bad), default=None),
    )


def show(one: Replay, batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """Lines for a terminal."""
    lines = [f"memory    {f'not finite in {_rows(one.memory)}' if one.memory else 'finite'}"]
    after = "not finite from the memory on" if one.memory else "finite"
    lines.append(f"forward   {_place(one.forward, 'input') if one.forward else after}")
    lines.append(f"loss      {one.loss:.4g}")
    lines += _backward(one)
    rows = list(range(len(batch.input_ids))) if one.rows is None else one.rows
    lines += [f"row {row:<5} {_text(batch, row, tokenizer)}" for row in rows[:SHOWN_ROWS]]
    if len(rows) > SHOWN_ROWS:
        lines.append(f"          and {len(rows) - SHOWN_ROWS} rows more")
    return lines


def _backward(one: Replay) -> list[str]:
    if one.norm is None:
        return ["backward  none, because the loss is not finite"]
    lines = [f"backward  {_place(one.backward, 'gradient that comes in') if one.backward else 'finite'}"]
    lines.append(f"          global norm {one.norm:.3g}")
    if one.bad:
        lines.append(f"          not finite for {len(one.bad)} parameters: {_names(one.bad)}")
    if one.largest:
        whose = "of the others" if one.bad else "|gradient|"
        lines.append(f"          largest {whose} {one.largest[0]:.3g}, of {one.largest[1]}")
    return lines


def _place(place: Place, came: str) -> str:
    words = f"not finite first: {place.what}"
    if place.rows:
        words += f", {_rows(place.rows)}"
    sizes = [(came, place.largest), ("weight", place.weight)]
    known = [f"largest |{name}| {size:.3g}" for name, size in sizes if size is not None]
    return words + (f" ({', '.join(known)})" if known else "")


def _rows(rows: list[int]) -> str:
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"


def _names(names: list[str]) -> str:
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _text(batch: Batch, row: int, tokenizer: Tokenizer) -> str:
    """The window as a person reads it, whichever way the row runs."""
    ids = batch.input_ids[row].tolist()
    text = tokenizer.decode(reversed(ids) if batch.backward[row] else ids)
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


def _device(word: str | None) -> torch.device:
    if word == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; leave it out, or take --device cpu")
    return torch.device(word or ("cuda" if torch.cuda.is_available() else "cpu"))


def _summary(firsts: list[str], replays: list[Replay]) -> str:
    if firsts:
        return f"not finite first: {firsts[0]}"
    size, name = max(one.largest for one in replays if one.largest)
    return (
        f"all finite here: {len(replays)} micro-batches, largest |gradient| {size:.3g} of {name}; in the run it was not, so look at "
        "precision (--precision), the device, or the reduction between processes"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="RUN_DIR/not_finite/step_..., as the run named it when it stopped")
    parser.add_argument("--precision", choices=[*PRECISIONS, "as-run"], default="as-run", help="default: as-run")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    words = parser.parse_args(argv)
    device = _device(words.device)
    folder, shares = nan_dump.read(words.folder)
    run, was = shares[0], shares[0].precision
    dtype = PRECISIONS.get(words.precision, was)
    tokenizer = folder.require_tokenizer(words.folder / "model")
    model = folder.model().to(device, dtype).train()
    spoken = {value: key for key, value in PRECISIONS.items()}
    print(
        f"{words.folder}: update {run.step:,} of {run.world_size} process(es), {run.n_micro_steps} micro-batch(es) each; the run was "
        f"in {spoken[was]}, this is {spoken[dtype]} on {device.type}"
    )
    bad = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    print(f"weights: {f'not finite: {_names(bad)}' if bad else 'finite'}")
    firsts, replays = [f"the weights, {_names(bad)}"] if bad else [], []
    for share in shares:
        seed_step(share.seed, share.step, share.process)
        for number, (batch, memory) in enumerate(share.micro_steps()):
            here = f"process {share.process}, micro-batch {number}"
            memory = Memory(memory.hidden.to(device, dtype), memory.valid.to(device))
            one = replay(model, batch.to(device), memory)
            print(f"\n{here}: {batch.input_ids.size(0)} rows of {batch.input_ids.size(1)} tokens")
            print("\n".join(f"  {line}" for line in show(one, batch, tokenizer)))
            if one.first:
                firsts.append(f"{one.first} ({here})")
            replays.append(one)
    print(f"\n{_summary(firsts, replays)}")


if __name__ == "__main__":
    run_main(main)
