"""A training that is killed with SIGKILL, in every phase, again and again, against one that is not.

python benchmarks/kills.py --out reports/reliability/kills.jsonl

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
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xlpre.data.building import write_store
from xlpre.text.corpus import TextConfig, documents
from xlpre.text.tokenizer import TokenizerConfig, train
from xlpre.training import checkpoint
from xlpre.training.distributed import free_port
from xlpre.training.metrics import read_metrics

REPOSITORY = Path(__file__).parents[1]
FAULTY = REPOSITORY / "tests" / "integration" / "faulty.py"
SAVE_EVERY, STEPS_A_KILL, PATIENCE_SECONDS = 3, 4, 60
SETTINGS = {
    "data.window": 32,
    "data.reuse_len": 16,
    "data.run_windows": 4,
    "model.n_layer": 2,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_inner": 32,
    "model.mem_len": 16,
    "model.dropout": 0.1,
    "model.dropatt": 0.1,
    "optim.lr": 0.003,
    "schedule.warmup_steps": 10,
    "train.batch_size": 4,
    "train.accumulation": 2,
    "train.log_every": 1,
    "train.save_every": SAVE_EVERY,
    "train.keep_last": 1,
    "train.patience_minutes": 0.5,
    "eval.every": 4,
    "eval.lanes": 2,
    "eval.windows": 2,
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
COMPARED = ("loss", "grad_norm", "lr", "skipped", "tokens", "held_out_loss", "held_out_accuracy")


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


@dataclass(frozen=True)
class Started:
    """How a start went."""

    statuses: tuple[int, ...]
    went_on_from: int | None  # None: it did not come so far
    killed_at: int | None
    first_update_seconds: float | None
    end_seconds: float
    hung: bool
    said: str

    @property
    def last_words(self) -> str:
        """The end of what was said."""
        return " / ".join(self.said.split("\n")[-3:])[-300:]


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


def start(words: Sequence[str], fault: dict, folder: Path) -> Started:
    """Start both processes, as SLURM would, and wait until they have ended."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    variables = {**os.environ, **job, **quiet, **paths, "PYTHONUNBUFFERED": "1", "FAULT": json.dumps(fault)}
    errors, group, processes = folder / "stderr.txt", 0, []
    since = time.monotonic()
    with open(errors, "w") as stderr:
        for rank in (0, 1):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(FAULTY), *words],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    preexec_fn=lambda: os.setpgid(0, group),  # noqa: B023, PLW1509 - one group, for both to be killed at once
                )
            )
            group = processes[0].pid
    said, first_update = [], None
    watch = threading.Timer(600, os.killpg, (group, signal.SIGKILL))
    watch.start()
    for line in processes[0].stdout:
        said.append(line)
        if first_update is None and re.match(r"step [\d,]+: loss", line):
            first_update = time.monotonic() - since
    watch.cancel()
    hung = False
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            process.wait()
    text, complaints = "".join(said), errors.read_text("utf-8")
    opened = re.search(r"goes on from \S+ at step ([\d,]+)", text)
    went_on_from = int(opened[1].replace(",", "")) if opened else 0 if "parameters (" in text else None
    killed = re.search(r"^fault: \S+ in \S+ at step (\d+)", complaints, re.MULTILINE)
    return Started(
        tuple(process.returncode for process in processes),
        went_on_from,
        int(killed[1]) if killed else None,
        first_update,
        time.monotonic() - since,
        hung,
        (text + complaints).strip(),
    )


def numbers(run_dir: Path) -> dict[tuple[int, bool], list]:
    """What is promised to be equal, of each step and of each measurement."""
    lines = read_metrics(run_dir)
    found = {(line["step"], "loss" in line): [line.get(name) for name in COMPARED] for line in lines}
    assert len(found) == len(lines), f"{run_dir}/metrics.jsonl has a step twice"
    return found


def newest_on_disk(run_dir: Path) -> int:
    """The step of the newest checkpoint that is whole; 0 if there is none."""
    found = checkpoint.complete(run_dir / "checkpoints")
    return checkpoint.facts_of(found[-1])["step"] if found else 0


def names_in(run_dir: Path) -> set[str]:
    """Of everything but TensorBoard's files, of which every start writes one."""
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "tensorboard"}


def differing(one: Path, other: Path) -> list[str]:
    """Of the tensors' files of two runs' last checkpoints, those that are not the same to the last bit."""
    folders = [checkpoint.complete(run / "checkpoints")[-1] for run in (one, other)]
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")} for folder in folders]
    shared = names[0] & names[1]
    unequal = {name for name in shared if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()}
    return sorted(unequal | (names[0] ^ names[1]))


class Stage:
    """The kills of one ZeRO stage; `broken` are the promises that were."""

    def __init__(self, stage: int, kills: Sequence[Kill], store: Path, folder: Path, rng: np.random.Generator) -> None:
        self.stage, self._kills, self._folder, self._rng, self.broken = stage, kills, folder, rng, []
        self._steps = STEPS_A_KILL * len(kills) + 3 * SAVE_EVERY
        self._run, self._whole = folder / f"stage{stage}", folder / f"stage{stage}_whole"
        vocabulary = store / "vocabulary.model"
        more = {"data.store": store, "tokenizer.path": vocabulary, "train.steps": self._steps, "name": "killed"}
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
        folder, text = Path(name), list(documents(TextConfig(limit_mb=0.3)))
        vocabulary = train(text, TokenizerConfig(vocab_size=300))
        store = write_store(folder / "store", text, vocabulary, 0.1, {"source": "docstrings"}, {}).path
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
