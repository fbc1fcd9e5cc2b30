"""Kill a training run repeatedly with SIGKILL, in every phase, and compare it with an uninterrupted run.

python benchmarks/reliability/kills.py --out reports/reliability/kills.jsonl

Writes a small store in a temporary folder. For each ZeRO stage, trains a tiny model with two CPU processes, dropout, memory and two
micro-steps. tests/integration/faulty.py kills a process in each phase of training, such as `backward` or `half_written`. The killed
process alternates between phases and stages; with --every-process, each phase is tried with both. A few kills hit both processes at
once. After each kill the same command restarts the training run, until it is finished.

Prints one JSON line per kill and per stage, then a table. The exit status is 1 if one of these promises is broken:

- After a kill, the process that was not killed ends within a minute, with status 3.
- The next start resumes from the newest checkpoint on disk, which is never older than before the kill. At most two save intervals are lost.
- Loss, gradient norm, learning rate and validation loss of every step are bitwise equal to those of the uninterrupted run.
- Weights, moments and memory of the last checkpoint are bitwise equal to those of the uninterrupted run.
- The run folder has the same files as that of the uninterrupted run.
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

from benchmarks.common.docstrings_store import make_docstrings_store
from benchmarks.reliability.killed_run import (
    PATIENCE_SECONDS,
    StartResult,
    differing_tensors,
    list_files,
    newest_checkpoint_step,
    read_compared_metrics,
    start,
)

SAVE_EVERY, STEPS_PER_KILL = 3, 4
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
    "train.micro_batch_size": 1,
    "train.log_every": 1,
    "train.save_every": SAVE_EVERY,
    "train.keep_last_checkpoints": 1,
    "train.timeout_minutes": 0.5,
    "eval.every": 4,
    "eval.batch_size": 2,
    "eval.num_windows": 2,
}
NO_STEP = ("meeting", "start", "loading")  # phases before the first step of a start
RANK_ZERO_ONLY = ("model", "manifest", "removing", "half_removed", "publishing", "between_renames")
PHASES = (
    *NO_STEP,
    *("forward", "backward", "update", "after_update", "measuring", "copying", "writing", "half_written"),
    *RANK_ZERO_ONLY,
    "closing",
)
KILL_BOTH = ("update", "half_written", "manifest", "half_removed", "publishing", "removing", "measuring", "model")


@dataclass(frozen=True)
class Kill:
    """A kill of one process or of both, in a phase of training.

    Attributes:
        phase: phase of tests/integration/faulty.py.
        process: rank of the process to kill, or `both`: both are killed when process 0 reaches the phase.
    """

    phase: str
    process: int | str

    def fault(self, first_step: int) -> dict:
        """Return the fault for faulty.py, which kills at `first_step` or later."""
        steps = {} if self.phase in NO_STEP else {"steps": [first_step, 10**9]}
        if self.process == "both":
            return {"phase": self.phase, "process": 0, "do": "kill_all", **steps}
        return {"phase": self.phase, "process": self.process, **steps}


def plan_kills(stage: int, phases: Sequence[str], every_process: bool, rng: np.random.Generator) -> list[Kill]:
    """Return the kills of a stage in random order: one for each phase (or two), and two kills of both processes at once."""
    kills = []
    for number, phase in enumerate(phases):
        processes = (0,) if phase in RANK_ZERO_ONLY else (0, 1) if every_process else ((number + stage) % 2,)
        kills += [Kill(phase, process) for process in processes]
    both = [Kill(phase, "both") for phase in KILL_BOTH[2 * stage :][:2] if phase in phases]
    last = [kill for kill in kills if kill.phase == "closing"]  # last, because the run is finished then
    others = [kill for kill in kills + both if kill not in last]
    rng.shuffle(others)
    first = [kill for kill in others if kill.phase not in NO_STEP][
        :2
    ]  # without a checkpoint, "loading" is never reached
    return first + [kill for kill in others if kill not in first] + last


class Stage:
    """A training run with one ZeRO stage that is killed repeatedly, and its uninterrupted counterpart.

    Args:
        stage: the ZeRO stage.
        kills: the kills in their order.
        store: path of the token store.
        folder: folder for the run folders.
        rng: generator that draws the steps of the kills.

    Attributes:
        broken: descriptions of broken promises.
    """

    def __init__(self, stage: int, kills: Sequence[Kill], store: Path, folder: Path, rng: np.random.Generator) -> None:
        self.stage, self._kills, self._folder, self._rng, self.broken = stage, kills, folder, rng, []
        self._steps = STEPS_PER_KILL * len(kills) + 3 * SAVE_EVERY
        self._run, self._reference = folder / f"stage{stage}", folder / f"stage{stage}_uninterrupted"
        paths = {"data.store_dir": store, "tokenizer.path": store / "vocabulary.model"}
        more = {**paths, "train.steps": self._steps, "name": "killed", "deepspeed.zero_optimization.stage": stage}
        self._args = [f"{key}={value}" for key, value in {**SETTINGS, **more}.items()]

    def run(self) -> Iterator[dict]:
        """Train without a kill, then with all kills. Yields a JSON line for each kill, and one for the stage."""
        reference = self._start(self._reference, {})
        assert reference.statuses == (0, 0), reference.output
        expected = read_compared_metrics(self._reference)
        previous_line: dict | None = None
        for number, kill in enumerate(self._kills):
            earliest = 0 if kill.phase == "closing" else STEPS_PER_KILL * number
            first_step = earliest + int(self._rng.integers(1, 4))
            step_on_disk = newest_checkpoint_step(self._run)
            result = self._start(self._run, kill.fault(first_step))
            if previous_line is not None:
                yield self._complete_line(previous_line, result, expected)
            previous_line = self._kill_line(kill, result, step_on_disk)
        result = self._start(self._run, {})
        if previous_line is not None:
            yield self._complete_line(previous_line, result, expected)
        self._check(result.statuses == (0, 0), f"the last start ended with {result.statuses}: {result.last_lines}")
        differing = differing_tensors(self._reference, self._run)
        left_behind = sorted(list_files(self._run) - list_files(self._reference))
        missing = sorted(list_files(self._reference) - list_files(self._run))
        steps_equal = read_compared_metrics(self._run) == expected
        self._check(steps_equal, "metrics of steps differ")
        self._check(not differing, f"tensors differ: {', '.join(differing)}")
        self._check(not left_behind and not missing, f"files left behind: {left_behind}, missing: {missing}")
        yield {
            "stage": self.stage,
            "kills": len(self._kills),
            "steps": self._steps,
            "steps_equal": steps_equal,
            "tensors_equal": not differing,
            "left_behind": left_behind,
            "broken": self.broken,
        }

    def _start(self, run_dir: Path, fault: dict) -> StartResult:
        return start([*self._args, f"run_dir={run_dir}"], fault, self._folder)

    def _kill_line(self, kill: Kill, result: StartResult, previous_step_on_disk: int) -> dict:
        """Check the promises about a start that was killed. Return the JSON line of the kill, which _complete_line completes."""
        location = f"{kill.phase} of process {kill.process}"
        if result.killed_at is None:
            self.broken.append(f"{location}: not killed, but ended with {result.statuses}: {result.last_lines}")
        self._check(not result.hung, f"{location}: the other process was still running after {PATIENCE_SECONDS} s")
        victims = (0, 1) if kill.process == "both" else (kill.process,)
        expected = tuple(-signal.SIGKILL if process in victims else 3 for process in (0, 1))
        self._check(
            result.statuses == expected,
            f"{location}: exit statuses are {result.statuses}, expected {expected}: {result.last_lines}",
        )
        step_on_disk = newest_checkpoint_step(self._run)
        self._check(
            step_on_disk >= previous_step_on_disk,
            f"{location}: the newest checkpoint was of step {previous_step_on_disk} before the start, but is of step {step_on_disk} now",
        )
        step = previous_step_on_disk if kill.phase in NO_STEP else (result.killed_at or 0)
        lost_steps = step + (kill.phase == "after_update") - step_on_disk
        self._check(
            lost_steps <= 2 * SAVE_EVERY,
            f"{location}: {lost_steps} steps were lost, more than {2 * SAVE_EVERY} (two save intervals)",
        )
        return {
            "stage": self.stage,
            "phase": kill.phase,
            "process": kill.process,
            "step": step,
            "resumes_from": step_on_disk,
            "repeated_steps": lost_steps,
            "exit_statuses": result.statuses,
        }

    def _complete_line(self, line: dict, restart: StartResult, expected: dict) -> dict:
        """Check the promises about the start after a kill. Return the JSON line of the kill with the results of that start."""
        location = f"{line['phase']} of process {line['process']}"
        resumed_from = restart.resumed_from
        self._check(
            resumed_from in (None, line["resumes_from"]),
            f"{location}: resumed from step {resumed_from}, but the newest checkpoint is of step {line['resumes_from']}",
        )
        actual = read_compared_metrics(self._run)
        differing = sorted(step for step, values in actual.items() if values != expected.get(step))
        self._check(
            not differing,
            f"{location}: metrics differ from the uninterrupted run at the (step, is training) {differing[:5]}",
        )
        seconds = restart.seconds_to_first_step
        return {**line, "seconds_to_first_step": seconds and round(seconds, 2), "equal": not differing}

    def _check(self, holds: bool, promise: str) -> None:
        if not holds:
            self.broken.append(promise)


def make_table(lines: Sequence[dict]) -> str:
    """Return a Markdown table with a row for each phase: its kills, the largest number of repeated steps, and whether metrics are equal."""
    by_phase = defaultdict(list)
    for line in lines:
        by_phase[line["phase"]].append(line)
    rows = ["| phase | kills | repeated steps, at most | equal |", "| --- | --- | --- | --- |"]
    for phase in (phase for phase in PHASES if phase in by_phase):
        of_phase = by_phase[phase]
        repeated, equal = max(line["repeated_steps"] for line in of_phase), all(line["equal"] for line in of_phase)
        rows.append(f"| {phase} | {len(of_phase)} | {repeated} | {'yes' if equal else 'NO'} |")
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument(
        "--every-process", action="store_true", help="try each phase with a kill of process 0 and a kill of process 1"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of the kills and their steps")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    kills, broken = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_docstrings_store(folder / "store", million_characters=0.3, vocab_size=300, val_fraction=0.1)
        for number in args.stages:
            stage = Stage(number, plan_kills(number, args.phases, args.every_process, rng), store, folder, rng)
            for line in stage.run():
                content = json.dumps(line).replace(name, "FOLDER")
                print(content, flush=True)
                if args.out:
                    with open(args.out, "a" if kills or broken else "w") as file:
                        file.write(content + "\n")
                if "phase" in line:
                    kills.append(line)
            broken += [f"stage {number}: {promise}".replace(name, "FOLDER") for promise in stage.broken]
    seconds = [line["seconds_to_first_step"] for line in kills if line["seconds_to_first_step"]]
    start = f"; median time from a start to its first step: {statistics.median(seconds):.1f} s" if seconds else ""
    print(f"\n{make_table(kills)}\n\n{len(kills)} kills{start}")
    print("\n".join(["broken promises:", *broken]) if broken else "no promise was broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
