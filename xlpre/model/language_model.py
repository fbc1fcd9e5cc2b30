"""A language model: backbone and softmax, from a batch to its loss."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.batch import Batch
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.memory import Memory
from xlpre.model.output import TiedSoftmax


class LanguageModel(nn.Module):
    """Predicts `batch.targets`. See Backbone for `two_streams`."""

    def __init__(self, config: ModelConfig, two_streams: bool) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, two_streams)
        self.output = TiedSoftmax(self.backbone.embedding)

    def forward(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """The mean loss over targets, in nats, and memory for the next window."""
        logits, memory = self.logits(batch, memory)
        losses = target_losses(logits, batch.targets)
        return (losses * batch.target_weights).sum() / batch.target_weights.sum(), memory

    def logits(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """(B, P, V) logits at the targets, and memory for the next window."""
        hidden, memory = self.backbone(batch, memory)
        return self.output(hidden), memory


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target in nats, (B, P) float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
