"""The end of a run and of all runs: scores of the weights that were kept, predictions, files to submit, table, pictures.

RUN/seed_1/{metrics.jsonl, result.json, kept/, dev.jsonl}      of each run; kept/ is a model folder with its head
RUN/{table.md, table.csv, curves.png, confusion.png, ...}      of all runs
RUN/model/, RUN/predictions/                                   of the run that was best on the first dev split
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.config import FinetuneConfig
from finetune.data.examples import Outputs, Prediction, Split
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import answer, device_pass_tokens, measure
from finetune.trainer.inputs import RunInputs
from finetune.trainer.logger import shown
from finetune.trainer.plots import draw
from finetune.trainer.results import Result, Summary, summarize
from finetune.trainer.task_model import check_head
from finetune.trainer.task_model import TaskModel
from finetune.trainer.trainer import KEPT, in_agreement
from xlpre.common.files import hardlink_copy, write_text
from xlpre.common.tables import to_jsonl, write_table
from xlpre.conversion.task_model import TaskModelFolder, load_task_model, save_task_model
from xlpre.model.initialization import build_with_weights
from xlpre.training import checkpoint
from xlpre.training.distributed import Comm, is_rank_zero

RESULT = "result.json"


def seed_folder(config: FinetuneConfig, seed: int) -> Path:
    """Where a run goes."""
    return Path(config.run_dir) / f"seed_{seed}"


def finished_seeds(foundation: RunInputs) -> set[int]:
    """Seeds whose runs have results, in the folder of these runs.

    Raises:
        ValueError: one that cannot be read, or was made with other settings, with whatever seed.
    """
    found = set()
    for path in sorted(Path(foundation.config.run_dir).glob(f"seed_*/{RESULT}")):
        seed, facts = Result.read(path).seed, Result.facts(path)
        checkpoint.check_compatible(path, facts, json.loads(json.dumps(foundation.facts(seed))))
        found.add(seed)
    return found


def finalize_run(
    foundation: RunInputs, seed: int, steps: int, seconds: float, comm: Comm, device: torch.device
) -> Outputs:
    """Measure the weights that were kept, as they are in their folder, and say what they were worth. Checkpoints are removed.

    Returns:
        What they answer to the first dev split.
    """
    folder = seed_folder(foundation.config, seed)
    model, saved = _kept(foundation, folder, device, comm)
    answers = [_answer(foundation, model, split, comm) for split in foundation.dev]
    if is_rank_zero():
        deciding = measure(foundation.task, foundation.dev[0], answers[0])
        decided = foundation.task.tuned_settings(deciding)
        if decided:
            saved = dataclasses.replace(saved, task={**saved.task, "data": {**saved.task["data"], **decided}})
            save_task_model(folder / KEPT, saved)
        task = _task_of(foundation, saved)
        found: dict[str, float] = {}
        for split, outputs in zip(foundation.dev, answers, strict=True):
            scores = deciding if split is foundation.dev[0] else measure(task, split, outputs)
            found |= {f"{split.name}/{name}": score for name, score in scores.items()}
            write_text(folder / f"{split.name}.jsonl", to_jsonl(task.to_predictions(split, outputs)))
        kept_step = saved.folder.provenance["step"]
        result = _result(foundation, seed, found, kept_step=kept_step, steps=steps, seconds=seconds)
        result.write(folder / RESULT, foundation.facts(seed))
        shutil.rmtree(folder / checkpoint.CHECKPOINTS_DIR, ignore_errors=True)
        print(f"seed {seed}: kept the weights of step {kept_step:,}: {shown(found)}", flush=True)
    comm.barrier()
    return answers[0]


def _result(foundation: RunInputs, seed: int, found: dict[str, float], **course: Any) -> Result:
    task = foundation.task
    return Result(
        name=foundation.config.name,
        task=task.name,
        seed=seed,
        score=f"{foundation.dev[0].name}/{task.main_metric}",
        scores=found,
        chance=task.chance_threshold(foundation.dev[0]),
        **course,
    )


def finalize(
    foundation: RunInputs, seeds: Sequence[int], answered: Mapping[int, Outputs], comm: Comm, device: torch.device
) -> None:
    """Put the runs together, and predict with the best of them.

    Args:
        foundation: what they share.
        seeds: of the runs.
        answered: what some of them, by seed, answer to the first dev split; others are asked again.
        comm: between the processes.
        device: of this process.
    """
    config = foundation.config
    run_dir, folders = Path(config.run_dir), [seed_folder(config, seed) for seed in seeds]
    results = [Result.read(folder / RESULT) for folder in folders]
    best = max(results, key=lambda result: result.main)
    folder = seed_folder(config, best.seed)
    if is_rank_zero():
        hardlink_copy(folder / KEPT, run_dir / "model")
    comm.barrier()
    model, saved = _kept(foundation, folder, device, comm)
    tests, measured = foundation.test, foundation.dev[0]
    answers = [_answer(foundation, model, split, comm) for split in tests]
    known = answered[best.seed] if best.seed in answered else _answer(foundation, model, measured, comm)
    if not is_rank_zero():
        return
    task = _task_of(foundation, saved)
    predictions, tested = _write_tests(task, run_dir / "predictions", tests, answers)
    predictions[measured.name] = task.to_predictions(measured, known)
    written = task.write_submission(run_dir / "predictions", predictions)
    summary = summarize(results)
    write_table([summary.row()], run_dir)
    draw(run_dir, folders, foundation.task, measured, known)
    _say(summary, tested, written, best, run_dir)


def _write_tests(
    task: Task, folder: Path, tests: Sequence[Split], answers: Sequence[Outputs]
) -> tuple[dict[str, list[Prediction]], dict[str, float]]:
    """Predictions by split, which are written, and scores where the truth is known."""
    found: dict[str, float] = {}
    predictions: dict[str, list[Prediction]] = {}
    shutil.rmtree(folder, ignore_errors=True)  # of other test examples
    folder.mkdir(parents=True)
    for split, outputs in zip(tests, answers, strict=True):
        predictions[split.name] = task.to_predictions(split, outputs)
        write_text(folder / f"{split.name}.jsonl", to_jsonl(predictions[split.name]))
        if split.is_labelled:
            found |= {f"{split.name}/{name}": score for name, score in measure(task, split, outputs).items()}
        elif known := sum(example.label is not None for example in split.examples):
            print(
                f"warning: {split.name} is answered and not measured: the truth of {known:,} of its {len(split.examples):,} examples is "
                "known; fill in that of the others, or give those that have it a file of their own",
                flush=True,
            )
    if found:
        write_text(folder / "test_scores.json", json.dumps(found, indent=1))
    return predictions, found


def _kept(foundation: RunInputs, folder: Path, device: torch.device, comm: Comm) -> tuple[TaskModel, TaskModelFolder]:
    """The model that a run kept, in fp32, and what its folder holds."""
    saved = load_task_model(folder / KEPT)
    check_head(folder / KEPT, saved.head, foundation.task, foundation.shape)
    shape = in_agreement(foundation.shape, device, torch.float32, comm)
    model = build_with_weights(saved.weights, partial(TaskModel, shape, foundation.task))
    return model.to(device).eval(), saved


def _task_of(foundation: RunInputs, saved: TaskModelFolder) -> Task:
    """The task with what was decided for these weights."""
    config = foundation.config
    return build_task(config.task, dataclasses.replace(config.data, **saved.task["data"]), config.model.pooling)


def _answer(foundation: RunInputs, model: TaskModel, split: Split, comm: Comm) -> Outputs:
    config = foundation.config
    return answer(
        model,
        split,
        config.eval.batch_size,
        device_pass_tokens(config.data.forward_overhead_tokens, model.device),
        comm,
    )


def _say(summary: Summary, tested: dict[str, float], written: Sequence[Path], best: Result, run_dir: Path) -> None:
    print(summary.sentence())
    if tested:
        print(f"on the test examples, with the weights of seed {best.seed}: {shown(tested)}")
    if written:
        print(f"written in the official format: {', '.join(map(str, written))}")
    print(f"the model of seed {best.seed} is in {run_dir / 'model'}, tables and pictures are in {run_dir}", flush=True)
