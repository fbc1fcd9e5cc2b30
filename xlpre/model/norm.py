"""Layer normalization (Ba et al. 2016, arXiv:1607.06450), alone or after a residual sum."""

from __future__ import annotations

from torch import Tensor, nn

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Build a layer normalization over the model width D."""
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class AddNorm(nn.LayerNorm):
    """Residual sum and its normalization: norm(rows + dropout(branch)).

    With the Triton backend, kernels/triton/fused_ops.py computes both in one pass.

    Args:
        config: shape of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, eps=config.norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, rows: Tensor, branch: Tensor, fused: bool = False) -> Tensor:  # type: ignore[override]
        """Add two tensors and normalize the sum.

        Args:
            rows: (B, N, D), input of attention or of the feed-forward layer.
            branch: (B, N, D), output of that layer.
            fused: use the fused Triton kernel. Mixed dtypes, as under torch.autocast, always use torch's operators.

        Returns:
            (B, N, D).
        """
        if fused and rows.dtype == branch.dtype == self.weight.dtype:
            from xlpre.model.kernels.triton.fused_ops import add_norm

            dropout = self.dropout.p if self.training else 0.0
            return add_norm(rows, branch, self.weight, self.bias, self.eps, dropout)
        return super().forward(rows + self.dropout(branch))
