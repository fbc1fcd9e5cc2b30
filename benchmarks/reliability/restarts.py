"""The share of the time that trains, where a training process is killed every two minutes and torchrun starts again by itself.

python benchmarks/reliability/restarts.py --minutes 20 --every 120 --out reports/reliability/restarts.jsonl

Makes a store of docstrings in a temporary folder and trains on it with two CPU processes under `torchrun --max-restarts`, as
docs/clusters.md says; a process at random gets SIGKILL. One JSON line for each kill, one for the whole, then a table.

What counts is the time of updates whose result is in the model at the end: not an update that a kill undid (the one made again in its
place counts), no saving, no measuring, no starting. It is divided by the wall time from the first start to the last process's end.
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

from benchmarks.common.docstrings_store import docstrings_store
from benchmarks.common.processes import REPOSITORY
from benchmarks.reliability.restarted_training import Training, first_update, kill_one
from xlpre.common.tables import to_jsonl
from xlpre.training.metrics import read_metrics

LOG_EVERY = 10
CONFIG = str(REPOSITORY / "configs" / "pretrain" / "debug.yaml")
SIZE = {  # of an update of about a tenth of a second on two cores
    "train.global_batch_size": 16,
    "data.seq_len": 128,
    "data.reuse_len": 64,
    "model.d_model": 128,
    "model.d_inner": 512,
    "model.mem_len": 64,
}
PARTS = ("noticing", "starting", "importing", "joining", "building", "first_update")


def after_kill(training: Training, killed: float, gone: float) -> dict:
    """How long it took from a kill to the first update after it, by part, and what was lost."""
    again, done = first_update(training, killed)
    at = {what: when for what, when, _ in training.marks if when > killed}
    times = [killed, gone, at["python"], at["imported"], at["joined"], at["built"], done]
    earlier = [update for update in training.updates if update[1] < at["python"]]
    made = earlier[-1][0]
    begun = max(when for what, when, _ in training.marks if what == "built" and when < killed)
    kept = max([begun, *(when for step, when in earlier if step == again - 1)])
    return {
        "updates_made_again": made + 1 - again,
        "lost_seconds": round(killed - kept, 2),
        **{part: round(b - a, 2) for part, a, b in zip(PARTS, times, times[1:], strict=False)},
    }


def run(training: Training, minutes: float, every: float, rng: random.Random) -> list[dict]:
    """Kill and wait; a line for each kill."""
    since, lines, number = time.time(), [], 1
    while number * every < minutes * 60:
        time.sleep(max(since + number * every - time.time(), 0))
        killed, gone = kill_one(training, rng)
        found = after_kill(training, killed, gone)
        lines.append(
            {"kill": number, "seconds": round(killed - since, 1), **found, "load": round(os.getloadavg()[0], 1)}
        )
        print(json.dumps(lines[-1]), flush=True)
        number += 1
    time.sleep(max(since + minutes * 60 - time.time(), 0))
    return lines


def summary(training: Training, lines: Sequence[dict], wall: float, run_dir: Path, save_every: int) -> dict:
    """The whole."""
    counted = [line for line in read_metrics(run_dir) if "loss" in line]
    steps = [line["step"] for line in counted]
    whole = range(LOG_EVERY, steps[-1] + 1, LOG_EVERY)  # and a shorter one at the end
    assert steps in ([*whole], [*whole, steps[-1]]), "an update is missing or there twice"
    before = [0, *(line["tokens"] for line in counted)]
    seconds = [(line["tokens"] - n) / line["tokens_per_second"] for n, line in zip(before, counted, strict=False)]
    saving = [took for what, _, took in training.marks if what == "saving"]
    begun = [when for what, when, _ in training.marks if what == "saving"]
    written = [
        when - max(b for b in begun if b < when)
        for what, when, _ in training.marks
        if what == "saved" and begun[0] < when
    ]
    down = [sum(line[part] for part in PARTS) for line in lines]
    return {
        "share_that_trains": round(sum(seconds) / wall, 4),
        "wall_seconds": round(wall, 1),
        "training_seconds": round(sum(seconds), 1),
        "lost_seconds": round(sum(line["lost_seconds"] for line in lines), 1),
        "down_seconds": round(sum(down), 1),
        "saving_seconds": round(sum(saving), 1),
        "kills": len(lines),
        "updates": steps[-1],
        "update_seconds": round(statistics.median(seconds) / LOG_EVERY, 3),
        "save_every": save_every,
        "saves": len(saving),
        "a_save_stops_seconds": round(statistics.median(saving), 3),
        "a_save_is_written_after_seconds": round(statistics.median(written), 2),
        "updates_made_again": sum(line["updates_made_again"] for line in lines),
        **{part: statistics.median(line[part] for line in lines) for part in PARTS},
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=120, help="seconds between kills")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--save-every", type=int, default=50, help="updates; Young's rule, see docs/reliability.md")
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--goal", type=float, default=0.9, help="the exit status is not 0 below it")
    parser.add_argument("words", nargs="*", help="key=value of the training")
    words = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = docstrings_store(folder / "store", million_characters=3, vocab_size=2000, val_fraction=0.05)
        run_dir, restarts = folder / "run", int(words.minutes * 60 / words.every)
        settings = {"run_dir": run_dir, "data.store_dir": store, "tokenizer.path": store / "vocabulary.model"}
        settings |= SIZE if words.config == CONFIG else {}
        settings |= {"train.steps": 10**6, "train.hours": "null", "train.log_every": LOG_EVERY, "eval.every": 10**6}
        settings |= {"train.save_every": words.save_every, "schedule.decay": "constant"}
        said = ["--config", words.config, *(f"{key}={value}" for key, value in settings.items()), *words.words]
        since, training = time.time(), Training(said, restarts)
        try:
            first_update(training, since)
            lines = run(training, words.minutes, words.every, random.Random(1))
            training.processes()[0].terminate()  # asks all to save and end
            status = training.wait(300)
        finally:
            training.end()
        assert status == 0, "".join(training.rest[-40:])
        whole = summary(training, lines, time.time() - since, run_dir, words.save_every)
    print(json.dumps(whole))
    if words.out:
        words.out.write_text(to_jsonl([*lines, whole]), encoding="utf-8")
    print(f"\n{whole['share_that_trains']:.1%} of {whole['wall_seconds']:,.0f} s trained, with {whole['kills']} kills")
    sys.exit(whole["share_that_trains"] < words.goal)


if __name__ == "__main__":
    main()
