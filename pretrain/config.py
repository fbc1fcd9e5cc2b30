"""PretrainConfig: the settings of pretraining, composed of groups that are defined beside the code that reads them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xlpre.common.errors import InputError, check_minimum
from xlpre.common.messages import as_yaml, counted
from xlpre.config.loader import load_config
from xlpre.data.window_layout import DataConfig
from xlpre.model.config import MemoryConfig, ModelConfig
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.text.blanks import BLANK, has_blank
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.training.batch_schedule import BatchSchedule
from xlpre.training.config import OPERATIONAL_SETTINGS, PretrainOptimConfig, TrainConfig, check_compile
from xlpre.training.deepspeed_overrides import check_muon_overrides, check_overrides, enabled_offloads
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.run_dir import check_run_identity

# RESULT_GROUPS are the groups of settings that determine the result of a run. IGNORED_SETTINGS are settings in these groups that do not
# influence the result, or that are compared elsewhere.
RESULT_GROUPS = ("data", "objective", "model", "memory", "optim", "schedule", "train", "eval")
IGNORED_SETTINGS = {
    "data": {"store_dir", "num_threads"},
    "model": {"vocab_size", "attention_backend"},
    "train": {"steps", "hours", "save_memory", *OPERATIONAL_SETTINGS},
    "eval": {"every", "sentences", "order_consistency", "minimal_pairs", "minimal_pairs_prefix"},
}


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on validation text. All evaluations of a run predict the same targets.

    Attributes:
        every: steps between evaluations.
        batch_size: rows of the validation batch; fewer if the text is too short for every row to read a different part of it.
        num_windows: windows that each row reads, one after another; fewer if the validation text is short.
        mem_len: number of earlier tokens that memory holds in evaluation; null: as in training.
        partial_k: K in evaluation, where one token in K is a target; null: as in training.
        sentences: sentences with ____, which the model fills in at each evaluation; empty: sentences of the validation text with one
            frequent word hidden.
        order_consistency: number of validation sentences whose log-likelihood is computed in four factorization orders at each evaluation
            of a permutation model. Its standard deviation over the orders is `val_order_std` in the metrics, in nats per token. 0: none.
        minimal_pairs: files of minimal pairs, as for `pretrain/score.py --pairs`, which the model judges at each evaluation. The accuracy
            (mean over the paradigms, percent) is `val_minimal_pairs` in the metrics. Every process scores all pairs.
        minimal_pairs_prefix: text that is read before each sentence of a pair, as for `pretrain/score.py --prefix`.
    """

    every: int = 1000
    batch_size: int = 8
    num_windows: int = 32
    mem_len: int | None = None
    partial_k: float | None = None
    sentences: list[str] = field(default_factory=list)
    order_consistency: int = 0
    minimal_pairs: list[str] = field(default_factory=list)
    minimal_pairs_prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "num_windows"):
            check_minimum(f"eval.{name}", getattr(self, name), 1, f"Set eval.{name}=1.")
        check_minimum("eval.order_consistency", self.order_consistency, 0, "Set 0 to leave it out.")
        check_minimum("eval.mem_len", self.mem_len, 0, "Set eval.mem_len=null to use model.mem_len.")
        check_minimum("eval.partial_k", self.partial_k, 1, "Set eval.partial_k=null to use objective.partial_k.")
        for sentence in self.sentences:
            if not has_blank(sentence):
                raise InputError(
                    f"eval.sentences={sentence!r} is invalid: it has no blank. Write {BLANK} where a word is missing."
                )


@dataclass(frozen=True)
class PretrainTrainConfig(TrainConfig):
    """Length, batch size, precision and checkpoints of a pretraining run.

    Attributes:
        save_memory: checkpoints that contain the recurrent memory, which takes most of their bytes if the batch is large. `newest`: only
            the newest checkpoint. `all`: all checkpoints. `none`: no checkpoint. A run that resumes from a checkpoint with memory continues
            bit for bit. A run that resumes from a checkpoint without memory first reads the last windows of each batch row again to fill
            the memory. It does so with the current weights, and losses differ slightly.
        cuda_graphs: record the kernels of the forward and the backward pass once as CUDA graphs, and launch them together, which is
            several times as fast for small models (reports/gpu). It needs GPU memory for two more copies of the gradients and of the
            recurrent memory of a micro-batch, and has no effect on a CPU, with ZeRO stage 3, activation checkpointing, `model.cutoffs`,
            `model.d_embed`, `model.tie_embedding=false`, `deepspeed.torch_autocast` and `deepspeed.flops_profiler`. null: true in the
            case that has been tried on a GPU: one process, bf16, ZeRO stage 1 without offloading, the attention backend `triton`, and no
            `train.compile`.
        batch_warmup_steps: number of steps at the start, during which the number of micro-steps rises from 1 to the accumulation. If the
            accumulation would be 1, smaller micro-batches make it at least 2. The rows of omitted micro-steps are not read.
        keep_checkpoints_every: also keep checkpoints whose step is a multiple of this number; null: keep only recent checkpoints.
    """

    save_memory: Literal["newest", "all", "none"] = "newest"
    cuda_graphs: bool | None = None
    batch_warmup_steps: int = 0
    keep_checkpoints_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(
            "train.keep_checkpoints_every", self.keep_checkpoints_every, 1, "Set train.keep_checkpoints_every=null."
        )
        check_minimum(
            "train.batch_warmup_steps", self.batch_warmup_steps, 0, "Set train.batch_warmup_steps=0 for no warm-up."
        )
        if self.batch_warmup_steps and self.micro_batch_size is None:
            raise InputError(
                f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: the warm-up adds micro-steps to a step, but with "
                "train.micro_batch_size=null every step has one. Set train.micro_batch_size, or train.batch_warmup_steps=0."
            )

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Divide the global batch among `world_size` processes.

        Raises:
            InputError: the rows cannot be divided equally, or `batch_warmup_steps` is set and each process has one row only.
        """
        schedule = super().batch_schedule(world_size)
        if not self.batch_warmup_steps:
            return schedule
        micro_batch_size, accumulation = schedule.micro_batch_size, schedule.accumulation
        if accumulation == 1:  # for example in a run that resumes on more processes
            rows = micro_batch_size
            if rows == 1:
                raise InputError(
                    f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: the warm-up needs two rows per process, but "
                    f"train.global_batch_size={self.global_batch_size} with {counted(world_size, 'process')} leaves one row for each. "
                    "Start fewer processes, or set train.batch_warmup_steps=0, which changes nothing after the warm-up."
                )
            micro_batch_size = max(size for size in range(1, rows) if rows % size == 0)
            accumulation = rows // micro_batch_size
        return BatchSchedule(world_size, micro_batch_size, accumulation, self.batch_warmup_steps)


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of pretraining.

    Attributes:
        name: name of the run. Folders that are not set are named after it.
        run_dir: folder for metrics, checkpoints, the model folder and the report.
        init_from: folder with initial weights: a run folder, a model folder of xlpre or of Hugging Face's XLNet, or the original
            TensorFlow release. The model takes the shape of these weights. null: new weights, see `model.init_scheme`.
        seed: random seed of the initial weights, the order of the text, the targets and dropout.
        deepspeed: settings passed to DeepSpeed unchanged.
    """

    name: str = "run"
    run_dir: str = "runs/${name}"
    init_from: str | None = None
    seed: int = 1
    text: TextConfig = field(default_factory=TextConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: PretrainOptimConfig = field(default_factory=PretrainOptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: PretrainTrainConfig = field(default_factory=PretrainTrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run_identity(self.name, self.run_dir, self.seed)
        if not self.data.store_dir:
            raise InputError(
                "data.store_dir='' is invalid: it must name the folder of a token store. Leave it out to use stores/NAME."
            )
        if self.text.line_type == "verbatim" and self.text.val_source is None:
            raise InputError(
                "text.line_type=verbatim is invalid: a continuous text has no documents to hold out. Set text.val_source to the validation "
                "text, for example 'enwik8.gz[90000000:95000000]'."
            )
        if self.text.line_type == "verbatim" and self.tokenizer.kind == "sentencepiece":
            raise InputError(
                "text.line_type=verbatim is invalid: a SentencePiece vocabulary does not keep text as it is. Set tokenizer.kind to bytes, "
                "characters or words, or text.line_type=paragraphs."
            )
        if self.eval.order_consistency and self.objective.name != "permutation":
            raise InputError(
                f"eval.order_consistency={self.eval.order_consistency} is invalid with objective.name={self.objective.name}: only "
                "permutation models have factorization orders. Set eval.order_consistency=0."
            )
        if self.model.attention_span != "all" and self.model.mem_len == 0:
            raise InputError(
                f"model.mem_len=0 is invalid with model.attention_span={self.model.attention_span}: each token would see at most itself. "
                "Set model.attention_span=all."
            )
        check_compile(self.train, self.model.attention_backend)
        check_overrides(self.deepspeed)
        if self.optim.muon:
            check_muon_overrides(self.deepspeed)


def reason_against_cuda_graphs(
    config: PretrainConfig, model: ModelConfig, on_gpu: bool, precision: str, zero_stage: int, n_processes: int
) -> str:
    """Return why training does not use CUDA graphs, or an empty string if it uses them; see `train.cuda_graphs`.

    Args:
        config: settings of the run.
        model: settings of its model, which differ from `config.model` if it starts from other weights, with the name of its attention
            backend instead of `auto`.
        on_gpu: True if the run uses a GPU.
        precision: fp32, bf16 or fp16.
        zero_stage: ZeRO stage.
        n_processes: number of processes.
    """
    train, deepspeed = config.train, config.deepspeed
    if train.cuda_graphs is False:
        return "train.cuda_graphs is false"
    if not on_gpu:
        return "the run does not use a GPU"
    if zero_stage == 3:
        return "ZeRO stage 3 gathers weights during the passes"
    if deepspeed.get("torch_autocast", {}).get("enabled"):
        return "deepspeed.torch_autocast keeps copies of the weights"
    if deepspeed.get("flops_profiler", {}).get("enabled"):
        return "deepspeed.flops_profiler counts the operations of modules, which graphs do not call"
    if train.activation_checkpointing:
        return "train.activation_checkpointing reads the state of the random number generator"
    if not model.has_plain_embedding:
        return (
            "a softmax that does not share the table of the embedding may recompute its logits or depend on the tokens"
        )
    is_tried = (n_processes, precision, zero_stage, model.attention_backend) == (1, "bf16", 1, "triton")
    if train.cuda_graphs is None and not (
        is_tried and not train.compile and not any(enabled_offloads(deepspeed).values())
    ):
        return "they have not been tried with these settings; train.cuda_graphs=true uses them"
    return ""


def load_run_config(run_dir: Path) -> PretrainConfig:
    """Load the config.yaml that a run wrote to its folder.

    Raises:
        InputError: there is no such file, or it is empty or invalid.
    """
    path = run_dir / "config.yaml"
    if not path.exists() or not path.read_bytes().strip():
        state = "is empty" if path.exists() else "does not exist"
        raise InputError(
            f"{path} {state}, but the settings of the run are read from it. Copy it from a backup. An unfinished run also writes it again "
            "when it resumes."
        )
    return load_config(PretrainConfig, path)


def changed_settings(config: PretrainConfig, with_length: bool = False) -> dict[str, tuple[Any, Any]]:
    """Compare `config` with the existing run in `config.run_dir`, in the settings that determine the result of a run.

    Args:
        config: settings of the run.
        with_length: also compare `train.steps` and `train.hours`.

    Returns:
        For each setting that differs, by key, its value in the run and its value in `config`. Empty if there is no run.

    Raises:
        InputError: the config.yaml of the run is invalid.
    """
    run_dir = Path(config.run_dir)
    if not (run_dir / "config.yaml").exists():
        return {}
    saved, current = (
        {**_result_settings(settings), **(_length(settings) if with_length else {})}
        for settings in (load_run_config(run_dir), config)
    )
    return _differences(saved, current)


def trained_settings(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that determine the rest of a run after a checkpoint, by key, as they are in its manifest."""
    settings: dict[str, Any] = {**_result_settings(config), **_length(config), "deepspeed": config.deepspeed}
    if config.train.batch_warmup_steps:  # the micro-batches are the steps by which the batch grows
        settings["train.micro_batch_size"] = config.train.micro_batch_size
    return dict(json.loads(json.dumps(settings)))


def _length(config: PretrainConfig) -> dict[str, Any]:
    return {"train.steps": config.train.steps, "train.hours": config.train.hours}


def setting_changes(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changes of settings in the history of a run.

    Args:
        manifest: manifest of the checkpoint that the run resumes from; empty for a new run.
        settings: the current settings, see `trained_settings`.

    Returns:
        One entry for each resume with other settings, the first one first: `step`, and `settings`, which has the former and the new
        value by key.
    """
    changes = list(manifest.get("setting_changes", []))
    if changed := _differences(manifest.get("settings", {}), settings):
        changes.append({"step": manifest["step"], "settings": {key: list(values) for key, values in changed.items()}})
    return changes


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Describe an entry of `setting_changes`."""
    return ", ".join(
        f"{key}={as_yaml(now)} (before: {as_yaml(before)})" for key, (before, now) in changes["settings"].items()
    )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (saved[key], current[key]) for key in saved if key in current and saved[key] != current[key]}


def _result_settings(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, by key."""
    settings: dict[str, Any] = {"init_from": config.init_from}
    for group in RESULT_GROUPS:
        if group == "model" and config.init_from:  # the folder of the initial weights decides the shape
            continue
        values = dataclasses.asdict(getattr(config, group))
        ignored = IGNORED_SETTINGS.get(group, set())
        settings |= {f"{group}.{key}": value for key, value in values.items() if key not in ignored}
    return settings
