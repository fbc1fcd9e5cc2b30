"""Embeddings of texts."""

import numpy as np
import pytest
import torch

from tests.unit.inference.test_scoring import Ids, random_texts
from tests.unit.model.conftest import VOCAB, make_model
from xlpre.batch import make_batch
from xlpre.inference import embed
from xlpre.inference.batches import unmasked_batch
from xlpre.model.memory import initial_memory
from xlpre.text.special_tokens import EOD


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("objective", ["permutation", "denoising"])
def test_embeddings_equal_those_of_one_text_at_a_time(pooling, objective):
    two_streams = objective == "permutation"
    model, texts = make_model(two_streams, next_sentence=True).eval(), random_texts(3, 9, 1, 5, 9)
    encoder = make_model(False).eval().backbone
    encoder.load_state_dict(model.backbone.state_dict())
    expected = []
    for text in texts:
        hidden = encoder(unmasked_batch(text), initial_memory(model.config, 1, mem_len=0))[0][0]
        expected.append(hidden.mean(0) if pooling == "mean" else hidden[-1])
    for batch_tokens in (1, 20, 10_000):
        vectors = embed(model, Ids(VOCAB), texts, pooling, objective=objective, batch_tokens=batch_tokens)
        torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert model.backbone.two_streams == two_streams and model.backbone.n_cls == 1
    assert embed(model, Ids(VOCAB), [], objective=objective).shape == (0, model.config.d_model)


@torch.no_grad()
def test_tokens_of_a_causal_model_see_the_tokens_before_them():
    model, (text, other) = make_model(False).eval(), random_texts(6, 4)
    prefixes = [embed(model, Ids(VOCAB), [text[:n]], objective="causal")[0] * n for n in range(1, 7)]
    states = torch.stack(
        [after - before for before, after in zip([0 * prefixes[0], *prefixes], prefixes, strict=False)]
    )
    ids = torch.tensor([[EOD, *text.tolist()]])
    rank = torch.arange(7, dtype=torch.int32)[None]
    expected = model.backbone(make_batch(ids, rank + 1, rank, rank.long()), initial_memory(model.config, 1, mem_len=0))[
        0
    ][0, 1:]
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-3)
    both = embed(model, Ids(VOCAB), [other, text], objective="causal")
    torch.testing.assert_close(both[1], expected.mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is invalid: it must be one of mean, cls"),
        ({"model": make_model(False)}, "objective=None is invalid: the model has one stream"),
        (
            {"model": make_model(False), "objective": "causal", "pooling": "cls"},
            "was not trained with <cls>. Set pooling='mean'",
        ),
        ({"batch_tokens": 0}, "batch_tokens=0 is invalid"),
        ({"texts": [np.array([], int)]}, "a text needs at least one token"),
        ({"texts": [np.full(3000, 9)]}, "the limit is 2,048"),
    ],
)
def test_invalid_arguments_are_refused(settings, message):
    arguments = {"model": make_model(), "tokenizer": Ids(VOCAB), "texts": random_texts(2), **settings}
    with pytest.raises(ValueError, match=message):
        embed(**arguments)
