"""PretrainConfig: every setting of a pretraining, composed of the groups that stand beside the code that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xlpre.config.loader import load_config
from xlpre.data.window_layout import DataConfig
from xlpre.inference.cloze import BLANK, has_blank
from xlpre.model.config import ModelConfig
from xlpre.model.memory import MemoryConfig
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer_config import TokenizerConfig
from xlpre.training.deepspeed_engine import TrainConfig, check_compiled
from xlpre.training.deepspeed_overrides import check_overrides, check_whole_matrices
from xlpre.training.lr_schedule import ScheduleConfig
from xlpre.training.optimizer import PretrainOptimConfig
from xlpre.training.run_dir import check_run_identity


@dataclass(frozen=True)
class EvalConfig:
    """Measuring on held-out text, always the same targets.

    Attributes:
        every: updates between evaluations.
        batch_size: rows of the held-out text.
        num_windows: windows of each row; fewer where the held-out text is short.
        mem_len: columns of memory while measuring; null: as in training.
        partial_k: one token in K is a target while measuring; null: as in training.
        sentences: sentences with ____ to fill in at each evaluation; empty: some from the held-out text.
    """

    every: int = 1000
    batch_size: int = 8
    num_windows: int = 32
    mem_len: int | None = None
    partial_k: float | None = None
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "num_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"eval.{name} ({getattr(self, name)}) must be at least 1")
        if (self.mem_len or 0) < 0 or (self.partial_k is not None and self.partial_k < 1):
            raise ValueError(
                f"eval.mem_len ({self.mem_len}) must be at least 0 and eval.partial_k ({self.partial_k}) at least 1, or null"
            )
        for sentence in self.sentences:
            if not has_blank(sentence):
                raise ValueError(f"eval.sentences: {sentence!r} has no blank; mark one with {BLANK}")


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining.

    Attributes:
        name: the run's name, which also names its folders unless they are set.
        run_dir: where metrics, checkpoints, the model folder and the report go.
        init_from: a folder whose weights to start from: a model folder of xlpre, of Hugging Face's XLNet, or the original
            TensorFlow release. The model takes its shape; empty starts from `model.init_scheme`.
        seed: decides starting values, the order of text, targets and dropout.
        deepspeed: settings handed to DeepSpeed untouched.
    """

    name: str = "run"
    run_dir: str = "runs/${name}"
    init_from: str = ""
    seed: int = 1
    text: TextConfig = field(default_factory=TextConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: PretrainOptimConfig = field(default_factory=PretrainOptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run_identity(self.name, self.run_dir, self.seed)
        if not self.data.store_dir:
            raise ValueError("data.store_dir is empty; name the folder of a token store, or leave it out: stores/NAME")
        check_compiled(self.train, self.model.attention_backend)
        check_overrides(self.deepspeed)
        if self.optim.muon:
            check_whole_matrices(self.deepspeed)


def settings_of_run(run_dir: Path) -> PretrainConfig:
    """What a run was made with, by the config.yaml that it wrote.

    Raises:
        ValueError: that is not there, empty, or cannot be read.
    """
    written = run_dir / "config.yaml"
    if not written.exists() or not written.read_bytes().strip():
        state = "empty" if written.exists() else "not there"
        raise ValueError(f"{written} is {state}; it held the settings that the run was made with: put it back")
    return load_config(PretrainConfig, written)
