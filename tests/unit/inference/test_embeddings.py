"""Embeddings of texts."""

import numpy as np
import pytest
import torch

from tests.unit.inference.test_scoring import Ids, random_texts
from tests.unit.model.conftest import VOCAB, make_model
from xlpre.inference import embed
from xlpre.inference.cloze import unmasked_batch
from xlpre.model.memory import initial_memory


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("two_streams", [True, False])
def test_embeddings_equal_those_of_one_text_at_a_time(pooling, two_streams):
    model, texts = make_model(two_streams, next_sentence=True).eval(), random_texts(3, 9, 1, 5, 9)
    encoder = make_model(False).eval().backbone
    encoder.load_state_dict(model.backbone.state_dict())
    expected = []
    for text in texts:
        hidden = encoder(unmasked_batch(text), initial_memory(model.config, 1, mem_len=0))[0][0]
        expected.append(hidden.mean(0) if pooling == "mean" else hidden[-1])
    for source in (model, encoder):
        for batch_tokens in (1, 20, 10_000):
            vectors = embed(source, Ids(VOCAB), texts, pooling, batch_tokens=batch_tokens)
            torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert model.backbone.two_streams == two_streams and model.backbone.n_cls == 1
    assert embed(model, Ids(VOCAB), []).shape == (0, model.config.d_model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is invalid: it must be one of mean, cls"),
        ({"batch_tokens": 0}, "batch_tokens=0 is invalid"),
        ({"texts": [np.array([], int)]}, "a text needs at least one token"),
        ({"texts": [np.full(3000, 9)]}, "the limit is 2,048"),
    ],
)
def test_invalid_arguments_are_refused(settings, message):
    arguments = {"texts": random_texts(2), **settings}
    with pytest.raises(ValueError, match=message):
        embed(make_model(), Ids(VOCAB), **arguments)
