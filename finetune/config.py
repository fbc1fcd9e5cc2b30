"""FinetuneConfig: every setting of a fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from xlpre.training.deepspeed_engine import TrainConfig, check_compiled
from xlpre.training.deepspeed_overrides import check_overrides
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.optimizer import LayerwiseOptimConfig
from xlpre.training.run_dir import check_identity


@dataclass(frozen=True)
class TaskDataConfig:
    """The examples of a task. docs/finetuning.md has the layout of each.

    Attributes:
        dir: the folder that the task is distributed as, or the one that holds it; or hf:NAME, of a dataset of the same content.
        train: files of training examples, or hf:NAME[/CONFIG]:SPLIT of a dataset; empty: as distributed.
        dev: files to measure on; empty: as distributed, or a part of the training examples where there are none.
        test: files to predict; empty: as distributed, where they are there.
        text: columns (fields) with the text, or the two texts; of `classify` and `regress`.
        label: the column with the label (or number).
        labels: the labels; empty: those of the training files, sorted.
        label_scale: of `regress`, mean and standard deviation of the numbers, which are learned as distances from the one in the other;
            empty: those of the training examples.
        queries: of `rank`, files with the texts of queries; `train`, `dev` and `test` are TREC runs there.
        documents: of `rank`, files with the texts of documents.
        qrels: of `rank`, files with judgements.
        val_fraction: the share of training examples to measure on, where there are no others.
        max_train_examples: train on so many examples, drawn by the seed; null: all.
        max_seq_len: tokens of a row at most, and of a window.
        long_text: what becomes of a text that is longer: `cut`, as published; `memory`: it is read window by window, and the head reads
            the last one, which remembers those before; `windows`: windows that overlap are answered one by one, and their answers
            pooled. Of one text only.
        mem_len: of `long_text=memory`, how many hidden states are remembered; null: as many as the model does.
        window_stride: of `long_text=windows`, tokens from one window to the next; null: half of a window.
        window_pooling: of `long_text=windows`, the `mean` or the largest (`max`) of the windows' logits, or numbers.
        max_option_len: of a row's tokens, those of question and option at most, where a task has options; the last ones are kept.
        max_question_len: of a row's tokens, those of a question about a long text at most; the first ones are kept.
        doc_stride: a text that is too long is read in windows; each begins so many tokens after the one before.
        max_answer_len: tokens of an answer out of a text at most.
        null_score_threshold: no answer is given where the log-odds that there is none are above it, and scores are those of that; null: what
            was best on dev (0 where nothing was measured).
        forward_overhead_tokens: so many tokens take as long as one more forward pass; batches are cut so that padding costs less than that.
            null: 128, on a GPU 8192.
    """

    dir: str = ""
    train: list[str] = field(default_factory=list)
    dev: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    label: str = "label"
    labels: list[str] = field(default_factory=list)
    label_scale: list[float] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    qrels: list[str] = field(default_factory=list)
    val_fraction: float = 0.1
    max_train_examples: int | None = None
    max_seq_len: int = 128
    long_text: Literal["cut", "memory", "windows"] = "cut"
    mem_len: int | None = None
    window_stride: int | None = None
    window_pooling: Literal["mean", "max"] = "mean"
    max_option_len: int = 128
    max_question_len: int = 64
    doc_stride: int = 128
    max_answer_len: int = 64
    null_score_threshold: float | None = None
    forward_overhead_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ValueError(
                f"data.val_fraction ({self.val_fraction}) is a share of the training examples: above 0, below 1"
            )
        if self.max_train_examples is not None and self.max_train_examples < 1:
            raise ValueError(
                f"data.max_train_examples ({self.max_train_examples}) must be at least 1, or null for all examples"
            )
        if min(self.max_seq_len, self.max_option_len) < 8:
            raise ValueError(
                f"data.max_seq_len ({self.max_seq_len}) and data.max_option_len ({self.max_option_len}) must be at least 8"
            )
        if min(self.max_question_len, self.doc_stride, self.max_answer_len) < 1:
            raise ValueError(
                f"data.max_question_len ({self.max_question_len}), data.doc_stride ({self.doc_stride}) and data.max_answer_len "
                f"({self.max_answer_len}) must be at least 1"
            )
        if self.forward_overhead_tokens is not None and self.forward_overhead_tokens < 0:
            raise ValueError(
                f"data.forward_overhead_tokens ({self.forward_overhead_tokens}) must be at least 0, or null"
            )
        if self.label_scale and (len(self.label_scale) != 2 or self.label_scale[1] <= 0):
            raise ValueError(
                f"data.label_scale ({self.label_scale}) must be a mean and a standard deviation above 0; or leave it out"
            )
        self._check_long()

    def _check_long(self) -> None:
        if self.mem_len is not None and (self.long_text != "memory" or self.mem_len < 1):
            raise ValueError(
                f"data.mem_len ({self.mem_len}) must be at least 1 and goes with data.long_text=memory; or null"
            )
        room = self.max_seq_len - 2  # for a text and its two symbols
        if self.window_stride is not None and (self.long_text != "windows" or not 1 <= self.window_stride <= room):
            raise ValueError(
                f"data.window_stride ({self.window_stride}) must be between 1 and {room} (data.max_seq_len without two symbols) and goes "
                "with data.long_text=windows; or null"
            )
        if self.window_pooling != "mean" and self.long_text != "windows":
            raise ValueError(
                f"data.window_pooling={self.window_pooling} has no effect without data.long_text=windows; leave it out"
            )


@dataclass(frozen=True)
class TaskModelConfig:
    """What the folder of weights does not decide.

    Attributes:
        pooling: how a row becomes one vector: `last` (its <cls>), `first`, `text_mean` (of its tokens; the published mean is of
            padding, too, of which a row has here as much as its batch happens to need), `attn` (a learned attention).
        dropout: null: as the folder has it.
        dropatt: of attention probabilities; null: as the folder has it.
        attention_backend: who computes it, see pretraining.
    """

    pooling: Literal["last", "first", "text_mean", "attn"] = "last"
    dropout: float | None = None
    dropatt: float | None = None
    attention_backend: Literal["auto", "reference", "sdpa", "cpu", "triton"] = "auto"

    def __post_init__(self) -> None:
        for name in ("dropout", "dropatt"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"model.{name} ({value}) must be at least 0 and below 1, or null")


@dataclass(frozen=True)
class TaskEvalConfig:
    """Measuring on the dev examples.

    Attributes:
        every: updates between evaluations.
        batch_size: examples in one forward pass of a process.
        keep_weights: which weights are the result: `best` of all evaluations, or `last`.
        early_stopping_patience: stop after so many evaluations in a row without a better score; null: never.
    """

    every: int = 500
    batch_size: int = 32
    keep_weights: Literal["best", "last"] = "best"
    early_stopping_patience: int | None = None

    def __post_init__(self) -> None:
        if min(self.every, self.batch_size) < 1 or (
            self.early_stopping_patience is not None and self.early_stopping_patience < 1
        ):
            raise ValueError(
                f"eval.every ({self.every}) and eval.batch_size ({self.batch_size}) must be at least 1, eval.early_stopping_patience ({self.early_stopping_patience}) too, or null"
            )


@dataclass(frozen=True)
class TaskTrainConfig(TrainConfig):
    """The course of a run.

    Attributes:
        batch_size: examples of an update, over all processes and accumulation.
        batch_warmup_steps: of pretraining only; here batches are of one size.
    """

    steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_warmup_steps:
            raise ValueError(
                f"train.batch_warmup_steps ({self.batch_warmup_steps}) has no place in fine-tuning: batches are of one size; leave it out"
            )


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning.

    Attributes:
        task: its name: glue/cola, glue/sst-2, glue/mrpc, glue/qqp, glue/sts-b, glue/mnli, glue/qnli, glue/rte, glue/wnli, glue/ax,
            race, race/middle, race/high, squad/1.1, squad/2.0, imdb, yelp-2, yelp-5, ag-news, dbpedia, amazon-2, amazon-5;
            `classify`, `regress` and `rank` for files of one's own.
        name: the run's name, which also names its folder.
        run_dir: where everything goes.
        init_from: a folder with a model: of xlpre, of Hugging Face's XLNet, or the original TensorFlow release.
        from_scratch: take only shape and vocabulary from `init_from`, and draw new weights: what pretraining is compared with.
        seed: decides the head's starting values, the order of examples and dropout.
        num_seeds: so many runs, with this seed and those after it.
        epochs: passes over the training examples, instead of train.steps.
        warmup_ratio: of the updates, instead of schedule.warmup_steps.
        task_overrides: for a task, words that are taken as if typed before all others; a file of settings brings them.
        deepspeed: settings handed to DeepSpeed untouched.
    """

    task: str = ""
    name: str = "finetuned"
    run_dir: str = "runs/${name}"
    init_from: str = ""
    from_scratch: bool = False
    seed: int = 1
    num_seeds: int = 1
    epochs: float | None = None
    warmup_ratio: float | None = None
    task_overrides: dict[str, list[str]] = field(default_factory=dict)
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    model: TaskModelConfig = field(default_factory=TaskModelConfig)
    optim: LayerwiseOptimConfig = field(default_factory=LayerwiseOptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TaskTrainConfig = field(default_factory=TaskTrainConfig)
    eval: TaskEvalConfig = field(default_factory=TaskEvalConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_identity(self.name, self.run_dir, self.seed, self.num_seeds)
        if self.epochs is not None and self.epochs <= 0:
            raise ValueError(f"epochs ({self.epochs}) must be positive, or null for train.steps")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio <= 1:
            raise ValueError(
                f"warmup_ratio ({self.warmup_ratio}) must be between 0 and 1, or null for schedule.warmup_steps"
            )
        check_compiled(self.train, self.model.attention_backend)
        check_overrides(self.deepspeed)
