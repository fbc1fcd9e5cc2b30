"""Relative effective context length: its definition on given losses, and a model that copies at a known distance."""

import math

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.inference.context_losses import context_losses, next_token_batch
from xlpre.inference.effective_context import effective_contexts
from xlpre.model.memory import initial_memory

CONTEXTS = [10, 20, 30, 40, 50]


def losses_that_fall_until(context, n_tokens=100, level=4.0):
    falling = [level - 0.1 * min(c, context) / 10 for c in CONTEXTS]
    return np.tile(np.array(falling)[:, None], (1, n_tokens))


def test_the_length_is_the_context_from_which_a_step_gains_too_little():
    short, long, endless = (losses_that_fall_until(context) for context in (20, 40, 90))
    results = effective_contexts(np.stack([short, long, endless]), CONTEXTS, 1.0)
    assert [result.length for result in results] == [20, 40, 50]
    assert [result.is_at_least for result in results] == [False, False, True]
    assert results[1].gains == pytest.approx([1 - math.exp(-0.1)] * 3 + [0.0])


def test_only_losses_below_the_best_model_with_the_shorter_context_count():
    good, bad = losses_that_fall_until(20), losses_that_fall_until(50, level=4.45)
    alone = effective_contexts(bad[None], CONTEXTS, 1.0)[0]
    (_, together) = effective_contexts(np.stack([good, bad]), CONTEXTS, 1.0)
    assert alone.length == 50 and alone.is_at_least
    assert together.length == 10 and max(together.gains) == 0


def test_a_fraction_counts_the_tokens_that_the_best_model_predicts_worst():
    losses = losses_that_fall_until(10, 90, level=1.0)
    hard = losses_that_fall_until(40, 10, level=8.0)
    group = np.concatenate([losses, hard], axis=1)[None]
    (of_hard,), (of_all,) = (effective_contexts(group, CONTEXTS, fraction) for fraction in (0.1, 1.0))
    assert of_hard.length == 40
    assert of_all.gains == pytest.approx([1 - math.exp(-0.1 * 0.1)] * 3 + [0.0])


@pytest.mark.parametrize("fraction", [0.0, 1.5, math.nan])
def test_an_impossible_fraction_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction=.* is invalid"):
        effective_contexts(losses_that_fall_until(20)[None], CONTEXTS, fraction)


@pytest.mark.parametrize("contexts", [[10], [10, 20, 20, 40, 50], [50, 40, 30, 20, 10], [10, 20]])
def test_contexts_that_do_not_fit_are_refused(contexts):
    with pytest.raises(ValueError, match="contexts=.* is invalid"):
        effective_contexts(losses_that_fall_until(20)[None], contexts, 0.5)


def text_with_copies(lag, n_tokens, vocab_size, seed):
    """Random tokens, of which 7 in 10 are copies of the token `lag` positions before."""
    rng = np.random.default_rng(seed)
    tokens, is_copy = rng.integers(vocab_size, size=n_tokens), rng.random(n_tokens) < 0.7
    for position in np.flatnonzero(is_copy[lag:]) + lag:
        tokens[position] = tokens[position - lag]
    return tokens


@pytest.mark.parametrize("lag", [6, 10])
def test_a_model_that_copies_at_a_distance_has_that_effective_context(lag):
    vocab_size, rows, contexts = 12, 16, [k * lag // 2 for k in (1, 2, 3, 4)]
    shape = {"n_layer": 1, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": vocab_size, "mem_len": 0}
    model = make_model(two_streams=False, **shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        text = text_with_copies(lag, rows * 33, vocab_size, seed=step).reshape(rows, 33)
        loss, *_ = model(next_token_batch(torch.from_numpy(text), 32), initial_memory(model.config, rows, mem_len=0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens, positions = text_with_copies(lag, 3000, vocab_size, seed=10**6), np.arange(20, 3000, 5)
    losses = np.stack([context_losses(model.eval(), tokens, positions, context) for context in contexts])
    (result,) = effective_contexts(losses[None], contexts, 1.0)
    assert result.length == lag and not result.is_at_least
