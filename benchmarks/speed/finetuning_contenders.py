"""Contenders of benchmarks/speed/finetuning.py: a fine-tuning step of xlpre, and of Hugging Face's models in a plain loop."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.contenders import SIZES, native_weights, require_transformers
from finetune.config import TaskTrainConfig
from finetune.data.batching import LengthBucketSampler, MicroStep
from finetune.data.features import Features, PaddedRows, pad
from finetune.tasks.base import Task
from finetune.trainer.task_model import TaskModel
from xlpre.conversion import hf, hf_heads
from xlpre.conversion.weight_maps import to_native
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.model.config import ModelConfig
from xlpre.text import special_tokens
from xlpre.training.config import OptimConfig
from xlpre.training.deepspeed_engine import build_deepspeed_config, build_engine, init_process_group
from xlpre.training.distributed import use_device

OPTIM = OptimConfig(lr=2e-5)
LossAndGradients = tuple[float, dict[str, Tensor]]  # gradients by xlpre's parameter names
# not compared, because its input differs: Hugging Face takes the state at the true start, the published code the mean over predicted starts
EXCLUDED = "head.no_answer_outer.weight"


class FinetuningContender(Protocol):
    """A model whose fine-tuning step can be timed."""

    def loss_and_gradients(self) -> LossAndGradients:
        """Return loss and gradients of the first batch, without dropout."""

    def train_step(self, step: int) -> None:
        """Train on the batch of a step."""


class Xlpre:
    """A fine-tuning step of xlpre.

    Args:
        model: the model.
        sampler: sampler of the batches.
        batch_size: number of features in a step.
        stage: ZeRO stage, or None for the stage that finetune/run.py chooses.
    """

    def __init__(
        self, model: TaskModel, sampler: LengthBucketSampler, batch_size: int, stage: int | None = None
    ) -> None:
        self._sampler, self._batch_size = sampler, batch_size
        device, train = use_device(), TaskTrainConfig(global_batch_size=batch_size, precision="fp32")
        init_process_group(device)
        overrides = {} if stage is None else {"zero_optimization": {"stage": stage}}
        settings = build_deepspeed_config(train, OPTIM, device, 1, overrides)
        self._engine = build_engine(model, settings, train, OPTIM, device)

    def loss_and_gradients(self) -> LossAndGradients:
        """Return loss and gradients of the first batch, without dropout."""
        self._engine.eval()
        result = compute_gradients(self._engine.module, self._engine.module(self._read(0)))
        self._engine.train()
        return result

    def train_step(self, step: int) -> None:
        """Train on the batch of a step."""
        self._engine.backward(self._engine(self._read(step)))
        self._engine.step()

    def _read(self, step: int) -> MicroStep:
        return self._sampler.micro_steps(1, step, self._batch_size, 1)[0]


class HuggingFace:
    """A fine-tuning step of Hugging Face's model in a plain loop.

    Args:
        model: the model.
        shape: configuration of xlpre's model, which has the same weights.
        task: the task.
        features: features of the training examples.
        sampler: sampler of the batches.
        batch_size: number of features in a step.
        length: tokens to which rows are padded, or None to pad to the longest row of a batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shape: ModelConfig,
        task: Task,
        features: list[Features],
        sampler: LengthBucketSampler,
        batch_size: int,
        length: int | None,
    ) -> None:
        self._model, self._shape, self._task, self._features = model, shape, task, features
        self._sampler, self._batch_size, self._length = sampler, batch_size, length
        settings = {"lr": OPTIM.lr, "eps": OPTIM.eps, "weight_decay": OPTIM.weight_decay}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **settings, fused=True)

    def loss_and_gradients(self) -> LossAndGradients:
        """Return loss and gradients of the first batch, without dropout."""
        self._model.eval()
        loss, gradients = compute_gradients(self._model, self._model(**self._read(0)).loss)
        self._model.train()
        head = to_native(hf_heads.HEADS[self._task.head_kind].weights, gradients)
        backbone = to_native(hf.weight_map(self._shape), gradients)
        return loss, backbone | {f"head.{name}": g for name, g in head.items() if f"head.{name}" != EXCLUDED}

    def train_step(self, step: int) -> None:
        """Train on the batch of a step."""
        self._model(**self._read(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIM.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _read(self, step: int) -> dict[str, Any]:
        features = [self._features[index] for index in feature_indices(self._sampler, step, self._batch_size)]
        rows = pad([feature.rows[0] for feature in features], self._task.padding_side, self._length)
        return {
            "input_ids": torch.from_numpy(rows.input_ids),
            "token_type_ids": torch.from_numpy(rows.segment_ids),
            "attention_mask": torch.from_numpy(~rows.padding_mask).float(),
            "use_mems": False,
            **LABELS[self._task.head_kind](features, rows),
        }


def compute_gradients(model: torch.nn.Module, loss: Tensor) -> LossAndGradients:
    """Return the loss as a number, and the gradients of the parameters that affect it, except EXCLUDED."""
    parameters = {name: p for name, p in model.named_parameters() if name != EXCLUDED}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.item(), {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def _class_labels(features: list[Features], rows: PaddedRows) -> dict[str, Tensor]:
    return {"labels": torch.tensor([int(feature.labels["label"]) for feature in features])}


def _span_labels(features: list[Features], rows: PaddedRows) -> dict[str, Tensor]:
    """Return the labels that Hugging Face's question answering example computes."""
    labels = {
        name: torch.tensor([float(feature.labels[name]) for feature in features])
        for name in ("start", "end", "impossible")
    }
    is_text = (rows.segment_ids == SEGMENT_A) & (rows.input_ids != special_tokens.SEP)
    return {
        "start_positions": labels["start"].long(),
        "end_positions": labels["end"].long(),
        "is_impossible": labels["impossible"],
        "cls_index": torch.from_numpy((~rows.padding_mask).sum(1) - 1),
        "p_mask": torch.from_numpy(~(is_text | (rows.segment_ids == SEGMENT_CLS))).float(),
    }


LABELS = {"classification": _class_labels, "span": _span_labels}


def make_models(c: dict[str, Any], task: Task) -> tuple[TaskModel, list[torch.nn.Module]]:
    """Return a model of xlpre and two of Hugging Face, with equal weights. Biases and heads are large enough to affect the loss."""
    require_transformers()
    import transformers

    torch.manual_seed(0)
    sizes = {name: c[name] for name in SIZES}
    config = transformers.XLNetConfig(
        **sizes, ff_activation="gelu_new", summary_last_dropout=c["dropout"], num_labels=2
    )
    architecture = getattr(transformers, hf_heads.HEADS[task.head_kind].architecture)
    hf_models = [architecture(config).train() for _ in range(2)]
    model = TaskModel(ModelConfig(**sizes, dropatt=c["dropout"]), task)
    with torch.no_grad():
        for name, parameter in hf_models[0].named_parameters():
            if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")):
                parameter.normal_(0, 0.2)
        for name, parameter in model.head.named_parameters():
            if f"head.{name}" == EXCLUDED:
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.05)
    model.load_available(native_weights(hf_models[0]))
    head_weights = dict(model.head.named_parameters())
    _, hf_head = hf_heads.head_to_huggingface(model.model_config, head_weights, task.head_kind, task.label_names)
    state = {**hf_models[0].state_dict(), **hf_head}
    for hf_model in hf_models:
        hf_model.load_state_dict(state)
    return model, hf_models


def feature_indices(sampler: LengthBucketSampler, step: int, batch_size: int) -> np.ndarray:
    """Return the indices of the features that the sampler draws for a step."""
    return np.concatenate([batch.indices for batch in sampler.micro_steps(1, step, batch_size, 1)[0].batches])
