r"""Compare the time of a fine-tuning step of xlpre and of Hugging Face, in tokens of text per second.

python benchmarks/speed/finetuning.py --config '{"n_layer": 4, "d_model": 256, "n_head": 4, "d_inner": 1024}'
python benchmarks/speed/finetuning.py --data glue_data --vocabulary spiece.model --rounds 5
python benchmarks/speed/finetuning.py --task squad/1.1 --data squad --vocabulary spiece.model --rows 8 --max-len 384

The contenders are:

    xlpre           a step of finetune/run.py: sampling, padding, forward, backward, DeepSpeed, clipping, AdamW
    xlpre-stage-N   a step of finetune/run.py with ZeRO stage N (--stage)
    hf              a step of the loop in Hugging Face's examples, with their model and each batch padded to its longest row
    hf-max          a step of `hf` with batches padded to --max-len, the default of run_glue.py and run_qa_beam_search.py

The contenders read the same random batches, and start from the same weights. Before timing, the loss and the gradient of each
parameter for the first batch, without dropout, must agree with those of `hf`. The contenders take turns in one process. Prints one JSON
line per contender. A speed ratio is the median, over pairs of turns, of the ratio of processor times, which other programs affect least.

Without --data, rows are random tokens. Their lengths have a normal distribution with the mean and the deviation of MRPC or SQuAD.
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

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow each other down severely on shared cores
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.agreement import describe_difference
from benchmarks.common.json_config import read_json_config
from benchmarks.speed.finetuning_contenders import FinetuningContender, HuggingFace, Xlpre, feature_indices, make_models
from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.data.features import Features, pair_to_row
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import resolve_overhead_tokens
from xlpre.common.cli_main import run_main
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.training.distributed import init_env

DEFAULT = {"vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "dropout": 0.1}
# mean and standard deviation of the number of tokens of a training row, with a vocabulary of 32,000 (measured with --data)
LENGTHS = {"glue/mrpc": (53.1, 12.2), "squad/1.1": (189.1, 75.5)}


def random_features(task: str, c: dict[str, Any], n_features: int, max_len: int) -> list[Features]:
    """Return the features of pairs of random texts, with labels for the task."""
    rng = np.random.default_rng(0)
    features = []
    for number in range(n_features):
        n = int(np.clip(rng.normal(*LENGTHS[task]), 12, max_len)) - 3
        a, b = np.split(rng.integers(10, c["vocab_size"], n), [n // 2])
        start, end = sorted(int(position) for position in rng.integers(0, n // 2, 2))
        span = {"start": np.int64(start), "end": np.int64(end), "impossible": np.float32(0)}
        labels = span if task.startswith("squad") else {"label": np.int64(number % 2)}
        features.append(Features(number, (pair_to_row(a.tolist(), b.tolist(), max_len),), labels))
    return features


def race(contenders: dict[str, FinetuningContender], n_tokens: list[int]) -> list[dict[str, Any]]:
    """Time the contenders in turns, in alternating order. Return the JSON line of each.

    Args:
        contenders: contenders by name.
        n_tokens: number of tokens of each step. The first step is the warm-up.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for step in range(len(n_tokens)):
        for name, contender in list(contenders.items())[:: -1 if step % 2 else 1]:
            wall, cpu = time.perf_counter(), time.process_time()
            contender.train_step(step)
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    lines = []
    for name in contenders:
        wall, cpu = (np.array(values[1:]) for values in zip(*times[name], strict=True))
        xlpre_cpu = [seconds for _, seconds in times["xlpre"][1:]]
        lines.append(
            {
                "impl": name,
                "tokens_per_second": round(sum(n_tokens[1:]) / wall.sum(), 1),
                "tokens_per_cpu_second": round(sum(n_tokens[1:]) / cpu.sum(), 1),
                "step_cpu_s": round(statistics.median(cpu), 3),
                "times_as_slow_as_xlpre": round(statistics.median(cpu / xlpre_cpu), 3),
            }
        )
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="{}", help=f"JSON, or a file with it; defaults: {json.dumps(DEFAULT)}")
    parser.add_argument("--task", choices=LENGTHS, default="glue/mrpc")
    parser.add_argument("--data", help="folder of the task's data set; its training examples are read")
    parser.add_argument("--vocabulary", type=Path, help="SentencePiece model for --data")
    parser.add_argument("--rows", type=int, default=32, help="examples per step")
    parser.add_argument("--max-len", type=int, default=128, help="maximum number of tokens of a row")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage", type=int, choices=range(4), help="also time xlpre with this ZeRO stage")
    args = parser.parse_args()
    if bool(args.data) != bool(args.vocabulary):
        parser.error("--data needs --vocabulary, and --vocabulary needs --data: set both or neither")
    init_env()
    c = read_json_config(args.config, DEFAULT)
    task = build_task(args.task, TaskDataConfig(dir=args.data, max_seq_len=args.max_len), "last")
    if args.data:
        features = task.encode(task.read_split("train"), load_tokenizer(args.vocabulary))
    else:
        features = random_features(args.task, c, max(256, (args.rounds + 1) * args.rows), args.max_len)
    overhead_tokens = resolve_overhead_tokens(None, torch.device("cpu"))
    sampler = LengthBucketSampler(features, task.padding_side, 0, 1, overhead_tokens)
    model, hf_models = make_models(c, task)
    with_stage = {}
    if args.stage is not None:
        with_stage[f"xlpre-stage-{args.stage}"] = Xlpre(deepcopy(model), sampler, args.rows, args.stage)
    shared = (model.model_config, task, features, sampler, args.rows)
    contenders: dict[str, FinetuningContender] = {
        "xlpre": Xlpre(model, sampler, args.rows),
        **with_stage,
        "hf": HuggingFace(hf_models[0], *shared, None),
        "hf-max": HuggingFace(hf_models[1], *shared, args.max_len),
    }
    torch.set_num_threads(args.threads)  # DeepSpeed has set them to all cores
    expected, losses = contenders["hf"].loss_and_gradients(), {}
    for name, contender in contenders.items():
        result = contender.loss_and_gradients()
        losses[name] = result[0]
        if reason := describe_difference(result, expected):
            sys.exit(f"{name} and hf: {reason}")
    del expected, result  # these gradients take as much memory as two models
    lengths = np.array([feature.length for feature in features])
    n_tokens = [int(lengths[feature_indices(sampler, step, args.rows)].sum()) for step in range(args.rounds + 1)]
    settings = {
        "rows": args.rows,
        "threads": args.threads,
        "max_len": args.max_len,
        "lengths": {"mean": round(float(lengths.mean()), 1), "deviation": round(float(lengths.std()), 1)},
        "task": args.task,
        "examples": "real" if args.data else "random",
        "config": c,
        "torch": torch.__version__,
    }
    for line in race(contenders, n_tokens):
        print(json.dumps({**line, "loss": round(losses[line["impl"]], 6), **settings}), flush=True)


if __name__ == "__main__":
    run_main(main)
