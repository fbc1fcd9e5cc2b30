"""The `deepspeed` settings: keys that a user may set, and the ZeRO stage that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xlpre.common.errors import InputError
from xlpre.common.messages import as_yaml
from xlpre.config.key_suggestions import suggest_key

# keys that other settings decide
OWNED_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer": "optim.*",
    "scheduler": "schedule.*",
    "managed_gradient_accumulation": "train.micro_batch_size",
    "bf16": "train.precision",
    "fp16": "train.precision",
}
# features of DeepSpeed that need another training loop or another model
UNSUPPORTED_KEYS = frozenset(
    (  # noqa: SIM905 - one key a line would be a page
        "amp autotuning compression_training curriculum_learning data_efficiency eigenvalue elasticity expert_parallel "
        "hybrid_engine pipeline progressive_layer_drop quantize_training sequence_parallel_size sparse_attention "
        "tensor_parallel use_data_before_expert_parallelism weight_quantization"
    ).split()
)
# all other keys that DeepSpeed 0.19.8 reads; a test compares them with the installed version
KNOWN_KEYS = UNSUPPORTED_KEYS | frozenset(
    (  # noqa: SIM905
        "activation_checkpointing aio checkpoint comet comms_logger communication_data_type compile csv_monitor data_types "
        "dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state flops_profiler "
        "gradient_allreduce_op gradient_predivide_factor graph_harvesting log_level memory_breakdown nebula prescale_gradients "
        "seq_parallel_communication_data_type sparse_gradients steps_per_print tensorboard timers torch_autocast "
        "vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
    ).split()
)
# keys of zero_optimization, compared in the same way
ZERO_KEYS = frozenset(
    (  # noqa: SIM905
        "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients "
        "cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks "
        "gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights "
        "log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear "
        "model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm "
        "override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint "
        "prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
        "stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold "
        "stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size "
        "use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size "
        "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"
    ).split()
)
OFFLOAD_GROUPS = ("offload_optimizer", "offload_param")  # keys of zero_optimization
# groups that have no effect, or another effect, without ZeRO
ZERO_GROUPS = {"zero_optimization", "data_types", "torch_autocast", "compile"}


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Check the keys of the `deepspeed` settings, and the values of the keys that xlpre reads.

    Raises:
        InputError: a key does not exist in DeepSpeed, is decided by another setting, or has an invalid value.
    """
    for key in overrides:
        if key in OWNED_KEYS:
            raise InputError(
                f"deepspeed.{key} is invalid: {OWNED_KEYS[key]} decides it. Set {OWNED_KEYS[key]} instead."
            )
        if key in UNSUPPORTED_KEYS:
            raise InputError(f"deepspeed.{key} is invalid: xlpre does not support this feature. Leave it out.")
        if key not in KNOWN_KEYS:
            suggestion = (
                suggest_key(key, sorted(KNOWN_KEYS - UNSUPPORTED_KEYS))
                or "see the configuration reference of DeepSpeed"
            )
            raise InputError(f"deepspeed.{key} is invalid: DeepSpeed has no such setting; {suggestion}")
    zero = overrides.get("zero_optimization", {})
    _check_mapping("deepspeed.zero_optimization", zero, "stage: 2")
    for name in zero.keys() - ZERO_KEYS:
        raise InputError(
            f"deepspeed.zero_optimization.{name} is invalid: DeepSpeed has no such setting; "
            + (suggest_key(name, sorted(ZERO_KEYS)) or "see the configuration reference of DeepSpeed")
        )
    for name in OFFLOAD_GROUPS:
        _check_mapping(f"deepspeed.zero_optimization.{name}", zero.get(name, {}), "device: cpu")
    for name in (name for name, value in zero.items() if value == "auto"):
        raise InputError(
            f"deepspeed.zero_optimization.{name}=auto is invalid: only Hugging Face's Trainer replaces auto. Leave it out."
        )
    counts = {
        "steps_per_print": overrides.get("steps_per_print", 1),
        "zero_optimization.reduce_bucket_size": zero.get("reduce_bucket_size", 1),
    }
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
            raise InputError(
                f"deepspeed.{key}={as_yaml(value)} is invalid: it must be at least 1. Correct it or leave it out."
            )
    stage = zero.get("stage", 1)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InputError(
            f"deepspeed.zero_optimization.stage={stage!r} is invalid: it must be 0, 1, 2 or 3. Set "
            "deepspeed.zero_optimization.stage=1."
        )


def check_muon_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise InputError for ZeRO settings that Muon does not support.

    Muon needs the partition of each process to be an unbroken part of the concatenated matrices, on the device of the process. Stage 3
    partitions each parameter by itself, `round_robin_gradients` reorders the parameters, `parameter_alignment` pads them, and
    `offload_optimizer` moves the partition to the CPU.
    """
    zero = overrides.get("zero_optimization", {})
    unsupported = {
        "stage=3": zero.get("stage") == 3,
        "offload_optimizer": enabled_offloads(overrides)["offload_optimizer"],
        **{name: zero.get(name, False) for name in ("round_robin_gradients", "parameter_alignment")},
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise InputError(
            f"deepspeed.zero_optimization.{name} is invalid with optim.name=muon: Muon assembles whole matrices from ZeRO partitions, "
            "which must be on the training device, and must not be split per parameter, reordered or padded. "
            f"Leave {name.partition('=')[0]} out, or set optim.name=adamw."
        )


def zero_stage(overrides: Mapping[str, Any], precision: str, world_size: int) -> int:
    """Return the ZeRO stage.

    Args:
        overrides: the `deepspeed` settings, checked by `check_overrides`.
        precision: `fp32`, `bf16` or `fp16`.
        world_size: number of processes.

    Returns:
        The configured stage. The default is 1, or 0 for a single process in fp32 without ZeRO settings, which has nothing to partition.
    """
    is_plain = world_size == 1 and precision == "fp32" and not ZERO_GROUPS & overrides.keys()
    stage: int = overrides.get("zero_optimization", {}).get("stage", 0 if is_plain else 1)
    return stage


def communication_dtype(overrides: Mapping[str, Any], precision: str, stage: int) -> str:
    """Return the data type in which processes sum their gradients: `fp32`, `bf16` or `fp16`.

    The default in stage 1 is fp32, because gradients are accumulated in fp32 there and summed once per step. In the other stages it is the
    precision of the model: stages 2 and 3 sum the gradients after each micro-step.
    """
    default = "fp32" if stage == 1 else precision
    return str(overrides.get("communication_data_type") or default)


def enabled_offloads(overrides: Mapping[str, Any]) -> dict[str, bool]:
    """Return a mapping from `offload_optimizer` and `offload_param` to True if the setting is enabled, else to False."""
    zero = overrides.get("zero_optimization", {})
    return {name: zero.get(name, {}).get("device", "none") != "none" for name in OFFLOAD_GROUPS}


def _check_mapping(key: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{key}={value} is invalid: it must be a mapping. Set it to {{{example}}}, for example.")
