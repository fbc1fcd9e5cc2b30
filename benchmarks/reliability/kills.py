"""A training that is killed with SIGKILL, in every phase, again and again, against one that is not.

python benchmarks/reliability/kills.py --out reports/reliability/kills.jsonl

Makes a small store in a temporary folder. For each ZeRO stage it trains a tiny model with two CPU processes, dropout, memory and two
micro-steps, through tests/integration/faulty.py, which kills process 0, process 1 or both at once, in each of its phases (each phase on
process 0 in two of the stages, on process 1 in the others; with --every-process, on each in every stage). The same command starts it
again, until it finishes. One JSON line for each kill and one for each stage, then a table. The exit status is not 0 if any of these is
broken:

- a start ends within a minute of the kill, and the process that was not killed with status 3;
- it goes on from the newest checkpoint on the disk, never from an older one than before, and no more than two savings are lost;
- every step has the loss, the gradient norm, the learning rate and the held-out loss of the uninterrupted run, to the last bit;
- the last checkpoint has its weights, moments and memory, to the last bit;
- nothing is in the run folder that is not in that of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.docstrings_store import docstrings_store
from benchmarks.reliability.killed_run import (
    PATIENCE_SECONDS,
    Started,
    differing,
    names_in,
    newest_on_disk,
    numbers,
    start,
)

SAVE_EVERY, STEPS_A_KILL = 3, 4
SETTINGS = {
    "data.seq_len": 32,
    "data.reuse_len": 16,
    "data.windows_per_run": 4,
    "model.n_layer": 2,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_inner": 32,
    "model.mem_len": 16,
    "model.dropout": 0.1,
    "model.dropatt": 0.1,
    "optim.lr": 0.003,
    "schedule.warmup_steps": 10,
    "train.global_batch_size": 4,
    "train.accumulation": 2,
    "train.log_every": 1,
    "train.save_every": SAVE_EVERY,
    "train.keep_last_checkpoints": 1,
    "train.timeout_minutes": 0.5,
    "eval.every": 4,
    "eval.batch_size": 2,
    "eval.num_windows": 2,
}
NO_STEP = ("meeting", "start", "loading")  # of a start that has made no update
MAIN_ONLY = ("model", "manifest", "removing", "half_removed", "publishing", "between_renames")
PHASES = (
    *NO_STEP,
    *("forward", "backward", "update", "after_update", "measuring", "copying", "writing", "half_written"),
    *MAIN_ONLY,
    "closing",
)
AT_ONCE = ("update", "half_written", "manifest", "half_removed", "publishing", "removing", "measuring", "model")


@dataclass(frozen=True)
class Kill:
    """What is to be killed: a process, or both at once, when process 0 gets there."""

    phase: str
    process: int | str

    def fault(self, first: int) -> dict:
        """As faulty.py reads it; at step `first` or later."""
        steps = {} if self.phase in NO_STEP else {"steps": [first, 10**9]}
        if self.process == "both":
            return {"phase": self.phase, "process": 0, "do": "kill_all", **steps}
        return {"phase": self.phase, "process": self.process, **steps}


def plan_of(stage: int, phases: Sequence[str], every_process: bool, rng: np.random.Generator) -> list[Kill]:
    """Every phase, two of them also on both processes at once; what ends a run comes last.

    The process changes from phase to phase and from stage to stage, unless each phase is to be on `every_process`.
    """
    each = []
    for number, phase in enumerate(phases):
        processes = (0,) if phase in MAIN_ONLY else (0, 1) if every_process else ((number + stage) % 2,)
        each += [Kill(phase, process) for process in processes]
    both = [Kill(phase, "both") for phase in AT_ONCE[2 * stage :][:2] if phase in phases]
    last = [kill for kill in each if kill.phase == "closing"]
    rest = [kill for kill in each + both if kill not in last]
    rng.shuffle(rest)
    training = [kill for kill in rest if kill.phase not in NO_STEP][:2]  # first of all: who starts anew loads nothing
    return training + [kill for kill in rest if kill not in training] + last


class Stage:
    """The kills of one ZeRO stage; `broken` are the promises that were."""

    def __init__(self, stage: int, kills: Sequence[Kill], store: Path, folder: Path, rng: np.random.Generator) -> None:
        self.stage, self._kills, self._folder, self._rng, self.broken = stage, kills, folder, rng, []
        self._steps = STEPS_A_KILL * len(kills) + 3 * SAVE_EVERY
        self._run, self._whole = folder / f"stage{stage}", folder / f"stage{stage}_whole"
        vocabulary = store / "vocabulary.model"
        more = {"data.store_dir": store, "tokenizer.path": vocabulary, "train.steps": self._steps, "name": "killed"}
        settings = {**SETTINGS, **more, "deepspeed.zero_optimization.stage": stage}
        self._words = [f"{key}={value}" for key, value in settings.items()]

    def lines(self) -> Iterator[dict]:
        """One for each kill, then one for all."""
        whole = self._start(self._whole, {})
        assert whole.statuses == (0, 0), whole.said
        expected = numbers(self._whole)
        before, last = None, None  # type: dict | None, Started | None
        for number, kill in enumerate(self._kills):
            first = (0 if kill.phase == "closing" else STEPS_A_KILL * number) + int(self._rng.integers(1, 4))
            was_on_disk = newest_on_disk(self._run)
            last = self._start(self._run, kill.fault(first))
            if before is not None:
                yield self._finished(before, last, expected)
            before = self._line(kill, last, was_on_disk)
        last = self._start(self._run, {})
        if before is not None:
            yield self._finished(before, last, expected)
        self._hold(last.statuses == (0, 0), f"the last start ended with {last.statuses}: {last.last_words}")
        differ = differing(self._whole, self._run)
        left = sorted(names_in(self._run) - names_in(self._whole))
        missing = sorted(names_in(self._whole) - names_in(self._run))
        equal = numbers(self._run) == expected
        self._hold(equal, "the numbers of the steps differ")
        self._hold(not differ, f"not the same to the last bit: {', '.join(differ)}")
        self._hold(not left and not missing, f"left behind: {left}, missing: {missing}")
        yield {
            "stage": self.stage,
            "kills": len(self._kills),
            "steps": self._steps,
            "steps_equal": equal,
            "tensors_equal": not differ,
            "left_behind": left,
            "broken": self.broken,
        }

    def _start(self, run_dir: Path, fault: dict) -> Started:
        return start([*self._words, f"run_dir={run_dir}"], fault, self._folder)

    def _line(self, kill: Kill, killed: Started, was_on_disk: int) -> dict:
        """Of a kill, as far as it is known before the next start."""
        where = f"{kill.phase} of process {kill.process}"
        if killed.killed_at is None:
            self.broken.append(f"{where}: was not killed but ended with {killed.statuses}: {killed.last_words}")
        self._hold(not killed.hung, f"{where}: the other process was still there after {PATIENCE_SECONDS} s")
        victims = (0, 1) if kill.process == "both" else (kill.process,)
        as_promised = tuple(-signal.SIGKILL if process in victims else 3 for process in (0, 1))
        self._hold(killed.statuses == as_promised, f"{where}: exit statuses {killed.statuses}: {killed.last_words}")
        on_disk = newest_on_disk(self._run)
        self._hold(on_disk >= was_on_disk, f"{where}: checkpoint {was_on_disk} was there, now it is {on_disk}")
        step = was_on_disk if kill.phase in NO_STEP else (killed.killed_at or 0)
        made = step + (kill.phase == "after_update")
        self._hold(made - on_disk <= 2 * SAVE_EVERY, f"{where}: {made - on_disk} updates were lost")
        return {
            "stage": self.stage,
            "phase": kill.phase,
            "process": kill.process,
            "step": step,
            "went_on_from": on_disk,
            "updates_made_again": made - on_disk,
            "exit_statuses": killed.statuses,
        }

    def _finished(self, line: dict, restarted: Started, expected: dict) -> dict:
        """The line, with what came of it."""
        where = f"{line['phase']} of process {line['process']}"
        found = restarted.went_on_from
        self._hold(found in (None, line["went_on_from"]), f"{where}: went on from {found}, not {line['went_on_from']}")
        odd = sorted(step for step, values in numbers(self._run).items() if values != expected.get(step))
        self._hold(not odd, f"{where}: other numbers than without kills at {odd[:5]}")
        seconds = restarted.first_update_seconds
        return {**line, "first_update_seconds": seconds and round(seconds, 2), "equal": not odd}

    def _hold(self, kept: bool, promise: str) -> None:
        if not kept:
            self.broken.append(promise)


def table(lines: Sequence[dict]) -> str:
    """By phase."""
    by_phase = defaultdict(list)
    for line in lines:
        by_phase[line["phase"]].append(line)
    rows = ["| phase | kills | updates made again, at most | equal |", "| --- | --- | --- | --- |"]
    for phase in (phase for phase in PHASES if phase in by_phase):
        found = by_phase[phase]
        most, equal = max(line["updates_made_again"] for line in found), all(line["equal"] for line in found)
        rows.append(f"| {phase} | {len(found)} | {most} | {'yes' if equal else 'NO'} |")
    return "\n".join(rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--every-process", action="store_true", help="each phase on both processes in each stage")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the kills and their steps")
    words = parser.parse_args()
    rng = np.random.default_rng(words.seed)
    kills, broken = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = docstrings_store(folder / "store", million_characters=0.3, vocab_size=300, val_fraction=0.1)
        for number in words.stages:
            stage = Stage(number, plan_of(number, words.phases, words.every_process, rng), store, folder, rng)
            for line in stage.lines():
                content = json.dumps(line).replace(name, "FOLDER")
                print(content, flush=True)
                if words.out:
                    with open(words.out, "a" if kills or broken else "w") as file:
                        file.write(content + "\n")
                if "phase" in line:
                    kills.append(line)
            broken += [f"stage {number}: {promise}".replace(name, "FOLDER") for promise in stage.broken]
    seconds = [line["first_update_seconds"] for line in kills if line["first_update_seconds"]]
    print(
        f"\n{table(kills)}\n\n{len(kills)} kills; a start takes {statistics.median(seconds):.1f} s to its first update (median)"
    )
    print("\n".join(["broken:", *broken]) if broken else "every promise was kept")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
