"""Results after training: metrics of the selected weights, predictions, submission files, table and plots.

RUN is the setting `run_dir`. It contains one run for each seed. Files written:

RUN/seed_1/{metrics.jsonl, result.json, best/, dev.jsonl}      for each seed; best/ is a model folder with the head of the task
RUN/{table.md, table.csv, curves.png, confusion.png, ...}      for all seeds together
RUN/model/, RUN/predictions/                                   from the seed with the best score on the first dev split
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from finetune.data.examples import Outputs, Prediction, Split
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import compute_metrics, predict_split, resolve_overhead_tokens
from finetune.trainer.inputs import RunInputs
from finetune.trainer.logger import format_scores
from finetune.trainer.plots import plot_all
from finetune.trainer.results import BEST, RESULT, Result, Summary, result_paths, seed_folder, summarize
from finetune.trainer.task_model import TaskModel, check_head, resolve_shared_backend
from xlpre.common.files import hardlink_copy, write_text
from xlpre.common.tables import to_jsonl, write_table
from xlpre.conversion.task_model_folder import TaskModelFolder, load_task_model, save_task_model
from xlpre.model.initialization import build_with_weights
from xlpre.training import checkpoint
from xlpre.training.distributed import Comm, is_rank_zero
from xlpre.training.startup import TrainingContext


def finished_seeds(inputs: RunInputs) -> set[int]:
    """Return the seeds whose runs have a result in the run folder.

    Raises:
        InputError: a result cannot be read, or was computed with other settings.
    """
    seeds = set()
    for path in result_paths(Path(inputs.config.run_dir)):
        seed, manifest = Result.read(path).seed, Result.read_manifest(path)
        inputs.check_resumable(path, manifest, inputs.manifest(seed))
        seeds.add(seed)
    return seeds


def finalize_run(inputs: RunInputs, seed: int, steps: int, train_seconds: float, context: TrainingContext) -> Outputs:
    """Evaluate the weights that `eval.keep_weights` selects, write the result, and remove the checkpoints of a run.

    Every process must call this function.

    Args:
        inputs: inputs that the runs of all seeds share.
        seed: seed of the run.
        steps: optimizer steps of the run.
        train_seconds: training time of the run.
        context: device and communication of this process.

    Returns:
        Outputs of the selected weights for the first dev split.
    """
    folder, task = seed_folder(inputs.config.run_dir, seed), inputs.task
    model, saved = _load_best(inputs, folder, context)
    outputs = [_predict(inputs, model, split, context.comm) for split in inputs.dev]
    if is_rank_zero():
        first_metrics = compute_metrics(task, inputs.dev[0], outputs[0])
        if tuned := task.tuned_settings(first_metrics):
            saved = dataclasses.replace(saved, task={**saved.task, "data": {**saved.task["data"], **tuned}})
            save_task_model(folder / BEST, saved)
        tuned_task = _build_tuned_task(inputs, saved)
        metrics: dict[str, float] = {}
        for number, (split, split_outputs) in enumerate(zip(inputs.dev, outputs, strict=True)):
            values = compute_metrics(tuned_task, split, split_outputs) if number else first_metrics
            metrics |= {f"{split.name}/{name}": value for name, value in values.items()}
            write_text(folder / f"{split.name}.jsonl", to_jsonl(tuned_task.to_predictions(split, split_outputs)))
        result = Result(
            name=inputs.config.name,
            task=task.name,
            seed=seed,
            main_metric=f"{inputs.dev[0].name}/{task.main_metric}",
            metrics=metrics,
            chance_threshold=task.chance_threshold(inputs.dev[0]),
            model_step=saved.folder.provenance["step"],
            lr=inputs.config.optim.peak_lr,
            steps=steps,
            train_seconds=train_seconds,
        )
        result.write(folder / RESULT, inputs.manifest(seed))
        shutil.rmtree(folder / checkpoint.CHECKPOINTS_DIR, ignore_errors=True)
        selection = {"best": f"the best {result.main_metric}", "last": "the last"}[inputs.config.eval.keep_weights]
        print(f"seed {seed}, weights of step {result.model_step:,} ({selection}): {format_scores(metrics)}", flush=True)
    context.comm.barrier()
    return outputs[0]


def finalize(inputs: RunInputs, outputs: Mapping[int, Outputs], context: TrainingContext) -> None:
    """Summarize all runs in the run folder, and predict the test splits with the best run. Every process must call this function.

    Args:
        inputs: inputs that the runs of all seeds share.
        outputs: outputs for the first dev split, by seed. If those of the best seed are missing, they are computed again.
        context: device and communication of this process.
    """
    config = inputs.config
    run_dir = Path(config.run_dir)
    folders = [path.parent for path in result_paths(run_dir)]
    results = [Result.read(folder / RESULT) for folder in folders]
    best = max(results, key=lambda result: result.score)
    best_folder = seed_folder(config.run_dir, best.seed)
    if is_rank_zero():
        hardlink_copy(best_folder / BEST, run_dir / "model")
    context.comm.barrier()
    model, saved = _load_best(inputs, best_folder, context)
    dev, test = inputs.dev[0], inputs.test
    test_outputs = [_predict(inputs, model, split, context.comm) for split in test]
    dev_outputs = outputs[best.seed] if best.seed in outputs else _predict(inputs, model, dev, context.comm)
    if not is_rank_zero():
        return
    task = _build_tuned_task(inputs, saved)
    predictions, test_metrics = _write_test_predictions(task, run_dir / "predictions", test, test_outputs)
    predictions[dev.name] = task.to_predictions(dev, dev_outputs)
    submission = task.write_submission(run_dir / "predictions", predictions)
    summary = summarize(results)
    write_table([summary.to_row()], run_dir)
    plot_all(run_dir, folders, inputs.task, dev, dev_outputs)
    _print_summary(summary, test_metrics, submission, best, run_dir)
    if warning := summary.chance_warning():
        print(warning, flush=True)


def _write_test_predictions(
    task: Task, folder: Path, splits: Sequence[Split], outputs: Sequence[Outputs]
) -> tuple[dict[str, list[Prediction]], dict[str, float]]:
    """Write the predictions for the test splits. Return the predictions by split, and the metrics of the labeled splits."""
    metrics: dict[str, float] = {}
    predictions: dict[str, list[Prediction]] = {}
    shutil.rmtree(folder, ignore_errors=True)  # it may contain predictions for other test examples
    folder.mkdir(parents=True)
    for split, split_outputs in zip(splits, outputs, strict=True):
        predictions[split.name] = task.to_predictions(split, split_outputs)
        write_text(folder / f"{split.name}.jsonl", to_jsonl(predictions[split.name]))
        if split.is_labeled:
            values = compute_metrics(task, split, split_outputs)
            metrics |= {f"{split.name}/{name}": value for name, value in values.items()}
        elif n_labeled := sum(example.label is not None for example in split.examples):
            print(
                f"warning: {split.name} is not evaluated: only {n_labeled:,} of its {len(split.examples):,} examples have a label. "
                "Add the missing labels, or put the labeled examples into their own file.",
                flush=True,
            )
    if metrics:
        write_text(folder / "test_metrics.json", json.dumps(metrics, indent=1))
    return predictions, metrics


def _load_best(inputs: RunInputs, folder: Path, context: TrainingContext) -> tuple[TaskModel, TaskModelFolder]:
    """Return the model with the selected weights of a run, in fp32, and the content of its folder."""
    saved = load_task_model(folder / BEST)
    check_head(folder / BEST, saved.head, inputs.task, inputs.model_config)
    model_config = resolve_shared_backend(inputs.model_config, torch.float32, context)
    model = build_with_weights(saved.weights, partial(TaskModel, model_config, inputs.task))
    return model.to(context.device), saved


def _build_tuned_task(inputs: RunInputs, saved: TaskModelFolder) -> Task:
    """Return the task with the settings saved with these weights, including tuned ones such as the threshold of SQuAD 2.0."""
    config = inputs.config
    return build_task(inputs.task.name, dataclasses.replace(config.data, **saved.task["data"]), config.model.pooling)


def _predict(inputs: RunInputs, model: TaskModel, split: Split, comm: Comm) -> Outputs:
    config = inputs.config
    overhead_tokens = resolve_overhead_tokens(config.data.forward_overhead_tokens, model.backbone.device)
    return predict_split(model, split, config.eval.batch_size, overhead_tokens, comm)


def _print_summary(
    summary: Summary, test_metrics: dict[str, float], submission: Sequence[Path], best: Result, run_dir: Path
) -> None:
    print(summary.describe())
    if test_metrics:
        print(f"test metrics of seed {best.seed}: {format_scores(test_metrics)}")
    if submission:
        print(f"submission files: {', '.join(map(str, submission))}")
    print(f"model (seed {best.seed}): {run_dir / 'model'}; predict with: python finetune/predict.py {run_dir} FILE")
    print(f"tables and plots: {run_dir}", flush=True)
