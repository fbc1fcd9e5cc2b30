"""Measure the fraction of time spent on training if a process is killed every two minutes and torchrun restarts the training run.

python benchmarks/reliability/restarts.py --minutes 20 --every 120 --out reports/reliability/restarts.jsonl

Writes a store of docstrings in a temporary folder and trains on it with two CPU processes under `torchrun --max-restarts`, as described
in docs/distributed.md. Every --every seconds a random process receives SIGKILL. Prints one JSON line per kill, and one for the whole run.

The fraction is the time of the steps that the final model contains, divided by the wall time from the first start to the end of the last
process. If a kill undoes a step, only its repetition counts. Saving, evaluation and starting do not count as training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.docstrings_store import make_docstrings_store
from benchmarks.common.processes import REPOSITORY
from benchmarks.reliability.restarted_training import Training, kill_worker, wait_for_first_step
from xlpre.common.tables import to_jsonl
from xlpre.training.metrics_writer import read_metrics

LOG_EVERY = 10
CONFIG = str(REPOSITORY / "configs" / "pretrain" / "debug.yaml")
MODEL = {  # a step takes about 0.1 s on two cores
    "train.global_batch_size": 16,
    "data.seq_len": 128,
    "data.reuse_len": 64,
    "model.d_model": 128,
    "model.d_inner": 512,
    "model.mem_len": 64,
}
# phases between a kill and the end of the first step after it
PHASES = ("noticing", "starting", "importing", "joining", "building", "first_step")


def measure_restart(training: Training, kill_time: float, end_time: float) -> dict:
    """Return the seconds of each phase between a kill and the end of the first step after it, and the steps that the kill undid.

    Args:
        training: the training run.
        kill_time: time of the kill.
        end_time: time at which the other process had ended.
    """
    first_step, first_step_time = wait_for_first_step(training, kill_time)
    at = {event: when for event, when, _ in training.marks if when > kill_time}
    times = [kill_time, end_time, at["python"], at["imported"], at["joined"], at["built"], first_step_time]
    before_kill = [(step, when) for step, when in training.steps if when < at["python"]]
    last_step = before_kill[-1][0]
    start_time = max(when for event, when, _ in training.marks if event == "built" and when < kill_time)
    resume_point = max([start_time, *(when for step, when in before_kill if step == first_step - 1)])
    return {
        "repeated_steps": last_step + 1 - first_step,
        "lost_seconds": round(kill_time - resume_point, 2),
        **{phase: round(end - start, 2) for phase, start, end in zip(PHASES, times, times[1:], strict=False)},
    }


def kill_repeatedly(training: Training, minutes: float, every: float, rng: random.Random) -> list[dict]:
    """Kill a process every `every` seconds, for `minutes` minutes. Returns the JSON line of each kill."""
    start, lines, number = time.time(), [], 1
    while number * every < minutes * 60:
        time.sleep(max(start + number * every - time.time(), 0))
        kill_time, end_time = kill_worker(training, rng)
        restart = measure_restart(training, kill_time, end_time)
        load = round(os.getloadavg()[0], 1)
        lines.append({"kill": number, "seconds": round(kill_time - start, 1), **restart, "load": load})
        print(json.dumps(lines[-1]), flush=True)
        number += 1
    time.sleep(max(start + minutes * 60 - time.time(), 0))
    return lines


def summarize(training: Training, lines: Sequence[dict], wall_seconds: float, run_dir: Path, save_every: int) -> dict:
    """Return the JSON line of the whole run.

    Args:
        training: the training run, which has ended.
        lines: JSON lines of the kills.
        wall_seconds: wall time of the run.
        run_dir: run folder.
        save_every: steps between checkpoints.
    """
    metrics = [line for line in read_metrics(run_dir) if "loss" in line]
    steps = [line["step"] for line in metrics]
    expected = range(
        LOG_EVERY, steps[-1] + 1, LOG_EVERY
    )  # followed by a last line if the run ended between two of these steps
    assert steps in ([*expected], [*expected, steps[-1]]), f"metrics.jsonl lacks a step or contains it twice: {steps}"
    previous_tokens = [0, *(line["tokens"] for line in metrics)]
    seconds = [
        (line["tokens"] - n) / line["tokens_per_second"] for n, line in zip(previous_tokens, metrics, strict=False)
    ]
    save_seconds = [duration for event, _, duration in training.marks if event == "saving"]
    save_starts = [when for event, when, _ in training.marks if event == "saving"]
    write_seconds = [
        when - max(start for start in save_starts if start < when)
        for event, when, _ in training.marks
        if event == "saved" and save_starts[0] < when
    ]
    down_seconds = [sum(line[phase] for phase in PHASES) for line in lines]
    return {
        "training_fraction": round(sum(seconds) / wall_seconds, 4),
        "wall_seconds": round(wall_seconds, 1),
        "training_seconds": round(sum(seconds), 1),
        "lost_seconds": round(sum(line["lost_seconds"] for line in lines), 1),
        "down_seconds": round(sum(down_seconds), 1),
        "saving_seconds": round(sum(save_seconds), 1),
        "kills": len(lines),
        "steps": steps[-1],
        "step_seconds": round(statistics.median(seconds) / LOG_EVERY, 3),
        "save_every": save_every,
        "saves": len(save_seconds),
        "seconds_per_save": round(statistics.median(save_seconds), 3),
        "seconds_until_written": round(statistics.median(write_seconds), 2),
        "repeated_steps": sum(line["repeated_steps"] for line in lines),
        **{phase: statistics.median(line[phase] for line in lines) for phase in PHASES},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=20, help="minutes of training with kills, after which the run is stopped"
    )
    parser.add_argument("--every", type=float, default=120, help="seconds between kills")
    parser.add_argument("--config", default=CONFIG, help="config file of the training run")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--goal", type=float, default=0.9, help="the exit status is 1 if the fraction is below this value"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the training run")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_docstrings_store(folder / "store", million_characters=3, vocab_size=2000, val_fraction=0.05)
        run_dir, restarts = folder / "run", int(args.minutes * 60 / args.every)
        settings = {"run_dir": run_dir, "data.store_dir": store, "tokenizer.path": store / "vocabulary.model"}
        settings |= MODEL if args.config == CONFIG else {}
        settings |= {"train.steps": 10**6, "train.hours": "null", "train.log_every": LOG_EVERY, "eval.every": 10**6}
        settings |= {"train.save_every": args.save_every, "schedule.decay": "constant"}
        command_args = ["--config", args.config, *(f"{key}={value}" for key, value in settings.items()), *args.settings]
        start, training = time.time(), Training(command_args, restarts)
        try:
            wait_for_first_step(training, start)
            lines = kill_repeatedly(training, args.minutes, args.every, random.Random(1))
            training.workers()[0].terminate()  # all processes save and end
            status = training.wait(300)
        finally:
            training.kill()
        assert status == 0, "".join(training.other_lines[-40:])
        total = summarize(training, lines, time.time() - start, run_dir, args.save_every)
    print(json.dumps(total))
    if args.out:
        args.out.write_text(to_jsonl([*lines, total]), encoding="utf-8")
    print(
        f"\n{total['training_fraction']:.1%} of {total['wall_seconds']:,.0f} s were spent on training, with {total['kills']} kills"
    )
    sys.exit(total["training_fraction"] < args.goal)


if __name__ == "__main__":
    main()
