r"""An update of a fine-tuning beside Hugging Face's, in tokens of text a second.

python benchmarks/speed/finetuning.py --config '{"n_layer": 4, "d_model": 256, "n_head": 4, "d_inner": 1024}'
python benchmarks/speed/finetuning.py --data glue_data --vocabulary spiece.model --rounds 5
python benchmarks/speed/finetuning.py --task squad/1.1 --data squad --vocabulary spiece.model --rows 8 --max-len 384

`xlpre` is what finetune/run.py does in an update: deal, pad, forward, backward, DeepSpeed's engine, clip, AdamW. `hf` is the loop of
Hugging Face's examples with their class for the task, each batch padded to its longest row; `hf-max` pads to --max-len, as
run_glue.py and run_qa_beam_search.py do if nothing else is said. With --stage, `xlpre-stage-N` is xlpre under that ZeRO stage. All read
the same batches of random order and start from the same weights; none is timed unless loss and gradients of the first batch, parameter by
parameter, without dropout, are those of `hf`. They take turns in one process. Ratios are medians of pairs of processor time, which
neighbours disturb least. One JSON line each. Without --data, rows are random tokens with lengths as MRPC's or SQuAD's have them: normal,
with their mean and deviation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down many times on shared cores
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.agreement import describe_difference
from benchmarks.common.json_config import read_json_config
from benchmarks.speed.finetuning_contenders import HuggingFace, Xlpre, both, numbers_of
from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.data.features import Features, pair_to_row
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import resolve_overhead_tokens
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import init_env

DEFAULT = {"vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "dropout": 0.1}
# tokens of the training rows, mean and deviation, in a vocabulary of 32,000 pieces (--data says them)
LENGTHS = {"glue/mrpc": (53.1, 12.2), "squad/1.1": (189.1, 75.5)}


def random_items(task: str, c: dict[str, Any], count: int, max_len: int) -> list[Features]:
    """Pairs of random tokens, and random answers."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        n = int(np.clip(rng.normal(*LENGTHS[task]), 12, max_len)) - 3
        a, b = np.split(rng.integers(10, c["vocab_size"], n), [n // 2])
        start, end = sorted(int(place) for place in rng.integers(0, n // 2, 2))
        spans = {"start": np.int64(start), "end": np.int64(end), "impossible": np.float32(0)}
        answers = spans if task.startswith("squad") else {"label": np.int64(number % 2)}
        found.append(Features(number, (pair_to_row(a.tolist(), b.tolist(), max_len),), answers))
    return found


def race(contenders: dict[str, Any], tokens: list[int]) -> list[dict[str, Any]]:
    """A line for each, after an update that is not counted; they take turns, every other time in the opposite order."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for step in range(len(tokens)):
        for name, one in list(contenders.items())[:: -1 if step % 2 else 1]:
            wall, cpu = time.perf_counter(), time.process_time()
            one.update(step)
            took[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    lines = []
    for name in contenders:
        wall, cpu = (np.array(times[1:]) for times in zip(*took[name], strict=True))
        ours = [seconds for _, seconds in took["xlpre"][1:]]
        lines.append(
            {
                "impl": name,
                "tokens_per_second": round(sum(tokens[1:]) / wall.sum(), 1),
                "tokens_per_cpu_second": round(sum(tokens[1:]) / cpu.sum(), 1),
                "update_cpu_s": round(statistics.median(cpu), 3),
                "times_as_slow_as_xlpre": round(statistics.median(cpu / ours), 3),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="{}", help=f"JSON, or a file of it; what is left out is as in {json.dumps(DEFAULT)}"
    )
    parser.add_argument("--task", choices=LENGTHS, default="glue/mrpc")
    parser.add_argument("--data", help="the folder of the task's files, whose training examples are read")
    parser.add_argument("--vocabulary", type=Path, help="of --data")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage", type=int, choices=range(4), help="a ZeRO stage to time xlpre under, too")
    words = parser.parse_args()
    if bool(words.data) != bool(words.vocabulary):
        parser.error("--data and --vocabulary go together")
    init_env()
    c = read_json_config(words.config, DEFAULT)
    task = build_task(words.task, TaskDataConfig(dir=words.data or "", max_seq_len=words.max_len), "last")
    if words.data:
        items = task.encode(task.read_split("train"), Tokenizer.load(words.vocabulary))
    else:
        items = random_items(words.task, c, max(256, (words.rounds + 1) * words.rows), words.max_len)
    dealer = LengthBucketSampler(items, task.padding_side, 0, 1, resolve_overhead_tokens(None, torch.device("cpu")))
    ours, theirs = both(c, task)
    beside = {}
    if words.stage is not None:
        beside[f"xlpre-stage-{words.stage}"] = Xlpre(deepcopy(ours), dealer, words.rows, words.stage)
    of_hf = (ours.shape, task, items, dealer, words.rows)
    contenders = {
        "xlpre": Xlpre(ours, dealer, words.rows),
        **beside,
        "hf": HuggingFace(theirs[0], *of_hf, None),
        "hf-max": HuggingFace(theirs[1], *of_hf, words.max_len),
    }
    torch.set_num_threads(words.threads)  # starting DeepSpeed has set them to all
    expected, losses = contenders["hf"].met(), {}
    for name, one in contenders.items():
        met = one.met()
        losses[name] = met[0]
        if reason := describe_difference(met, expected):
            sys.exit(f"{name} beside hf: {reason}")
    del expected, met  # as much memory as two models
    lengths = np.array([item.length for item in items])
    tokens = [int(lengths[numbers_of(dealer, step, words.rows)].sum()) for step in range(words.rounds + 1)]
    of_all = {
        "rows": words.rows,
        "threads": words.threads,
        "max_len": words.max_len,
        "lengths": {"mean": round(float(lengths.mean()), 1), "deviation": round(float(lengths.std()), 1)},
        "task": words.task,
        "examples": "real" if words.data else "random",
        "config": c,
        "torch": torch.__version__,
    }
    for line in race(contenders, tokens):
        print(json.dumps({**line, "loss": round(losses[line["impl"]], 6), **of_all}), flush=True)


if __name__ == "__main__":
    main()
