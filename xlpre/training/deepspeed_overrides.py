"""What a user may tell DeepSpeed himself, as `deepspeed:` of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xlpre.config.schema_docs import suggest_key

# what the project decides from its own settings; the user's `deepspeed:` may not contradict it
OWNED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer": "optim.*",
    "scheduler": "schedule.*",
    "bf16": "train.precision",
    "fp16": "train.precision",
}
GROUPS = ("offload_optimizer", "offload_param")  # of zero_optimization, which the project reads, too
# groups of settings that without ZeRO would mean nothing, or something else
OF_ZERO = {"zero_optimization", "data_types", "torch_autocast", "compile"}


class Asked(dict[str, Any]):
    """Settings that note which keys they are asked for: those that whoever reads them knows. A copy notes in the same place."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.known: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.known.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.known.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        self.known.add(key)
        return super().get(key, default)


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of DeepSpeed that the project owns, and for those that it reads, too, if they are none."""
    for key in overrides:
        if key in OWNED:
            raise ValueError(f"deepspeed.{key} is decided by {OWNED[key]}; set that instead")
    zero = overrides.get("zero_optimization", {})
    _check_group("deepspeed.zero_optimization", zero, "stage: 2")
    for name in GROUPS:
        _check_group(f"deepspeed.zero_optimization.{name}", zero.get(name, {}), "device: cpu")
    stage = zero.get("stage", 1)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed.zero_optimization.stage ({stage!r}) must be 0, 1, 2 or 3")


def zero_stage(overrides: Mapping[str, Any], precision: str, processes: int) -> int:
    """The ZeRO stage: as asked for, else 1, but 0 where there is nothing to share out and no 16 bits to keep fp32 beside.

    Args:
        overrides: settings for DeepSpeed, which `check_overrides` has passed. Whoever sets something of ZeRO's without a stage gets 1.
        precision: that the model computes in: fp32, bf16 or fp16.
        processes: of the job.
    """
    alone = processes == 1 and precision == "fp32" and not OF_ZERO & overrides.keys()
    stage: int = overrides.get("zero_optimization", {}).get("stage", 0 if alone else 1)
    return stage


def enabled_offloads(overrides: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the optimizer, and the parameters, are kept in the machine's memory."""
    zero = overrides.get("zero_optimization", {})
    return {name: zero.get(name, {}).get("device", "none") != "none" for name in GROUPS}


def check_whole_matrices(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of DeepSpeed by which Muon could not put matrices together from the shares of processes."""
    zero = overrides.get("zero_optimization", {})
    found = {
        "stage=3": zero.get("stage") == 3,
        "offload_optimizer": enabled_offloads(overrides)["offload_optimizer"],
        **{name: zero.get(name, False) for name in ("round_robin_gradients", "parameter_alignment")},
    }
    for name in (name for name, is_set in found.items() if is_set):
        raise ValueError(
            f"deepspeed.zero_optimization.{name} does not go with optim.name=muon, which puts matrices together from the shares of "
            "processes; leave it out, or set optim.name=adamw"
        )


def check_known(overrides: Mapping[str, Any], asked: Asked) -> None:
    """Raise ValueError for a setting that DeepSpeed did not ask for when it read `asked`: it would have no effect."""
    for key in overrides:
        if key not in asked.known:
            question = suggest_key(key, sorted(asked.known - OWNED.keys()))
            raise ValueError(f"deepspeed.{key}: DeepSpeed has no such setting; {question}")


def _check_group(key: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} ({value}) must be a mapping, as {{{example}}}")
