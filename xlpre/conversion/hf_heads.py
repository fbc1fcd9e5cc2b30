"""Heads of downstream tasks in Hugging Face's XLNet: classes, weight names, settings.

Source: transformers 5.23, models/xlnet/modeling_xlnet.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.conversion.weight_maps import WeightEntry, WeightMap, to_external
from xlpre.model.config import ModelConfig

POOLINGS = ("last", "first")  # transformers' "mean" includes padding, and its "attn" raises NotImplementedError


@dataclass(frozen=True)
class HFHead:
    """A head of Hugging Face's XLNet.

    Attributes:
        architecture: name of the class in transformers.
        weights: weight map between the native head and this class.
        pools: True if the head reads one vector per row.
    """

    architecture: str
    weights: WeightMap
    pools: bool = True


def _dense(native: str, external: str, bias: bool = True) -> WeightMap:
    return [
        WeightEntry(f"{native}.{part}", f"{external}.{part}") for part in (["weight", "bias"] if bias else ["weight"])
    ]


_SEQUENCE_HEAD = [*_dense("summary.dense", "sequence_summary.summary"), *_dense("logits_proj", "logits_proj")]
HEADS = {
    "classification": HFHead("XLNetForSequenceClassification", _SEQUENCE_HEAD),
    "regression": HFHead("XLNetForSequenceClassification", _SEQUENCE_HEAD),
    "multiple_choice": HFHead("XLNetForMultipleChoice", _SEQUENCE_HEAD),
    "span": HFHead(
        "XLNetForQuestionAnswering",
        [
            *_dense("start", "start_logits.dense"),
            *_dense("end_inner", "end_logits.dense_0"),
            *_dense("end_norm", "end_logits.LayerNorm"),
            *_dense("end_outer", "end_logits.dense_1"),
            *_dense("no_answer_inner", "answer_class.dense_0"),
            *_dense("no_answer_outer", "answer_class.dense_1", bias=False),
        ],
        pools=False,
    ),
}


def head_to_huggingface(
    config: ModelConfig, head: Mapping[str, Tensor], kind: str, labels: Sequence[str], pooling: str = "last"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert a head to Hugging Face's format.

    Args:
        config: model config.
        head: native weights of the head.
        kind: a key of `HEADS`.
        labels: class names; empty for regression and multiple choice.
        pooling: method that reduces a row to one vector; `POOLINGS` lists the methods that transformers has.

    Returns:
        Settings for config.json, and weights by their names in transformers.

    Raises:
        InputError: a pooling that transformers does not have.
    """
    hf_head = HEADS[kind]
    settings: dict[str, Any] = {"architectures": [hf_head.architecture]}
    if hf_head.pools:
        if pooling not in POOLINGS:
            raise InputError(
                f"model.pooling={pooling} is invalid for Hugging Face's XLNet: it must be {' or '.join(POOLINGS)}. "
                "Fine-tune with one of these to export the model."
            )
        settings |= {
            "summary_type": pooling,
            "summary_use_proj": True,
            "summary_activation": "tanh",
            "summary_last_dropout": config.dropout,
        }
    names = {"classification": list(labels), "regression": ["LABEL_0"]}.get(kind)
    if names is not None:
        settings |= {
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "regression" if kind == "regression" else "single_label_classification",
        }
    return settings, to_external(hf_head.weights, head, config)
