"""Losses with a limited context, and the reach of recurrent memory."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.model.conftest import VOCAB, make_model
from xlpre.inference.context_losses import SlidingReader, WindowReader, context_losses, next_token_batch
from xlpre.model.memory import initial_memory


def random_tokens(n, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=n)


def causal_model(**settings):
    return make_model(two_streams=False, **settings).eval()


@torch.no_grad()
def test_a_token_is_predicted_from_its_context_and_nothing_else():
    model, tokens = causal_model(), random_tokens(40)
    positions = [30, 12, 39]
    for context_len in (1, 5, 12):
        losses = context_losses(model, tokens, positions, context_len, batch_tokens=2 * context_len)
        for position, loss in zip(positions, losses, strict=True):
            window = torch.from_numpy(tokens[position - context_len : position + 1])[None]
            logits, _ = model.logits(next_token_batch(window, 1), initial_memory(model.config, 1, mem_len=0))
            assert loss == pytest.approx(F.cross_entropy(logits[0, -1], window[0, -1]).item(), abs=1e-5)
        changed = tokens.copy()
        changed[: 12 - context_len] = (changed[: 12 - context_len] + 1) % VOCAB
        assert context_losses(model, changed, positions, context_len) == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize(("positions", "context_len"), [([4], 5), ([5], 0), ([40], 5)])
def test_a_context_that_is_not_there_is_refused(positions, context_len):
    with pytest.raises(ValueError, match=rf"context_len={context_len} is invalid"):
        context_losses(causal_model(), random_tokens(40), positions, context_len)


@torch.no_grad()
def test_with_one_layer_cached_and_sliding_evaluation_agree():
    length, window = 12, 5
    model = causal_model(n_layer=1, mem_len=length - 1, attention_span="same_length")
    text = torch.from_numpy(random_tokens(61))[None]
    cached, sliding = WindowReader(model, text, window), SlidingReader(model, text, length)
    losses = torch.cat([cached.read() for _ in range(12)], 1)[0]
    assert torch.allclose(losses, torch.cat([sliding.read(position) for position in range(60)]), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("n_layer", [1, 2, 3])
def test_a_token_depends_on_the_tokens_that_memory_reaches_and_on_no_earlier_one(n_layer, use_cache):
    # each layer attends to `length` keys, its own position included, so L layers reach L (length - 1) tokens back
    length, window = 6, 4
    model = causal_model(n_layer=n_layer, mem_len=length - 1, attention_span="same_length", init_std=0.3)
    reach, last = n_layer * (length - 1), 39
    tokens = random_tokens(41)

    def last_loss(changed_position):
        text = tokens.copy()
        text[changed_position] = (text[changed_position] + 1) % VOCAB
        reader = WindowReader(model, torch.from_numpy(text)[None], window, use_cache)
        return torch.cat([reader.read() for _ in range(10)], 1)[0, last].item()

    unchanged = last_loss(0)
    assert last - reach > 1
    assert [last_loss(position) for position in range(1, last - reach)] == [unchanged] * (last - reach - 1)
    assert all(abs(last_loss(position) - unchanged) > 1e-7 for position in range(last - reach, last))
