"""Record of a pretraining run for the model card: text, settings and evaluations of the exported weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig, describe_changes, load_run_config
from pretrain.trainer.inputs import FORMAT
from xlpre.common.errors import InputError
from xlpre.common.messages import counted
from xlpre.config.loader import load_config
from xlpre.conversion.model_card import (
    TrainingRecord,
    describe_optimizer,
    describe_schedule,
    describe_software,
    describe_start,
    find_run,
    hub_dataset,
    hub_model,
    show_source,
)
from xlpre.conversion.model_folder import ModelFolder, resolve_model_dir
from xlpre.conversion.provenance import read_provenance
from xlpre.data.store import META
from xlpre.model.config import ModelConfig
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.corpus import TextConfig
from xlpre.training import checkpoint
from xlpre.training.metrics_writer import format_duration, read_metrics

EVALUATION_NOTE = (
    "The loss is comparable between runs with the same vocabulary, validation text and targets; bits per byte are also "
    "comparable between vocabularies. The unigram baseline predicts every token by its frequency in the training text."
)


def find_pretraining_run(source: Path) -> Path | None:
    """Return the folder of the pretraining run that a model folder belongs to, or None. `source` may also be the folder of the run."""
    provenance = read_provenance(resolve_model_dir(source)) or {}
    run_dir = find_run(source) if "data_fingerprint" in provenance else None  # that of a fine-tuned model has none
    if run_dir is None or run_dir == source.absolute():
        return run_dir
    try:
        name = load_config(PretrainConfig, run_dir / "config.yaml").name
    except InputError:  # not a file of this project
        return None
    return run_dir if provenance.get("name", name) == name else None  # otherwise a copy of the model beside another run


def read_record(source: Path, folder: ModelFolder) -> TrainingRecord:
    """Read what a run records about its weights. If a file of the run is damaged, print a warning and return an empty record.

    Args:
        source: folder of the run, or of a model in it. Other folders give an empty record.
        folder: the model.
    """
    try:
        return _read_record(source, folder)
    except (OSError, ValueError) as error:
        print(f"warning: the model card does not describe the training: {error}")
        return TrainingRecord()


def _read_record(source: Path, folder: ModelFolder) -> TrainingRecord:
    # the provenance of a fine-tuned model has no data fingerprint
    if "data_fingerprint" not in folder.provenance or (run_dir := find_run(source)) is None:
        return TrainingRecord()
    config = load_run_config(run_dir)
    if config.name != folder.provenance["name"]:
        return TrainingRecord()
    meta = _read_store_meta(config, folder.provenance["data_fingerprint"])
    step = folder.provenance["step"]
    evaluation = _last_evaluation(run_dir, step)
    return TrainingRecord(
        data=_describe_data(config.text, meta),
        procedure=_describe_procedure(config, folder, _read_manifest(run_dir, step)),
        evaluation=_describe_evaluation(evaluation),
        evaluation_note=EVALUATION_NOTE if evaluation else "",
        datasets=sorted({name for source in config.text.sources if (name := hub_dataset(source))}),
        base_model=hub_model(config.init_from or ""),
    )


def _read_store_meta(config: PretrainConfig, fingerprint: str) -> dict[str, Any]:
    """Return the meta.json of the store that the run has read; empty if the store does not exist."""
    try:
        meta = json.loads((Path(config.data.store_dir) / META).read_text("utf-8"))
        return meta if meta["fingerprint"] == fingerprint else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _describe_data(text: TextConfig, meta: Mapping[str, Any]) -> dict[str, str]:
    """Describe the text of a run from the text settings of its store and, if the store exists, its counts."""
    names = [
        "docstrings of installed Python packages" if source == "docstrings" else show_source(source)
        for source in text.sources
    ]
    if len(names) > 1:
        names = [f"{name} ({weight:g} times)" for name, weight in zip(names, text.sources.values(), strict=True)]
    rows = {"Text": ", ".join(names)}
    if text.max_chars:
        rows["Limit"] = f"at most {text.max_chars:,} characters of each source"
    if text.deduplicate:
        rows["Duplicates"] = "documents with identical text were removed"
    if not meta:
        return {**rows, "Size": "Unknown: the token store of the run did not exist when the model was exported."}
    if files := meta.get("files"):
        rows["Files"] = f"{len(files):,}, with {sum(files.values()) / 1e6:,.1f} MB"
    for split, name in (("train", "Training"), ("val", "Validation")):
        counts = (f"{meta[f'{split}_n_{kind}']:,} {kind}" for kind in ("tokens", "documents", "sentences"))
        rows[name] = ", ".join(counts)
    return rows


def _describe_procedure(config: PretrainConfig, folder: ModelFolder, manifest: Mapping[str, Any]) -> dict[str, str]:
    objective, optim, schedule, step = config.objective, config.optim, config.schedule, folder.provenance["step"]
    settings = [f"`name={objective.name}`"]
    if objective.name != "causal":
        settings += [f"`partial_k={objective.partial_k:g}` (1 of {objective.partial_k:g} tokens is a target)"]
        settings += [f"`max_span={objective.max_span}`"]
    if objective.next_sentence:
        settings += ["with next-sentence prediction"]
    lr = f"{optim.lr:g}" + (f", {optim.matrix_lr:g} for matrices" if optim.muon and optim.matrix_lr else "")
    rows = {
        "Objective": f"{OBJECTIVES[objective.name].description} {', '.join(settings)}",
        "Initial weights": describe_start(config.init_from),
        "Windows": f"{config.data.seq_len} tokens, {config.data.reuse_len} of which enter memory"
        + (", read in both directions" if config.data.bidirectional else "")
        + (", with pairs of segments" if config.data.has_pairs else ""),
        "Memory": _describe_memory(folder.config),
        "Steps": f"{step:,} of {config.train.steps:,}, each with {config.train.global_batch_size:,} windows",
        "Optimizer": describe_optimizer("Muon and AdamW" if optim.muon else "AdamW", lr, optim),
        "Schedule": describe_schedule(schedule),
        "Dropout": f"{folder.config.dropout:g}; {folder.config.dropatt:g} for attention weights",
        "Seed": str(config.seed),
    }
    if manifest:
        n_processes = manifest["world_size"]
        rows["Arrangement"] = f"{counted(n_processes, 'DeepSpeed process')}, {manifest['train.precision']}"
        for changes in manifest.get("setting_changes", []):
            rows[f"From step {changes['step']:,}"] = describe_changes(changes)
        rows["Tokens read"] = f"{manifest['tokens']:,}, with the overlap of windows"
        rows["Training time"] = format_duration(manifest["train_seconds"])
    return rows | describe_software(folder.provenance)


def _describe_memory(model_config: ModelConfig) -> str:
    return f"{model_config.mem_len} hidden states of each layer" if model_config.mem_len else "none"


def _read_manifest(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the manifest of the checkpoint of a step; empty if it was removed, or another version of xlpre wrote it."""
    for path in checkpoint.list_complete(run_dir / checkpoint.CHECKPOINTS_DIR):
        manifest = checkpoint.read_manifest(path)
        if manifest["step"] == step and manifest["format"] == FORMAT:
            return manifest
    return {}


def _last_evaluation(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the latest evaluation up to `step` that has a finite loss, or an empty dict."""
    records = [x for x in read_metrics(run_dir) if x.get("val_loss") is not None and x["step"] <= step]
    return records[-1] if records else {}


def _describe_evaluation(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Return the results of an evaluation on validation text, with the step of the weights."""
    if not evaluation:
        return {}
    rows = {
        "Evaluated at step": f"{evaluation['step']:,}",
        "Validation loss": f"{evaluation['val_loss']:.3f} nats per target",
        "Unigram baseline": f"{evaluation['val_unigram_loss']:.3f} nats per target",
        "Accuracy": f"{evaluation['val_accuracy']:.1%} of the targets",
    }
    if (bits := evaluation.get("val_bpb")) is not None:
        rows["Bits per byte"] = f"{bits:.3f}"
    if (percent := evaluation.get("val_minimal_pairs")) is not None:
        rows["Minimal pairs"] = f"{percent:.1f} % correct"
    for name, value in evaluation.items():
        if name.startswith("val_") and name.endswith("_accuracy") and name != "val_accuracy" and value is not None:
            rows[f"Accuracy of {name[4:-9].replace('_', ' ')}"] = f"{value:.1%}"
    return rows
