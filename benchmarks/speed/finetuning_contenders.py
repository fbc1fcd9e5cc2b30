"""Who is compared by finetuning.py: an update of a fine-tuning by this project, and by Hugging Face's classes in a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.contenders import SIZES, named_weights
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
from xlpre.training.deepspeed_engine import build_deepspeed_config, build_engine, init_process_group
from xlpre.training.distributed import use_device
from xlpre.training.optimizer import OptimConfig

OPTIM = OptimConfig(lr=2e-5)
Met = tuple[float, dict[str, Tensor]]  # a loss, and its gradients by parameter
# theirs reads it, in training, from the true start, the published code from the expected one
APART = "head.no_answer_outer.weight"


def shape_of(c: dict[str, Any]) -> ModelConfig:
    """Ours."""
    return ModelConfig(**{name: c[name] for name in SIZES}, dropatt=c["dropout"])


class Xlpre:
    """This project's, as set or under a ZeRO `stage`."""

    def __init__(self, model: TaskModel, dealer: LengthBucketSampler, rows: int, stage: int | None = None) -> None:
        self._dealer, self._rows = dealer, rows
        device, train = use_device(), TaskTrainConfig(batch_size=rows, precision="fp32")
        init_process_group(device)
        asked = {} if stage is None else {"zero_optimization": {"stage": stage}}
        self._engine = build_engine(model, build_deepspeed_config(train, OPTIM, device, 1, asked), train, OPTIM, device)

    def met(self) -> Met:
        """Loss and gradients of the first batch, without dropout."""
        self._engine.eval()
        found = met_of(self._engine.module, self._engine.module(self._read(0)))
        self._engine.train()
        return found

    def update(self, step: int) -> None:
        """Train on a batch."""
        self._engine.backward(self._engine(self._read(step)))
        self._engine.step()

    def _read(self, step: int) -> MicroStep:
        return self._dealer.micro_steps(1, step, self._rows, 1)[0]


class HuggingFace:
    """Theirs; every batch is padded to `length`, or to its longest row."""

    def __init__(
        self,
        model: torch.nn.Module,
        shape: ModelConfig,
        task: Task,
        items: list[Features],
        dealer: LengthBucketSampler,
        rows: int,
        length: int | None,
    ) -> None:
        self._model, self._shape, self._task, self._items = model, shape, task, items
        self._dealer, self._rows, self._length = dealer, rows, length
        settings = {"lr": OPTIM.lr, "eps": OPTIM.eps, "weight_decay": OPTIM.weight_decay}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **settings, fused=True)

    def met(self) -> Met:
        """See Xlpre; by the names of ours."""
        self._model.eval()
        loss, gradients = met_of(self._model, self._model(**self._read(0)).loss)
        self._model.train()
        head = to_native(hf_heads.HEADS[self._task.head_kind].weights, gradients)
        backbone = to_native(hf.weight_map(self._shape), gradients)
        return loss, backbone | {f"head.{name}": g for name, g in head.items() if f"head.{name}" != APART}

    def update(self, step: int) -> None:
        """See Xlpre."""
        self._model(**self._read(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIM.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _read(self, step: int) -> dict[str, Any]:
        items = [self._items[number] for number in numbers_of(self._dealer, step, self._rows)]
        inputs = pad([item.rows[0] for item in items], self._task.padding_side, self._length)
        return {
            "input_ids": torch.from_numpy(inputs.input_ids),
            "token_type_ids": torch.from_numpy(inputs.segment_ids),
            "attention_mask": torch.from_numpy(~inputs.padding_mask).float(),
            "use_mems": False,
            **ANSWERS[self._task.head_kind](items, inputs),
        }


def met_of(model: torch.nn.Module, loss: Tensor) -> Met:
    """A loss, and the gradients of the model's parameters that it has any of."""
    parameters = {name: p for name, p in model.named_parameters() if name != APART}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.item(), {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def _labels(items: list[Features], inputs: PaddedRows) -> dict[str, Tensor]:
    return {"labels": torch.tensor([int(item.labels["label"]) for item in items])}


def _spans(items: list[Features], inputs: PaddedRows) -> dict[str, Tensor]:
    """As their example of question answering prepares them."""
    said = {name: torch.tensor([float(item.labels[name]) for item in items]) for name in ("start", "end", "impossible")}
    of_text = (inputs.segment_ids == SEGMENT_A) & (inputs.input_ids != special_tokens.SEP)
    return {
        "start_positions": said["start"].long(),
        "end_positions": said["end"].long(),
        "is_impossible": said["impossible"],
        "cls_index": torch.from_numpy((~inputs.padding_mask).sum(1) - 1),
        "p_mask": torch.from_numpy(~(of_text | (inputs.segment_ids == SEGMENT_CLS))).float(),
    }


ANSWERS = {"classification": _labels, "span": _spans}


def both(c: dict[str, Any], task: Task) -> tuple[TaskModel, list[torch.nn.Module]]:
    """Ours, and two of theirs, on the same weights; biases and heads are such that they count."""
    import transformers

    torch.manual_seed(0)
    sizes = {name: c[name] for name in SIZES}
    config = transformers.XLNetConfig(
        **sizes, ff_activation="gelu_new", summary_last_dropout=c["dropout"], num_labels=2
    )
    architecture = getattr(transformers, hf_heads.HEADS[task.head_kind].architecture)
    theirs, ours = [architecture(config).train() for _ in range(2)], TaskModel(shape_of(c), task)
    with torch.no_grad():
        for name, parameter in theirs[0].named_parameters():
            if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")):
                parameter.normal_(0, 0.2)
        for name, parameter in ours.head.named_parameters():
            if f"head.{name}" == APART:
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.05)  # so that a loss is not that of an even guess
    ours.load_available(named_weights(theirs[0]))
    _, head = hf_heads.head_to_huggingface(
        ours.shape, dict(ours.head.named_parameters()), task.head_kind, task.label_names
    )
    state = {**theirs[0].state_dict(), **head}
    for one in theirs:
        one.load_state_dict(state)
    return ours, theirs


def numbers_of(dealer: LengthBucketSampler, step: int, rows: int) -> np.ndarray:
    """The items of a batch."""
    return np.concatenate([part.indices for part in dealer.micro_steps(1, step, rows, 1)[0].batches])
