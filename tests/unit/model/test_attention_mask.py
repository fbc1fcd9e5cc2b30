"""Tokens that a target may not see have exactly zero influence on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.model.conftest import VOCAB, random_batch, random_memory
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel


def influence(model, batch, memory, target):
    """(B, T) largest gradient of the logits of each row's `target`-th target with respect to the token embeddings."""
    embeddings = []

    def keep(module, inputs, output):
        output.retain_grad()
        embeddings.append(output)

    handle = model.backbone.word_embedding.register_forward_hook(keep)
    logits, _ = model.logits(batch, memory)
    handle.remove()
    (logits[:, target] * torch.randn(len(logits), VOCAB)).sum().backward()
    return embeddings[0].grad.abs().amax(-1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    shape = ModelConfig(vocab_size=VOCAB, n_layer=3, d_model=16, n_head=2, d_inner=24, dropout=0.0, dropatt=0.0)
    model = LanguageModel(shape, two_streams=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@given(
    length=st.integers(8, 21),
    reuse_share=st.floats(0.3, 0.6),
    partial_k=st.floats(2.5, 6),
    max_span=st.integers(1, 5),
    perm_size=st.one_of(st.none(), st.integers(1, 9)),
    mem_len=st.integers(0, 7),
    backward=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=examples(40))
def test_no_gradient_flows_from_a_target_to_itself_or_to_tokens_ranked_above_it(
    model, length, reuse_share, partial_k, max_span, perm_size, mem_len, backward, seed
):
    reuse = max(2, int(length * reuse_share))
    batch = random_batch(
        length, reuse, seed=seed, backward=backward, partial_k=partial_k, max_span=max_span, perm_size=perm_size
    )
    memory = random_memory(model.config, 2, mem_len, seed=seed)
    for target in range(batch.targets.size(1)):
        gradient = influence(model, batch, memory, target)
        for row in range(2):
            position = batch.target_positions[row, target]
            sees = batch.query_rank[row, position] > batch.key_rank[row]
            assert not sees[position]
            assert (gradient[row][~sees] == 0).all()
            assert (gradient[row][sees] > 0).all()


def test_the_reused_part_never_sees_the_rest(model):
    batch = random_batch(14, 7)
    for target in range(batch.targets.size(1)):
        gradient = influence(model, batch, random_memory(model.config, 2, 3), target)
        in_reused = batch.target_positions[:, target] < 7
        assert (gradient[in_reused][:, 7:] == 0).all()
