"""Record of a fine-tuning run for the model card: examples, settings and scores of the exported weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config import FinetuneConfig, TaskDataConfig
from finetune.tasks.base import Task
from finetune.trainer.results import RESULT, Result, chance_baseline, read_run, seed_folder
from xlpre.config.loader import load_config
from xlpre.conversion.model_card import (
    EvalResult,
    TrainingRecord,
    describe_optimizer,
    describe_schedule,
    describe_software,
    describe_start,
    find_run,
    hub_dataset,
    hub_model,
    show_source,
    task_tag,
)
from xlpre.conversion.provenance import read_provenance
from xlpre.training.lr_schedule import format_lr
from xlpre.training.metrics_writer import format_duration

# Hub names of benchmarks whose dev files are published, by the name of the task before the slash
BENCHMARKS = {"glue": "nyu-mll/glue", "race": "ehovy/race"}
SQUAD = {"squad/1.1": "rajpurkar/squad", "squad/2.0": "rajpurkar/squad_v2"}
# names of metrics at https://huggingface.co/metrics
HUB_METRICS = {
    "accuracy": "accuracy",
    "f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "exact": "exact_match",
}


def read_record(source: Path, task: Task, provenance: Mapping[str, Any]) -> TrainingRecord:
    """Read the settings and scores of a run. If a file of the run is damaged, print a warning and use only the provenance.

    Args:
        source: folder of the run, or of a model in it. For a model outside a run folder, only the provenance is known.
        task: task of the model.
        provenance: provenance of the model.
    """
    try:
        return _read_record(find_run(source), task, provenance)
    except (OSError, ValueError) as error:
        print(f"warning: the model card does not contain settings and scores: {error}")
        return _read_record(None, task, provenance)


def _read_record(run_dir: Path | None, task: Task, provenance: Mapping[str, Any]) -> TrainingRecord:
    init_from = provenance.get("init_from")
    base_model = hub_model(init_from or "")
    config = load_config(FinetuneConfig, run_dir / "config.yaml") if run_dir and "seed" in provenance else None
    if run_dir is None or config is None or config.name != provenance["name"]:
        procedure = {"Initial weights": describe_start(init_from)} if init_from else {}
        return TrainingRecord({"Task": f"`{task.name}`"}, procedure, base_model=base_model)
    result, scores = _read_result(run_dir, provenance), {}
    if result:
        scores = {**result.metrics, **_read_test_metrics(run_dir, result)}
    return TrainingRecord(
        data=_describe_data(config.data, task),
        procedure=_describe_procedure(config, provenance, result),
        evaluation=_describe_scores(scores, result),
        evaluation_note=_note(run_dir, result, config.eval.keep_weights) if result else "",
        datasets=_datasets(config.data),
        base_model=None if config.from_scratch else base_model,
        benchmarks=_benchmarks(config, task, scores),
    )


def _read_result(run_dir: Path, provenance: Mapping[str, Any]) -> Result | None:
    """Return the result of the run that the weights are from, if it was computed with these weights; otherwise None."""
    path = seed_folder(run_dir, provenance["seed"]) / RESULT
    result = Result.read(path) if path.exists() else None
    return result if result and result.model_step == provenance["step"] else None


def _read_test_metrics(run_dir: Path, result: Result) -> dict[str, float]:
    """Return the metrics of labeled test examples, which are predicted with the weights of the best seed, those of RUN/model."""
    path, best = run_dir / "predictions" / "test_metrics.json", read_provenance(run_dir / "model")
    if not path.exists() or best is None or best["seed"] != result.seed:
        return {}
    return json.loads(path.read_text("utf-8"))


def _sources(data: TaskDataConfig) -> list[str]:
    groups: tuple[Sequence[str] | None, ...] = (
        data.train,
        data.dev,
        data.test,
        data.queries,
        data.documents,
        data.qrels,
    )
    return [*([data.dir] if data.dir else []), *(source for group in groups for source in group or ())]


def _datasets(data: TaskDataConfig) -> list[str]:
    return sorted({name for source in _sources(data) if (name := hub_dataset(source))})


def _describe_data(data: TaskDataConfig, task: Task) -> dict[str, str]:
    rows = {"Task": f"`{task.name}`"}
    if data.dir:
        rows["Data"] = show_source(data.dir)
    for name in ("train", "dev", "test", "queries", "documents", "qrels"):
        if files := getattr(data, name):
            rows[f"Files for {name}"] = ", ".join(map(show_source, files))
    if data.max_train_examples:
        rows["Training examples"] = f"at most {data.max_train_examples:,}, sampled at random"
    return rows


def _describe_procedure(config: FinetuneConfig, provenance: Mapping[str, Any], result: Result | None) -> dict[str, str]:
    optim, schedule = config.optim, config.schedule
    start = "new" if config.from_scratch else describe_start(config.init_from)
    rows = {
        "Initial weights": start,
        "Steps": f"{provenance['step']:,} of {config.train.steps:,}, each with {config.train.global_batch_size:,} examples",
        "Length": _describe_length(config.data, str(config.task).startswith("squad/")),
        "Optimizer": describe_optimizer(
            "AdamW", f"{format_lr(optim.peak_lr)}, layer decay {optim.layer_decay:g}", optim
        ),
        "Schedule": describe_schedule(schedule),
        "Pooling": f"`{config.model.pooling}`",
        "Seed": str(provenance["seed"]),
    }
    if result:
        rows["Training time"] = format_duration(result.train_seconds)
    return rows | describe_software(provenance)


def _describe_length(data: TaskDataConfig, is_squad: bool) -> str:
    if is_squad:
        return f"windows of at most {data.max_seq_len} tokens, which start {data.doc_stride} tokens apart"
    rules = {
        "truncate": "longer texts are truncated",
        "memory": "longer texts are read window by window, with memory; the exported model reads one window",
        "windows": "the predictions for windows of longer texts are pooled; the exported model reads one window",
    }
    return f"at most {data.max_seq_len} tokens in a row; {rules[data.long_text]}"


def _describe_scores(scores: Mapping[str, float], result: Result | None) -> dict[str, str]:
    rows = {name.replace("/", ", "): f"{value:.4f}" for name, value in scores.items()}
    if result:
        rows["Chance"] = f"up to {result.chance_threshold:.4f} is no better than {chance_baseline(result.main_metric)}"
    return rows


def _note(run_dir: Path, result: Result, keep_weights: str) -> str:
    """Return a paragraph on how the scores were selected."""
    summary = read_run(run_dir)
    if len(summary.scores) == 1:
        runs = f"These are the scores of one run, with seed {result.seed}."
    else:
        runs = (
            f"These are the scores of seed {result.seed}, one of {len(summary.scores)} runs. {summary.main_metric} of all runs: "
            f"{summary.to_row()['median']} (median), {summary.to_row()['min']} (minimum), {summary.to_row()['max']} (maximum)."
        )
    if keep_weights == "best" or len(summary.scores) > 1:
        runs += " The weights were selected by their score on the same dev examples, which makes that score optimistic."
    return runs


def _benchmarks(config: FinetuneConfig, task: Task, scores: Mapping[str, float]) -> list[EvalResult]:
    """Return the scores on the published dev files of a benchmark, for the Hub's metadata. Custom files are not a benchmark."""
    family, _, subset = task.name.partition("/")
    dataset = SQUAD.get(task.name) or BENCHMARKS.get(family)
    has_own_files = config.data.train or config.data.dev or config.data.test
    if dataset is None or has_own_files or task.name == "glue/ax":  # glue/ax is evaluated on the dev file of MNLI
        return []
    return [
        EvalResult(
            task_type=task_tag(task.name, task.head_kind),
            dataset_type=dataset,
            dataset_name=task.name,
            dataset_config=None if family == "squad" else subset.replace("-", "") or "all",
            dataset_split=split,
            metric_type=HUB_METRICS[metric],
            metric_value=value,
        )
        for (split, _, metric), value in ((name.partition("/"), value) for name, value in scores.items())
        if metric in HUB_METRICS
    ]
