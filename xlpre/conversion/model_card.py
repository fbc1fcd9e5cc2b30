"""Model card: the README.md of an exported model, with the metadata of the Hugging Face Hub.

A card contains only facts that the model folder and its run record. Paths are shortened to names, because cards are public.

Source: https://github.com/huggingface/hub-docs, modelcard.md (metadata) and docs/hub/model-cards.md (content).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCardData

from xlpre.conversion.model_folder import ModelFolder
from xlpre.conversion.provenance import CONVERTED_FROM
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.hub import HF_PREFIX, is_hf_dataset
from xlpre.training.config import OptimConfig
from xlpre.training.lr_schedule import ScheduleConfig

Library = Literal["transformers", "xlpre"]
# keys that only the owner of the model knows; the Hub accepts a card without them
TO_FILL_IN = """\
# Choose a license before you publish: https://huggingface.co/docs/hub/repositories-licenses
# license: apache-2.0
# Language of the training text, as an ISO 639-1 code:
# language: en
"""
UNKNOWN = "Unknown: the export did not find the run of this model."
UNKNOWN_EVALUATION = "No evaluation of these weights is recorded."
LIMITS = (
    "Only the evaluation below is recorded. It does not cover bias, safety or factual accuracy.",
    "A model repeats the errors and biases of its training text.",
    "Expect worse results for other languages and kinds of text than those it was trained on.",
)


@dataclass(frozen=True)
class TrainingRecord:
    """Facts about the training of a model. Unknown facts are left out.

    Attributes:
        data: rows (name and value) of the table of training data.
        procedure: rows of the table of the training procedure.
        evaluation: rows of the table of results.
        evaluation_note: paragraph under the results.
        datasets: Hub names of the datasets.
        base_model: Hub name of the model that training started from.
        benchmarks: results on public benchmarks, for the Hub's leaderboards.
    """

    data: Mapping[str, str] = field(default_factory=dict)
    procedure: Mapping[str, str] = field(default_factory=dict)
    evaluation: Mapping[str, str] = field(default_factory=dict)
    evaluation_note: str = ""
    datasets: Sequence[str] = ()
    base_model: str | None = None
    benchmarks: Sequence[EvalResult] = ()


@dataclass(frozen=True)
class ModelCard:
    """Content of a model card.

    Attributes:
        name: name of the exported folder, or of its repository on the Hub as OWNER/NAME.
        library: library that opens the folder.
        pipeline_tag: pipeline tag of the Hub; None if none fits.
        tags: further tags of the Hub.
        summary: first paragraph of the card.
        intended_use: paragraph on the intended use.
        usage: Python code that opens the model and uses it.
        record: facts about the training.
    """

    name: str
    library: Library
    pipeline_tag: str | None
    tags: Sequence[str]
    summary: str
    intended_use: str
    usage: str
    record: TrainingRecord

    def render(self) -> str:
        """Return the text of README.md."""
        record, title = self.record, self.name.rpartition("/")[2]
        metadata = ModelCardData(
            library_name=self.library,
            tags=["xlnet", "transformer-xl", *self.tags],
            pipeline_tag=self.pipeline_tag,
            datasets=list(record.datasets) or None,
            base_model=record.base_model,
            model_name=title if record.benchmarks else None,
            eval_results=list(record.benchmarks) or None,
        )
        limits = "\n".join(f"- {limit}" for limit in LIMITS)
        return f"""\
---
{TO_FILL_IN}{metadata.to_yaml()}
---

# {title}

{self.summary}

## Intended use and limits

{self.intended_use}

{limits}

## How to use the model

`{self.name}` is the exported folder, or its repository on the Hub. Replace it with the path of your copy.

```python
{self.usage.strip()}
```

## Training data

{_table(record.data) or UNKNOWN}

## Training procedure

{_table(record.procedure) or UNKNOWN}

## Evaluation

{_table(record.evaluation) or UNKNOWN_EVALUATION}
{f"{chr(10)}{record.evaluation_note}{chr(10)}" if record.evaluation_note else ""}
## References

- Yang et al., 2019: XLNet: Generalized Autoregressive Pretraining for Language Understanding ([arXiv:1906.08237](https://arxiv.org/abs/1906.08237)).
- Dai et al., 2019: Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context ([arXiv:1901.02860](https://arxiv.org/abs/1901.02860)).
"""


def language_model_card(folder: ModelFolder, name: str, export_format: str, record: TrainingRecord) -> ModelCard:
    """Return the card of an exported language model.

    Args:
        folder: the model.
        name: name of the exported folder, or of its repository on the Hub.
        export_format: `native`, `hf` or `tf`.
        record: facts about its training.
    """
    objective = folder.objective
    if export_format == "hf":
        # text generation in transformers uses the query stream, which a causal model does not train
        pipeline_tag: str | None = "fill-mask" if OBJECTIVES[objective].sees_ahead else "feature-extraction"
        usage = HF_USAGE_MASKED if OBJECTIVES[objective].sees_ahead else HF_USAGE_CAUSAL
    else:
        pipeline_tag = "fill-mask" if OBJECTIVES[objective].sees_ahead else None
        usage = NATIVE_USAGE_CLOZE if OBJECTIVES[objective].sees_ahead else NATIVE_USAGE
        if folder.tokenizer is None:
            usage = NATIVE_USAGE_WEIGHTS
    uses = (
        "for hidden states, and to predict missing words"
        if OBJECTIVES[objective].sees_ahead
        else "and for hidden states"
    )
    return ModelCard(
        name=name,
        library="transformers" if export_format == "hf" else "xlpre",
        pipeline_tag=pipeline_tag,
        tags=[OBJECTIVE_TAGS[objective], *(["tensorflow"] if export_format == "tf" else [])],
        summary=f"A language model, pretrained by {OBJECTIVE_NAMES[objective]}. {_describe_shape(folder)}",
        intended_use=f"Use the model as a start for fine-tuning, {uses}.",
        usage=_fill_in(usage, name, download=export_format != "hf"),
        record=dataclasses.replace(record, data={**(record.data or {"Text": UNKNOWN}), **_describe_vocabulary(folder)}),
    )


def task_model_card(
    folder: ModelFolder,
    name: str,
    task: str,
    head: str,
    n_texts: int,
    labels: Sequence[str],
    record: TrainingRecord,
    no_answer_threshold: float | None = None,
) -> ModelCard:
    """Return the card of a fine-tuned model, exported for transformers.

    Args:
        folder: its language model.
        name: name of the exported folder, or of its repository on the Hub.
        task: name of the task.
        head: kind of the head, a key of `hf_heads.HEADS`.
        n_texts: number of texts in an example, for tasks with one row per example.
        labels: names of the classes.
        record: facts about its fine-tuning.
        no_answer_threshold: log-odds of "no answer" above which a question has none; None if every question has an answer.
    """
    usage = TASK_USAGE[head]
    if no_answer_threshold is not None:
        usage += f'if outputs.cls_logits[0] > {no_answer_threshold:.4g}:  # log-odds of "no answer"\n    answer = ""\n'
    if n_texts == 2:
        usage = usage.replace('tokenizer("A text.",', 'tokenizer("A text.", "Its second text.",')
    classes = (
        f" Its classes are {', '.join(f'`{label}`' for label in labels)}."
        if labels and head == "classification"
        else ""
    )
    return ModelCard(
        name=name,
        library="transformers",
        pipeline_tag=task_tag(task, head),
        tags=[],
        summary=f"An XLNet, fine-tuned on the task `{task}`. {_describe_shape(folder)}",
        intended_use=f"Use the model for texts like those of the task `{task}`.{classes} {TASK_INPUTS[head]}".strip(),
        usage=_fill_in(usage, name),
        record=record,
    )


def task_tag(task: str, head: str) -> str:
    """Return the pipeline tag of the Hub for a fine-tuned model."""
    return "text-ranking" if task == "rank" else TASK_TAGS[head]


def short_name(path: str) -> str:
    """Return the last part of a path; for the model folder of a run, the name of the run. The other folders of the path stay private."""
    parts = [part for part in Path(path).parts if part not in ("/", ".", "..", "~")]
    while len(parts) > 1 and parts[-1] in ("model", "best"):
        parts.pop()
    return parts[-1] if parts else "unknown"


def hub_model(path: str) -> str | None:
    """Return the Hub name of a model folder in the cache of huggingface_hub; None if the folder is elsewhere."""
    match = re.search(r"(?:^|/)models--((?:(?!--)[^/])+)--([^/]+)/snapshots/", f"{path}/")
    return f"{match[1]}/{match[2]}" if match else None


def hub_dataset(source: str) -> str | None:
    """Return the Hub name of the dataset in `hf:OWNER/NAME[/CONFIG][:SPLIT]`; None for files and for datasets on disk."""
    if not is_hf_dataset(source) or source.startswith((f"{HF_PREFIX}.", f"{HF_PREFIX}/", f"{HF_PREFIX}~")):
        return None
    name = source.removeprefix(HF_PREFIX).partition(":")[0]
    return None if Path(name).exists() else "/".join(name.split("/")[:2])


def show_source(source: str) -> str:
    """Return the name of a text source for the card: the name of a Hub dataset, or the last part of a path."""
    return f"`{source if hub_dataset(source) else short_name(source.removeprefix(HF_PREFIX))}`"


def without_paths(folder: ModelFolder) -> ModelFolder:
    """Return the folder with short names instead of paths in its provenance, which an export publishes."""
    if not (start := folder.provenance.get("init_from")):
        return folder
    return dataclasses.replace(
        folder, provenance={**folder.provenance, "init_from": hub_model(start) or short_name(start)}
    )


def describe_start(init_from: str | None) -> str:
    """Return a description of the weights that training started from."""
    return f"those of `{hub_model(init_from) or short_name(init_from)}`" if init_from else "new"


def describe_optimizer(name: str, lr: str, optim: OptimConfig) -> str:
    """Return a description of an optimizer.

    Args:
        name: name of the optimizer.
        lr: description of the learning rate, and of what else the optimizer has.
        optim: its other settings.
    """
    clipping = f"gradients clipped at {optim.max_grad_norm:g}" if optim.max_grad_norm else "no gradient clipping"
    return (
        f"{name}, learning rate {lr}, betas {optim.beta1:g} and {optim.beta2:g}, eps {optim.eps:g}, weight decay "
        f"{optim.weight_decay:g}, {clipping}"
    )


def describe_schedule(schedule: ScheduleConfig) -> str:
    """Return a description of the learning rate over the steps."""
    return f"{schedule.warmup_steps:,} warm-up steps, then {schedule.decay.replace('_', '-')}"


def describe_software(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row with the versions of the software that wrote the weights; no row if they are not recorded."""
    versions = {name: version for name, version in provenance.get("versions", {}).items() if version}
    revision = provenance.get("revision")
    names = [f"{name} {version}" for name, version in versions.items()] + (
        [f"revision `{revision}`"] if revision else []
    )
    return {"Software": ", ".join(names)} if names else {}


def find_run(source: Path) -> Path | None:
    """Return the folder of the run that `source` belongs to (or is); None if no parent folder has a config.yaml."""
    path = source.absolute()
    candidates = [path, *list(path.parents)[:3]]  # RUN, RUN/model, RUN/seed_1/best, RUN/checkpoints/step_00000020/model
    return next((folder for folder in candidates if (folder / "config.yaml").is_file()), None)


def _describe_shape(folder: ModelFolder) -> str:
    config = folder.config
    n_parameters = sum(weight.numel() for weight in folder.weights.values())
    is_ours = bool(folder.provenance) and CONVERTED_FROM not in folder.provenance
    return (
        f"It is a Transformer-XL with {config.n_layer} layers, width {config.d_model}, {config.n_head} heads and "
        f"{n_parameters:,} parameters{', trained with xlpre' if is_ours else ''}."
    )


def _describe_vocabulary(folder: ModelFolder) -> dict[str, str]:
    if (tokenizer := folder.tokenizer) is None:
        return {"Vocabulary": f"none in this folder; the model has {folder.config.vocab_size:,} tokens"}
    kind = "SentencePiece" if tokenizer.kind == "sentencepiece" else f"Table of {tokenizer.kind}"
    return {"Vocabulary": f"{kind}, {len(tokenizer):,} pieces; preprocessing `{tokenizer.preprocess}`"}


def _table(rows: Mapping[str, str]) -> str:
    """Return a Markdown table of two columns, or an empty string if there are no rows."""
    if not rows:
        return ""
    lines = [f"| {name} | {_escape(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fill_in(usage: str, name: str, download: bool = False) -> str:
    """Insert `name` into usage code. With `download`, code for a Hub repository (a name with a slash) downloads it first."""
    if download and "/" in name:
        usage = "from huggingface_hub import snapshot_download\n\n" + usage
        return usage.replace('"NAME"', f'snapshot_download("{name}")', 1).replace('"NAME"', f'"{name}"')
    return usage.replace("NAME", name)


OBJECTIVE_TAGS = {
    "permutation": "permutation-language-modeling",
    "causal": "causal-language-modeling",
    "denoising": "masked-language-modeling",
}
OBJECTIVE_NAMES = {
    "permutation": "permutation language modeling",
    "causal": "causal language modeling",
    "denoising": "masked language modeling",
}
HF_USAGE_MASKED = """\
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("NAME")
model = AutoModelForMaskedLM.from_pretrained("NAME", trust_remote_code=True).eval()  # runs modeling_masked_lm.py of the folder

inputs = tokenizer("A text with one <mask> word.", return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[inputs.input_ids == tokenizer.mask_token_id][0]  # (V,)
predictions = tokenizer.convert_ids_to_tokens(logits.topk(5).indices.tolist())
"""
HF_USAGE_CAUSAL = """\
import torch
from transformers import AutoTokenizer, XLNetLMHeadModel

tokenizer = AutoTokenizer.from_pretrained("NAME")
model = XLNetLMHeadModel.from_pretrained("NAME").eval()

# one text at a time: transformers cannot combine this model with an attention mask of several rows
inputs = tokenizer("The beginning of a", add_special_tokens=False, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0, -1]  # (V,), for the next token; `generate` predicts from another stream, which was not trained
predictions = tokenizer.convert_ids_to_tokens(logits.topk(5).indices.tolist())
"""
NATIVE_USAGE = """\
import xlpre

lm = xlpre.load("NAME")
continuation = lm.generate(["The beginning of a"], max_new_tokens=20)[0].text
"""
NATIVE_USAGE_WEIGHTS = """\
from xlpre.conversion.model_folder import load_folder

model = load_folder("NAME").model()  # reads token ids; the folder has no vocabulary
"""
NATIVE_USAGE_CLOZE = """\
import xlpre

lm = xlpre.load("NAME")
predictions = lm.predict_blanks("A text with one ____ word.").predictions[0]
"""
_OPEN_TASK = """\
import torch
from transformers import {0}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("NAME")
model = {0}.from_pretrained("NAME").eval()

"""
TASK_TAGS = {
    "classification": "text-classification",
    "regression": "text-classification",
    "multiple_choice": "multiple-choice",
    "span": "question-answering",
}
TASK_INPUTS = {
    "classification": "",
    "regression": "It predicts a number.",
    "multiple_choice": "It chooses one of several answers to a question about a passage.",
    "span": "It finds the answer to a question in a paragraph. The question-answering pipeline of transformers does not load this head.",
}
TASK_USAGE = {
    "classification": _OPEN_TASK.format("AutoModelForSequenceClassification")
    + """\
inputs = tokenizer("A text.", truncation=True, return_tensors="pt")
with torch.no_grad():
    probabilities = model(**inputs).logits[0].softmax(-1)  # (classes,)
label = model.config.id2label[int(probabilities.argmax())]
""",
    "regression": _OPEN_TASK.format("AutoModelForSequenceClassification")
    + """\
inputs = tokenizer("A text.", truncation=True, return_tensors="pt")
with torch.no_grad():
    value = float(model(**inputs).logits[0, 0])
""",
    "multiple_choice": _OPEN_TASK.format("AutoModelForMultipleChoice")
    + """\
passage, question, options = "A passage.", "A question?", ["one answer", "another answer", "a third", "a fourth"]
answers = [question.replace("_", x) if "_" in question else f"{question} {x}" for x in options]  # as in training
inputs = tokenizer([passage] * 4, answers, padding=True, return_tensors="pt")
with torch.no_grad():
    probabilities = model(**{key: rows[None] for key, rows in inputs.items()}).logits[0].softmax(-1)  # (options,)
answer = options[int(probabilities.argmax())]
""",
    "span": _OPEN_TASK.format("XLNetForQuestionAnswering")
    + """\
inputs = tokenizer("A paragraph with the answer.", "A question?", return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
start, end = int(outputs.start_top_index[0, 0]), int(outputs.end_top_index[0, 0])  # the most likely ones
answer = tokenizer.decode(inputs.input_ids[0, start : end + 1])
""",
}
