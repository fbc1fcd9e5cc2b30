"""Regression of a number, with normalized labels.

Source: zihangdai/xlnet function_builder.py (`get_regression_loss`). The normalization is not in the published code.
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
from xlpre.model.task_heads import RegressionHead


class RegressionTask(SequenceTask):
    """Regression of a number from a text or a text pair.

    Args:
        arguments: see SequenceTask.
        bounds: smallest and largest number; predictions are clipped to them.
        label_scale: mean and standard deviation by which labels are normalized; empty to leave them as they are.
    """

    head_kind = "regression"

    def __init__(
        self, *arguments: Any, bounds: tuple[float, float] | None = None, label_scale: Sequence[float] = ()
    ) -> None:
        super().__init__(*arguments)
        self.bounds, self.label_scale = bounds, label_scale
        self._mean, self._std = label_scale or (0.0, 1.0)

    def data_settings(self) -> dict[str, Any]:
        """Return the settings of SequenceTask, and the scale of the labels."""
        return {**super().data_settings(), **({"label_scale": list(self.label_scale)} if self.label_scale else {})}

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a head that predicts one number."""
        return RegressionHead(config, self.pooling)

    def denormalize_head(self, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return head weights that predict numbers in the original scale: the last layer includes standard deviation and mean."""
        weight, bias = (head[f"logits_proj.{part}"].double() * self._std for part in ("weight", "bias"))
        return {**head, "logits_proj.weight": weight.float(), "logits_proj.bias": (bias + self._mean).float()}

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """Return the predicted numbers (N,) float64. See SequenceTask."""
        numbers = outputs["logits"].astype(np.float64) * self._std + self._mean
        return numbers if self.bounds is None else numbers.clip(*self.bounds)

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return the predicted number."""
        numbers = self.predict_values(self.pool_outputs(split, outputs))
        return [
            {"id": example.id, "prediction": self._round(number)}
            for example, number in zip(split.examples, numbers, strict=True)
        ]

    def _labels(self, example: Example) -> dict[str, Any]:
        if example.label is None:
            return {}
        return {"label": np.float32((example.label - self._mean) / self._std)}

    def _round(self, number: float) -> float:
        """Round to six significant digits, plus one for each factor of 10 by which the number exceeds the standard deviation."""
        extra_digits = math.log10(max(abs(number) / self._std, 1))
        return float(f"{number:.{6 + int(extra_digits)}g}")
