import pytest
import torch

from xlpre.model.config import ModelConfig
from xlpre.model.pooling import SequenceSummary


@pytest.mark.parametrize("pooling", ["text_mean", "attn"])
def test_padding_does_not_change_a_pooled_text(pooling):
    config = ModelConfig(vocab_size=10, n_layer=1, d_model=8, n_head=2, d_inner=8)
    summary = SequenceSummary(config, pooling).eval()
    hidden = torch.randn(2, 5, 8)
    padded = torch.cat([torch.randn(2, 3, 8), hidden], dim=1)
    padding = (torch.arange(8) < 3).expand(2, -1)
    torch.testing.assert_close(summary(padded, padding), summary(hidden, torch.zeros(2, 5, dtype=torch.bool)))
