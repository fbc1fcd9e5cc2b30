"""Heads of downstream tasks in Hugging Face's XLNet: classes, names of weights, settings.

Source: transformers 5.23, models/xlnet/modeling_xlnet.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xlpre.conversion.weight_maps import Weight, to_theirs
from xlpre.model.config import ModelConfig

SUMMARIES = ("last", "first")  # their mean is of padding, too, and "attn" raises


@dataclass(frozen=True)
class Kind:
    """A head of theirs.

    Attributes:
        architecture: their class.
        weights: of the head, ours and theirs.
        summarizes: whether it reads a row by one vector.
    """

    architecture: str
    weights: list[Weight]
    summarizes: bool = True


def _dense(ours: str, theirs: str, bias: bool = True) -> list[Weight]:
    return [Weight(f"{ours}.{part}", f"{theirs}.{part}") for part in (("weight", "bias") if bias else ("weight",))]


_ONE_VECTOR = [*_dense("summary.dense", "sequence_summary.summary"), *_dense("logits", "logits_proj")]
KINDS = {
    "classes": Kind("XLNetForSequenceClassification", _ONE_VECTOR),
    "number": Kind("XLNetForSequenceClassification", _ONE_VECTOR),
    "choice": Kind("XLNetForMultipleChoice", _ONE_VECTOR),
    "span": Kind(
        "XLNetForQuestionAnswering",
        [
            *_dense("start", "start_logits.dense"),
            *_dense("end_inner", "end_logits.dense_0"),
            *_dense("end_norm", "end_logits.LayerNorm"),
            *_dense("end_outer", "end_logits.dense_1"),
            *_dense("no_answer_inner", "answer_class.dense_0"),
            *_dense("no_answer_outer", "answer_class.dense_1", bias=False),
        ],
        summarizes=False,
    ),
}


def to_huggingface(
    config: ModelConfig, head: Mapping[str, Tensor], kind: str, labels: Sequence[str], summary: str = "last"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings for their config.json and weights for their file.

    Args:
        config: of the model.
        head: our weights of it.
        kind: one of KINDS.
        labels: names of the classes; of a number or of options none.
        summary: how a row becomes one vector.

    Raises:
        ValueError: a summary that they do not have.
    """
    found = KINDS[kind]
    settings: dict[str, Any] = {"architectures": [found.architecture]}
    if found.summarizes:
        if summary not in SUMMARIES:
            raise ValueError(
                f"model.pooling={summary} has no place in Hugging Face's XLNet, which knows {', '.join(SUMMARIES)}"
            )
        settings |= {
            "summary_type": summary,
            "summary_use_proj": True,
            "summary_activation": "tanh",
            "summary_last_dropout": config.dropout,
        }
    names = {"classes": list(labels), "number": ["LABEL_0"]}.get(kind)
    if names is not None:
        settings |= {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "regression" if kind == "number" else "single_label_classification",
        }
    return settings, to_theirs(found.weights, head, config)
