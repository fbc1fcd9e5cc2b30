"""FinetuneConfig: all settings of a fine-tuning run, and how they are combined from a file and the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xlpre.common.errors import InputError, check_minimum
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import load_config
from xlpre.training.config import LayerwiseOptimConfig, TrainConfig, check_compile
from xlpre.training.deepspeed_overrides import check_overrides
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.run_dir import check_run_identity

# Constants of `derive_lr`, for models narrower than the published ones; docs/finetuning.md has the measurements.
BASE_WIDTH = 768  # d_model of the narrowest published model
WIDTH_EXPONENT = 2.0
MAX_DERIVED_LR = 3e-4
# `epochs` is converted to train.steps, and `warmup_ratio` to schedule.warmup_steps.
REPLACES = {"epochs": "train.steps", "warmup_ratio": "schedule.warmup_steps"}


@dataclass(frozen=True)
class TaskDataConfig:
    """Examples of the task. docs/finetuning.md describes the file layout of each task.

    Attributes:
        dir: folder with the files of the task as distributed, or the parent of that folder; or hf:NAME, a Hub dataset with the
            same content.
        train: files of training examples, or hf:NAME[/CONFIG]:SPLIT. null: the files that the task is distributed with.
        dev: files of validation examples. null: the files that the task is distributed with. If the task has no
            dev files, the fraction `val_fraction` of the training examples is held out.
        test: files to predict. null: the files that the task is distributed with, if they are present.
        text: for `classify` and `regress`, the column with the text, or the two columns of a text pair.
        label: column with the label: a class name, or a number for `regress`.
        labels: names of the classes. null: the labels of the training files, sorted.
        label_scale: for `regress`, mean and standard deviation that normalize the labels. null: computed from the training
            examples.
        queries: for `rank`, files with the texts of the queries. For `rank`, `train`, `dev` and `test` are TREC run files, which
            list the candidate documents of each query.
        documents: for `rank`, files with the texts of the documents.
        qrels: for `rank`, files with relevance judgments.
        val_fraction: fraction of the training examples to hold out for validation, if there are no dev files.
        max_train_examples: number of training examples to use, sampled with the seed. null: all.
        max_seq_len: maximum number of tokens in a row, or in a window of a long text.
        long_text: handling of texts longer than `max_seq_len`. `truncate`: keep the first tokens, as in the paper. `memory`: read
            window by window; the head reads the last window, whose memory holds the previous ones. `windows`: predict overlapping
            windows one by one and pool the predictions. `memory` and `windows` are only for tasks with a single text.
        mem_len: for `long_text=memory`, number of positions in memory. null: the memory length of the model.
        window_stride: for `long_text=windows`, number of tokens from the start of one window to the next. null: half a window.
        window_pooling: for `long_text=windows`, pool the logits (or numbers) of the windows by `mean` or `max`.
        max_option_len: for RACE, maximum number of tokens of a question together with one option. Excess tokens are cut off at
            the start.
        max_question_len: for SQuAD, maximum number of tokens in a question. Excess tokens are cut off at the end.
        doc_stride: for SQuAD, number of tokens from the start of one window of a long text to the next.
        max_answer_len: for SQuAD, maximum number of tokens in a predicted span.
        null_score_threshold: for SQuAD 2.0, predict "no answer" if its log-odds exceed this value. null: the threshold with the
            best F1 on the dev examples.
        forward_overhead_tokens: fixed cost of one more forward pass, expressed as a number of tokens. A batch is split into
            smaller ones of similar row length if this saves more padding than the extra passes cost. null: 128 on a CPU, 8192 on
            a GPU.
    """

    dir: str | None = None
    train: list[str] | None = None
    dev: list[str] | None = None
    test: list[str] | None = None
    text: list[str] | None = None
    label: str = "label"
    labels: list[str] | None = None
    label_scale: list[float] | None = None
    queries: list[str] | None = None
    documents: list[str] | None = None
    qrels: list[str] | None = None
    val_fraction: float = 0.1
    max_train_examples: int | None = None
    max_seq_len: int = 128
    long_text: Literal["truncate", "memory", "windows"] = "truncate"
    mem_len: int | None = None
    window_stride: int | None = None
    window_pooling: Literal["mean", "max"] = "mean"
    max_option_len: int = 128
    max_question_len: int = 64
    doc_stride: int = 128
    max_answer_len: int = 64
    null_score_threshold: float | None = None
    forward_overhead_tokens: int | None = None

    @property
    def root(self) -> str:
        """`dir`, or an empty path (the working directory) if it is not set."""
        return self.dir or ""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise InputError(
                f"data.val_fraction={self.val_fraction} is invalid: the held-out fraction must be above 0 and below 1. "
                "Set a fraction such as 0.1."
            )
        for name in ("max_seq_len", "max_option_len"):
            self._check_minimum(name, 8)
        for name in ("max_question_len", "doc_stride", "max_answer_len", "max_train_examples"):
            self._check_minimum(name, 1)
        self._check_minimum("forward_overhead_tokens", 0)
        if self.label_scale is not None and (len(self.label_scale) != 2 or self.label_scale[1] <= 0):
            raise InputError(
                f"data.label_scale={self.label_scale} is invalid: it must be a mean and a standard deviation above 0. "
                "Leave it out to take both from the training examples."
            )
        self._check_long_text()

    def _check_minimum(self, name: str, minimum: int) -> None:
        """Raise InputError if a setting is below its minimum. A setting of null is accepted."""
        default = type(self).__dataclass_fields__[name].default
        remedy = "Set null for the default." if default is None else f"The default is {default}."
        check_minimum(f"data.{name}", getattr(self, name), minimum, remedy)

    def _check_long_text(self) -> None:
        """Raise InputError if a setting of one long-text strategy is set with another strategy."""
        self._check_minimum("mem_len", 1)
        if self.mem_len is not None and self.long_text != "memory":
            raise InputError(
                f"data.mem_len={self.mem_len} is invalid with data.long_text={self.long_text}: it has no effect. "
                "Set data.long_text=memory, or data.mem_len=null."
            )
        max_text_len = self.max_seq_len - 2  # <sep> and <cls> follow the text
        if self.window_stride is not None and not 1 <= self.window_stride <= max_text_len:
            raise InputError(
                f"data.window_stride={self.window_stride} is invalid: it must be between 1 and {max_text_len} (data.max_seq_len minus "
                "two special tokens). Set null for half a window."
            )
        if self.window_stride is not None and self.long_text != "windows":
            raise InputError(
                f"data.window_stride={self.window_stride} is invalid with data.long_text={self.long_text}: it has no effect. "
                "Set data.long_text=windows, or data.window_stride=null."
            )
        if self.window_pooling != "mean" and self.long_text != "windows":
            raise InputError(
                f"data.window_pooling={self.window_pooling} is invalid with data.long_text={self.long_text}: it has no effect. "
                "Set data.long_text=windows, or leave it out."
            )


@dataclass(frozen=True)
class TaskModelConfig:
    """Model settings that are not part of the pretrained weights.

    Attributes:
        pooling: pooling of a row into one vector. `last`: hidden state of <cls>, the last token. `first`: hidden state of the first
            token. `text_mean`: mean over all tokens except padding (the published code includes padding, so its result depends
            on the length of the other rows). `attn`: attention of a learned query to these tokens.
        dropout: dropout probability. null: as in the model folder.
        dropatt: dropout probability of attention weights. null: as in the model folder.
        attention_backend: implementation of attention, as in pretraining.
    """

    pooling: Literal["last", "first", "text_mean", "attn"] = "last"
    dropout: float | None = None
    dropatt: float | None = None
    attention_backend: Literal["auto", "reference", "sdpa", "cpu", "triton"] = "auto"

    def __post_init__(self) -> None:
        for name in ("dropout", "dropatt"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise InputError(
                    f"model.{name}={value} is invalid: it must be at least 0 and below 1. Set null for the value of the model folder."
                )


@dataclass(frozen=True)
class TaskEvalConfig:
    """Evaluation on the dev examples.

    Attributes:
        every: optimizer steps between evaluations.
        batch_size: examples per forward pass of a process.
        keep_weights: weights that become the result. `best`: those of the evaluation with the best main metric on the first dev
            split. `last`: those of the last step.
        early_stopping_patience: stop after this number of evaluations in a row without a new best score. null: never stop early.
    """

    every: int = 500
    batch_size: int = 32
    keep_weights: Literal["best", "last"] = "best"
    early_stopping_patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "early_stopping_patience"):
            remedy = "Set null to never stop early." if name == "early_stopping_patience" else ""
            check_minimum(f"eval.{name}", getattr(self, name), 1, remedy)


@dataclass(frozen=True)
class TaskTrainConfig(TrainConfig):
    """Length, batch size and bookkeeping of a run.

    Attributes:
        global_batch_size: examples per optimizer step, over all processes and micro-steps.
        micro_batch_size: examples of one process per forward and backward pass. null: all examples of the process. The number of
            micro-steps (gradient accumulation) is global_batch_size / (number of processes * micro_batch_size).
    """

    steps: int = 1000


@dataclass(frozen=True)
class TaskOptimConfig(LayerwiseOptimConfig):
    """AdamW with smaller updates for lower layers, and a learning rate that fits the width of the model.

    Attributes:
        lr: peak learning rate. null: derived from `base_lr` and the width of the model.
        base_lr: for lr=null, the learning rate of models with a d_model of 768 or more, such as the published ones. Narrower models
            get base_lr * (768 / d_model)^2, at most 3e-4. The start-up lines and result.json contain the derived value.
    """

    lr: float | None = None  # type: ignore[assignment]
    base_lr: float = 2e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_lr <= 0:
            raise InputError(f"optim.base_lr={self.base_lr} is invalid: it must be positive. Set optim.base_lr=2e-5.")

    @property
    def peak_lr(self) -> float:
        """Peak learning rate. Only for settings in which RunInputs has replaced lr=null by a number."""
        assert self.lr is not None, "RunInputs derives it"
        return self.lr

    def derive_lr(self, d_model: int) -> float:
        """Return the learning rate for a model of width `d_model`.

        It is `base_lr` for a width of at least 768. A narrower model has base_lr * (768 / d_model)^2, rounded to one significant digit
        and at most 3e-4.
        """
        if d_model >= BASE_WIDTH or self.base_lr >= MAX_DERIVED_LR:
            return self.base_lr
        return min(float(f"{self.base_lr * (BASE_WIDTH / d_model) ** WIDTH_EXPONENT:.0e}"), MAX_DERIVED_LR)


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning run.

    Attributes:
        task: name of the task: `classify`, `regress` or `rank` for your own files, or a public task. Public tasks are
            glue/cola, glue/sst-2, glue/mrpc, glue/qqp, glue/sts-b, glue/mnli, glue/qnli, glue/rte, glue/wnli, glue/ax, race,
            race/middle, race/high, squad/1.1, squad/2.0, imdb, yelp-2, yelp-5, ag-news, dbpedia, amazon-2, amazon-5.
        name: name of the run, and of its folder.
        run_dir: folder for all output.
        init_from: folder of the pretrained model: a run folder, a model folder of xlpre, a Hugging Face XLNet, or the original
            TensorFlow release.
        from_scratch: take only the shape and the vocabulary from `init_from` and initialize new weights, as a baseline without
            pretraining.
        seed: random seed of the initial head, the order of the examples, and dropout.
        num_seeds: number of runs, with the seeds `seed`, `seed` + 1, and so on.
        epochs: passes over the training examples. Replaces train.steps.
        warmup_ratio: fraction of the steps that are warm-up steps. Replaces schedule.warmup_steps.
        task_overrides: `key=value` settings for each task name, applied if that task is selected. They override the config file.
            The command line overrides them, and so do the settings of a file that extends this one.
        deepspeed: settings that are passed to DeepSpeed unchanged.
    """

    task: str | None = None
    name: str = "finetuned"
    run_dir: str = "runs/${name}"
    init_from: str | None = None
    from_scratch: bool = False
    seed: int = 1
    num_seeds: int = 1
    epochs: float | None = None
    warmup_ratio: float | None = None
    task_overrides: dict[str, list[str]] = field(default_factory=dict)
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    model: TaskModelConfig = field(default_factory=TaskModelConfig)
    optim: TaskOptimConfig = field(default_factory=TaskOptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TaskTrainConfig = field(default_factory=TaskTrainConfig)
    eval: TaskEvalConfig = field(default_factory=TaskEvalConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run_identity(self.name, self.run_dir, self.seed, self.num_seeds)
        if self.epochs is not None and self.epochs <= 0:
            raise InputError(f"epochs={self.epochs} is invalid: it must be above 0. Set null to use train.steps.")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            raise InputError(
                f"warmup_ratio={self.warmup_ratio} is invalid: it must be at least 0 and below 1. Set null to use schedule.warmup_steps."
            )
        check_compile(self.train, self.model.attention_backend)
        check_overrides(self.deepspeed)


def task_overrides(config: FinetuneConfig) -> Sequence[str]:
    """Return the `key=value` settings that the config file adds for the selected task."""
    return config.task_overrides.get(config.task or "", [])


def load_finetune_config(file: str | Path, overrides: Sequence[str]) -> FinetuneConfig:
    """Load the settings of `finetune/run.py --config FILE OVERRIDES`.

    Raises:
        InputError: see `load_config` and `apply_precedence`.
    """
    config = load_config(FinetuneConfig, file, overrides, task_overrides)
    explicit_keys = ExplicitKeys.read(file, overrides)
    return apply_precedence(config, explicit_keys.args, explicit_keys.own_file)


def apply_precedence(config: FinetuneConfig, *keys: Collection[str]) -> FinetuneConfig:
    """Let settings of the user override those of a config file that would replace them.

    These are train.steps, which `epochs` replaces; schedule.warmup_steps, which `warmup_ratio` replaces; and optim.base_lr, which
    optim.lr replaces.

    Args:
        config: the settings.
        keys: keys that the user sets: on the command line, then those in a file that extends a preset. The former win.

    Raises:
        InputError: the command line or the file sets both settings of a pair.
    """
    for ratio, number in REPLACES.items():
        value = getattr(config, ratio)
        if value is not None and _is_replaced(ratio, f"{value}", number, keys):
            unset: dict[str, Any] = {ratio: None}
            config = dataclasses.replace(config, **unset)
    lr = config.optim.lr
    if lr is not None and _is_replaced("optim.lr", f"{lr:g}", "optim.base_lr", keys):
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=None))
    return config


def _is_replaced(key: str, value: str, other: str, keys: Sequence[Collection[str]]) -> bool:
    """Return True if the user has set `other` instead of `key`, which would replace it. Raise InputError if they have set both at once."""
    for level in keys:
        if key in level and other in level:
            raise InputError(f"{key}={value} is invalid: it replaces {other}, which is set, too. Set only one of them.")
        if key in level or other in level:
            return other in level
    return False
