"""Tasks whose answer is a number, read from one vector of the row.

Source: zihangdai/xlnet function_builder.py (`get_regression_loss`); the scale is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.tasks.sequence import SequenceTask
from xlpre.model.config import ModelConfig
from xlpre.model.heads import RegressionHead


class RegressionTask(SequenceTask):
    """A number, kept within `bounds` if there are any; for the rest see OneVectorTask.

    Args:
        scale: mean and standard deviation; the head learns how many of the latter a number is from the former. Empty: the number itself.
    """

    head_kind = "regression"

    def __init__(self, *arguments: Any, bounds: tuple[float, float] | None = None, scale: Sequence[float] = ()) -> None:
        super().__init__(*arguments)
        self.bounds, self.scale = bounds, scale
        self._mean, self._deviation = scale or (0.0, 1.0)

    def data_settings(self) -> dict[str, Any]:
        """The scale, too, where there is one."""
        return {**super().data_settings(), **({"label_scale": list(self.scale)} if self.scale else {})}

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return RegressionHead(shape, self.summary)

    def unscaled(self, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a head that answers with the numbers themselves."""
        weight, bias = (head[f"logits_proj.{part}"].double() * self._deviation for part in ("weight", "bias"))
        return {**head, "logits_proj.weight": weight.float(), "logits_proj.bias": (bias + self._mean).float()}

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """(N,) the numbers, float64."""
        numbers = outputs["logits"].astype(np.float64) * self._deviation + self._mean
        return numbers if self.bounds is None else numbers.clip(*self.bounds)

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The number."""
        return [
            {"id": example.id, "prediction": self._rounded(number)}
            for example, number in zip(split.examples, self.predict_values(self.pool_outputs(split, outputs)), strict=True)
        ]

    def _answers(self, example: Example) -> dict[str, Any]:
        if example.label is None:
            return {}
        return {"label": np.float32((example.label - self._mean) / self._deviation)}

    def _rounded(self, number: float) -> float:
        """To six digits of itself, and of what it can differ by where that is less."""
        beyond = math.log10(max(abs(number) / self._deviation, 1))
        return float(f"{number:.{6 + int(beyond)}g}")
