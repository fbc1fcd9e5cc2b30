import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.reference.softmax import embed, probability
from tests.unit.model.conftest import VOCAB, make_model, random_batch, random_memory
from xlpre.model.config import ModelConfig
from xlpre.model.lm_head import target_losses

ADAPTIVE = {
    "cutoffs": st.sampled_from([[], [10], [7, 20], [1, 2, 39]]),
    "div_value": st.sampled_from([1, 2]),
    "d_embed": st.sampled_from([0, 12]),
    "tie_embedding": st.booleans(),
    "tie": st.booleans(),
    "seed": st.integers(0, 99),
}


@settings(max_examples=30, deadline=None)
@given(**ADAPTIVE)
def test_the_adaptive_softmax_is_its_definition_token_by_token(cutoffs, div_value, d_embed, tie_embedding, tie, seed):
    if not cutoffs and d_embed == 0 and tie_embedding:
        tie_embedding = False  # with it, that is the plain softmax
    model = make_model(
        seed=seed,
        cutoffs=cutoffs,
        div_value=div_value if cutoffs else 1,
        d_embed=d_embed,
        tie_embedding=tie_embedding,
        tie_projections=[i % 2 == 0 for i in range(len(cutoffs) + 1)] if tie else [],
    )
    embedding, hidden = model.backbone.word_embedding, torch.randn(1, 2, 16)
    expected = torch.stack(
        [
            torch.stack([probability(model.lm_head, embedding, h, token) for token in range(VOCAB)])
            for h in hidden.flatten(0, 1)
        ]
    ).view(1, 2, VOCAB)
    torch.testing.assert_close(model.lm_head(hidden).softmax(-1), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(expected.sum(-1), torch.ones(1, 2))
    targets = torch.randint(0, VOCAB, (1, 2))
    losses = -expected.gather(2, targets[:, :, None]).squeeze(2).log()
    torch.testing.assert_close(model.lm_head(hidden, targets), losses, atol=1e-4, rtol=1e-4)
    ids = torch.randint(0, VOCAB, (2, 5))
    vectors = torch.stack([embed(embedding, int(i)) for i in ids.flatten()]).view(2, 5, 16)
    torch.testing.assert_close(embedding(ids), vectors, atol=1e-5, rtol=1e-5)


def test_a_cluster_that_no_target_is_in_costs_nothing_and_breaks_nothing():
    model = make_model(cutoffs=[10, 30], div_value=2)
    losses = model.lm_head(torch.randn(1, 4, 16), torch.full((1, 4), 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert not model.lm_head.clusters[2].projection.grad.any()


def test_a_tied_softmax_shares_the_embeddings_weights():
    plain, adaptive = make_model(), make_model(cutoffs=[10], div_value=2, tie_projections=[False, True])
    assert plain.lm_head.weight is plain.backbone.word_embedding.weight
    scores, vectors = adaptive.lm_head.clusters, adaptive.backbone.word_embedding.clusters
    assert scores[1].table is vectors[1].table and scores[1].projection is vectors[1].projection
    assert scores[0].projection is not vectors[0].projection


def test_gradients_of_vectors_and_softmax_meet_in_one_table_batch_after_batch():
    """As if the table were two, a gradient of each summed."""
    model = make_model().double()
    table = model.lm_head.weight
    expected = torch.zeros_like(table)
    for seed in range(2):
        batch, memory = random_batch(seed=seed), random_memory(model.config, 2, 0)
        memory = dataclasses.replace(memory, hidden=memory.hidden.double())
        model(batch, memory)[0].backward()
        vectors = table.detach()[batch.input_ids].requires_grad_()
        hidden, _ = model.backbone(batch, memory, vectors)
        in_softmax = table.detach().clone().requires_grad_()
        losses = target_losses(hidden @ in_softmax.T + model.lm_head.bias, batch.targets).mean()
        of_softmax, of_vectors = torch.autograd.grad(losses, [in_softmax, vectors])
        expected += of_softmax.index_add(0, batch.input_ids.flatten(), of_vectors.flatten(0, 1))
    torch.testing.assert_close(table.grad, expected, atol=1e-7, rtol=1e-6)  # losses are taken in fp32


def test_the_gradient_of_the_table_is_a_table_whichever_part_of_a_model_it_comes_from():
    model = make_model(next_sentence=True)
    batch, memory = random_batch(), random_memory(model.config, 2, 0)
    of_loss, _, of_pairs = model(batch, memory)
    parts = of_loss, of_pairs, model.backbone(batch, memory)[0].sum(), model.logits(batch, memory)[0].sum()
    plain = make_model()
    parts += (plain(batch, memory)[0],)
    for part, table in zip(parts, [model.lm_head.weight] * 4 + [plain.lm_head.weight], strict=True):
        (gradient,) = torch.autograd.grad(part, table, retain_graph=True)
        assert gradient.layout is torch.strided and gradient.any()


def test_the_scale_of_embeddings_is_the_root_of_the_width():
    scaled, plain = make_model(scale_embedding=True), make_model()
    plain.backbone.word_embedding.weight.data *= 4.0
    batch, memory = random_batch(), random_memory(plain.config, 2, 3)
    torch.testing.assert_close(scaled.backbone(batch, memory)[0], plain.backbone(batch, memory)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": [10, 10]}, "model.cutoffs .* must increase"),
        ({"cutoffs": [50], "vocab_size": 40}, "model.cutoffs .* must increase, between 0 and the vocabulary .40."),
        ({"cutoffs": [9], "div_value": 99, "d_model": 16}, "model.div_value .99."),
        ({"tie_projections": [True, False]}, "model.tie_projections"),
        ({"positions": "shaw"}, "model.n_positions .0."),
        ({"n_positions": 4}, "set model.n_positions=0"),
        ({"positions": "learned", "n_positions": 4, "clamp_len": 3}, "model.clamp_len .3."),
        ({"positions": "sinusoidal", "init_scheme": "local"}, "set model.init_scheme=published"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"n_head": 2, "d_model": 16, **settings})


@settings(max_examples=30, deadline=None)
@given(spread=st.sampled_from([0.1, 1.0, 30.0, 1000.0]), seed=st.integers(0, 99))
def test_losses_and_gradients_are_those_of_torchs_cross_entropy_however_sure_the_model_is(spread, seed):
    torch.manual_seed(seed)
    lm_head = make_model(seed=seed).lm_head.double()
    with torch.no_grad():
        lm_head.weight.mul_(spread)
        lm_head.bias.normal_()
    hidden, targets, grad = torch.randn(2, 3, 16).double(), torch.randint(0, VOCAB, (2, 3)), torch.rand(2, 3)
    found = _with_gradients(hidden, lm_head, lambda x: lm_head(x, targets), grad)
    expected = _with_gradients(hidden, lm_head, lambda x: target_losses(lm_head(x), targets), grad)
    scale = max(1, spread)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-6 * scale, rtol=1e-5)


def _with_gradients(hidden, lm_head, losses_of, grad):
    inputs = [hidden.clone().requires_grad_(), lm_head.weight, lm_head.bias]
    losses = losses_of(inputs[0])
    return losses, *torch.autograd.grad(losses, inputs, grad)


def test_of_the_softmax_only_one_number_a_logit_is_kept():
    model, hidden, kept = make_model(), torch.randn(2, 3, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model.lm_head(hidden, torch.zeros(2, 3, dtype=torch.long))
    assert [t.shape for t in kept if VOCAB in t.shape and t is not model.lm_head.weight] == [(6, VOCAB)]


class Made(TorchDispatchMode):
    """The operators that make a tensor of a shape in memory of its own."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.by = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.by += [
            func._opname
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and x.shape == self.shape and x.untyped_storage().data_ptr() not in given
        ]
        return out


@pytest.mark.parametrize("next_sentence", [False, True])
def test_of_the_tables_size_a_step_makes_its_gradient_and_nothing_else(next_sentence):
    model = make_model(next_sentence=next_sentence)
    with Made(model.lm_head.weight.shape) as made:
        loss, _, *others = model(random_batch(), random_memory(model.config, 2, 0))
        sum(others, loss).backward()
    assert made.by == ["mm"]
