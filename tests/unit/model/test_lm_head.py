import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import examples
from tests.reference.softmax import embed, probability
from tests.unit.model.conftest import VOCAB, make_model, random_batch, random_memory
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.cpu.build import is_available
from xlpre.model.lm_head import _cross_entropy_, _fused_cross_entropy_, target_losses

needs_compiler = pytest.mark.skipif(not is_available(), reason="no C++ compiler")

ADAPTIVE = {
    "cutoffs": st.sampled_from([[], [10], [7, 20], [1, 2, 39]]),
    "div_value": st.sampled_from([1, 2]),
    "d_embed": st.sampled_from([None, 12]),
    "tie_embedding": st.booleans(),
    "tie": st.booleans(),
    "seed": st.integers(0, 99),
}


@settings(max_examples=examples(30))
@given(**ADAPTIVE)
def test_the_adaptive_softmax_equals_its_definition_token_by_token(
    cutoffs, div_value, d_embed, tie_embedding, tie, seed
):
    if not cutoffs and d_embed is None and tie_embedding:
        tie_embedding = False  # otherwise it is the plain softmax
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


def test_a_cluster_without_targets_has_finite_losses_and_zero_gradients():
    model = make_model(cutoffs=[10, 30], div_value=2)
    losses = model.lm_head(torch.randn(1, 4, 16), torch.full((1, 4), 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert not model.lm_head.clusters[2].projection.grad.any()


def test_a_tied_softmax_shares_the_weights_of_the_embedding():
    plain, adaptive = make_model(), make_model(cutoffs=[10], div_value=2, tie_projections=[False, True])
    assert plain.lm_head.weight is plain.backbone.word_embedding.weight
    scores, vectors = adaptive.lm_head.clusters, adaptive.backbone.word_embedding.clusters
    assert scores[1].table is vectors[1].table and scores[1].projection is vectors[1].projection
    assert scores[0].projection is not vectors[0].projection


def test_gradients_of_embedding_and_softmax_add_up_in_one_table():
    model = make_model().double()
    table = model.lm_head.weight
    expected = torch.zeros_like(table)
    for seed in range(2):
        batch, memory = random_batch(seed=seed), random_memory(model.config, 2, 0)
        memory = dataclasses.replace(memory, hidden=memory.hidden.double())
        model(batch, memory)[0].backward()
        embeddings = table.detach()[batch.input_ids].requires_grad_()
        hidden, _ = model.backbone(batch, memory, embeddings)
        in_softmax = table.detach().clone().requires_grad_()
        losses = target_losses(hidden @ in_softmax.T + model.lm_head.bias, batch.targets).mean()
        d_softmax, d_embeddings = torch.autograd.grad(losses, [in_softmax, embeddings])
        expected += d_softmax.index_add(0, batch.input_ids.flatten(), d_embeddings.flatten(0, 1))
    torch.testing.assert_close(table.grad, expected, atol=1e-7, rtol=1e-6)  # losses are computed in fp32


def test_the_gradient_of_the_table_is_dense_for_every_output_of_the_model():
    model = make_model(next_sentence=True)
    batch, memory = random_batch(), random_memory(model.config, 2, 0)
    loss, _, next_sentence_loss = model(batch, memory)
    outputs = loss, next_sentence_loss, model.backbone(batch, memory)[0].sum(), model.logits(batch, memory)[0].sum()
    plain = make_model()
    outputs += (plain(batch, memory)[0],)
    for output, table in zip(outputs, [model.lm_head.weight] * 4 + [plain.lm_head.weight], strict=True):
        (gradient,) = torch.autograd.grad(output, table, retain_graph=True)
        assert gradient.layout is torch.strided and gradient.any()


def test_embeddings_are_scaled_by_the_square_root_of_the_width():
    scaled, plain = make_model(scale_embedding=True), make_model()
    plain.backbone.word_embedding.weight.data *= 4.0
    batch, memory = random_batch(), random_memory(plain.config, 2, 3)
    torch.testing.assert_close(scaled.backbone(batch, memory)[0], plain.backbone(batch, memory)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": [10, 10]}, "model.cutoffs=.* must increase"),
        ({"cutoffs": [50], "vocab_size": 40}, "model.cutoffs=.50. .* must increase .* vocabulary size 40"),
        ({"cutoffs": [9], "div_value": 99, "d_model": 16}, "model.div_value=99 "),
        ({"tie_projections": [True, False]}, "model.tie_projections"),
        ({"positions": "shaw"}, "model.n_positions=null .* Set model.n_positions=seq_len"),
        ({"n_positions": 4}, "model.n_positions=4 .* Set model.n_positions=null"),
        ({"positions": "learned", "n_positions": 4, "clamp_len": 3}, "model.clamp_len=3 .* Set model.clamp_len=null"),
        (
            {"positions": "sinusoidal", "init_scheme": "local"},
            "model.init_scheme=local .* Set model.init_scheme=published",
        ),
    ],
)
def test_contradictory_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"n_head": 2, "d_model": 16, **settings})


@settings(max_examples=examples(30))
@given(spread=st.sampled_from([0.1, 1.0, 30.0, 1000.0]), seed=st.integers(0, 99))
def test_losses_and_gradients_equal_torchs_cross_entropy_at_any_confidence(spread, seed):
    torch.manual_seed(seed)
    lm_head = make_model(seed=seed).lm_head.double()
    with torch.no_grad():
        lm_head.weight.mul_(spread)
        lm_head.bias.normal_()
    hidden, targets, grad = torch.randn(2, 3, 16).double(), torch.randint(0, VOCAB, (2, 3)), torch.rand(2, 3)
    actual = _with_gradients(hidden, lm_head, lambda x: lm_head(x, targets), grad)
    expected = _with_gradients(hidden, lm_head, lambda x: target_losses(lm_head(x), targets), grad)
    scale = max(1, spread)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6 * scale, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)]
)
def test_the_fused_softmax_equals_torchs_operators(dtype, tolerance):
    logits, bias = (5 * torch.randn(9, 77)).to(dtype), torch.randn(77).to(dtype)
    logits[4, 5], targets = math.nan, torch.randint(0, 77, (9,))
    d_logits = logits.float() + bias.float()
    losses = _cross_entropy_(d_logits, targets)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        fused_d_logits = logits.clone()
        fused_losses = _fused_cross_entropy_(fused_d_logits, bias, targets)
        assert fused_losses.isnan().nonzero().tolist() == [[4]]
        torch.testing.assert_close(fused_losses, losses, atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(fused_d_logits.float(), d_logits, atol=1e-6, rtol=tolerance, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("target", [-1, 77])
def test_the_fused_softmax_refuses_a_target_outside_the_vocabulary(target):
    with pytest.raises(IndexError, match="targets must be from 0 to 76"):
        _fused_cross_entropy_(torch.zeros(2, 77), torch.zeros(77), torch.tensor([3, target]))


def test_in_fp16_rare_tokens_have_gradients_although_their_probabilities_are_below_its_range():
    """The loss scale is part of the incoming gradient."""
    lm_head = make_model(seed=1).lm_head
    with torch.no_grad():
        lm_head.bias[VOCAB // 2 :] = -17
    hidden, targets = torch.randn(2, 50, 16), torch.randint(0, VOCAB // 2, (2, 50))
    grad = torch.full(targets.shape, 65536 / targets.numel())
    exact = lm_head.double()
    expected = _with_gradients(hidden.double(), exact, lambda x: exact(x, targets), grad)
    half = lm_head.half()
    actual = _with_gradients(hidden.half(), half, lambda x: half(x, targets), grad)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=0.01 * y.abs().max().item(), rtol=0)
    rare, expected_rare = (gradients[2][VOCAB // 2 :].double() for gradients in (actual, expected))
    assert (rare - expected_rare).norm() < 0.05 * expected_rare.norm()


@pytest.mark.parametrize("target", [-100, -1, VOCAB])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_invalid_target_is_refused_with_and_without_gradients(target, needs_gradient):
    lm_head, targets = make_model().lm_head, torch.tensor([[3, target]])
    with torch.set_grad_enabled(needs_gradient), pytest.raises((IndexError, RuntimeError), match=r"[Tt]arget|index"):
        lm_head(torch.randn(1, 2, 16), targets)


def _with_gradients(hidden, lm_head, compute_losses, grad):
    inputs = [hidden.clone().requires_grad_(), lm_head.weight, lm_head.bias]
    losses = compute_losses(inputs[0])
    return losses, *torch.autograd.grad(losses, inputs, grad)


def test_the_softmax_stores_one_number_per_logit():
    model, hidden, saved = make_model(), torch.randn(2, 3, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.lm_head(hidden, torch.zeros(2, 3, dtype=torch.long))
    assert [t.shape for t in saved if t.ndim == 2 and VOCAB in t.shape and t is not model.lm_head.weight] == [
        (6, VOCAB)
    ]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("shape", "max_logits"), [({}, 3 * VOCAB), ({"cutoffs": [4, 9]}, 3 * 2 * 4)])
def test_losses_in_chunks_equal_those_at_once_and_store_no_logits(monkeypatch, autocast, shape, max_logits):
    lm_head, saved = make_model(**shape).lm_head, []
    hidden, targets, grad = torch.randn(2, 5, 16), torch.randint(0, VOCAB, (2, 5)), torch.rand(2, 5)

    def step():
        rows = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = lm_head(rows, targets)
        inputs = [rows, *lm_head.parameters()]
        return losses, *torch.autograd.grad(losses, inputs, grad, allow_unused=True)

    expected = step()
    with torch.no_grad():
        losses_without_gradient = lm_head(hidden, targets)
    monkeypatch.setattr("xlpre.model.lm_head.MAX_LOGITS", max_logits)
    with torch.no_grad():
        torch.testing.assert_close(lm_head(hidden, targets), losses_without_gradient)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        actual = step()
    rounding = 1e-2 if autocast and shape else 1e-5  # gradients of chunks are summed in bf16
    torch.testing.assert_close(actual, expected, atol=rounding, rtol=10 * rounding)
    n_logits = (VOCAB, 4 + 2, 9 - 4, VOCAB - 9)  # of the plain softmax, and of the three clusters
    assert not [t for t in saved if t.ndim == 2 and t.size(1) in n_logits and t.size(0) in (3, 10)]


class AllocationRecorder(TorchDispatchMode):
    """Records the operators that allocate a tensor of a given shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.operators = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.operators += [
            func._opname
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and x.shape == self.shape and x.untyped_storage().data_ptr() not in inputs
        ]
        return out


@pytest.mark.parametrize("next_sentence", [False, True])
def test_a_step_allocates_one_tensor_of_the_size_of_the_table(next_sentence):
    model = make_model(next_sentence=next_sentence)
    with AllocationRecorder(model.lm_head.weight.shape) as recorder:
        loss, _, *others = model(random_batch(), random_memory(model.config, 2, 0))
        sum(others, loss).backward()
    assert recorder.operators == ["mm"]
