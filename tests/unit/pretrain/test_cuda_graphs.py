"""Training with recorded passes gives the same numbers as without. Without a GPU, a stand-in for CUDA graphs calls the functions again."""

import pytest
import torch

from pretrain.config import PretrainConfig, PretrainTrainConfig, reason_against_cuda_graphs
from pretrain.trainer.cuda_graphs import use_cuda_graphs
from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.pretrain.stand_in_graphs import use_stand_in
from xlpre.model.config import ModelConfig
from xlpre.model.memory import Memory
from xlpre.training.distributed import seed_step

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# the kernels of the backend `triton` are the same in every run, those of `sdpa` add in any order
SHAPE = {"d_head": 16, "dropout": 0.1, "dropatt": 0.1, "attention_backend": "triton" if ON_GPU else "sdpa"}
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if not ON_GPU:
        use_stand_in(monkeypatch.setattr)


def train(graphs, dtype=torch.float32, lengths=(13, 13, 13), next_sentence=False, **shape):
    """Train with two micro-steps per step. Return the weights, the losses and the memory."""
    model = make_model(next_sentence=next_sentence, **{**SHAPE, **shape}).to(DEVICE, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # kept by DeepSpeed, too: nodes that accumulate gradients, on the default stream
    accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    if graphs:
        use_cuda_graphs(model)
    hidden = random_memory(model.backbone.config, rows=2, length=7).hidden.to(DEVICE, dtype)
    memories = [Memory(hidden + i, torch.full((2,), 7, device=DEVICE)) for i in range(2)]
    losses = []
    for step, length in enumerate(lengths):
        seed_step(0, step, 0)
        for micro_step in range(2):
            batch = random_batch(length, seed=10 * step + micro_step).to(DEVICE)
            loss, memories[micro_step], *auxiliary = model(batch, memories[micro_step])
            (2 * sum(auxiliary, start=loss)).backward()  # a factor, as for loss scaling
            losses += [loss, *auxiliary]
            assert all(node.variable.grad is not None for node in accumulators)
        optimizer.step()
        optimizer.zero_grad()
    states = [x for memory in memories for x in (memory.hidden, memory.valid)]
    return [*(p.detach().clone() for p in model.parameters()), *losses, *states]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [{}, {"next_sentence": True}, {"lengths": (13, 11, 13)}, {"untie_r": False}])
def test_training_with_graphs_has_the_same_bits(case, dtype):
    with_graphs, without = train(True, dtype, **case), train(False, dtype, **case)
    assert all(torch.equal(x, y) for x, y in zip(with_graphs, without, strict=True))


def test_an_unused_parameter_has_no_gradient_and_evaluation_records_nothing():
    model = make_model(two_streams=False, **SHAPE).to(DEVICE)  # the vector of the query stream is not used
    use_cuda_graphs(model)
    batch, memory = random_batch().to(DEVICE), random_memory(model.backbone.config, rows=2, length=7)
    memory = Memory(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
    with torch.no_grad():
        model(batch, memory)
    model.eval()
    model(batch, memory)
    assert not model.forward._passes
    model.train()
    model(batch, memory)[0].backward()
    assert model.backbone.mask_embedding.grad is None
    assert model.backbone.word_embedding.weight.grad is not None


def test_a_parameter_that_has_moved_is_an_error():
    model = make_model(**SHAPE).to(DEVICE)
    use_cuda_graphs(model)
    batch, memory = random_batch().to(DEVICE), random_memory(model.backbone.config, rows=2, length=7)
    memory = Memory(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
    model(batch, memory)
    model.backbone.mask_embedding.data = model.backbone.mask_embedding.data.clone()
    with pytest.raises(RuntimeError, match="moved"):
        model(batch, memory)


def test_a_second_forward_pass_before_the_backward_pass_is_an_error():
    model = make_model(**SHAPE).to(DEVICE)
    use_cuda_graphs(model)
    memory = random_memory(model.backbone.config, rows=2, length=7)
    memory = Memory(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
    losses = [model(random_batch(length).to(DEVICE), memory)[0] for length in (13, 11)]
    with pytest.raises(RuntimeError, match="another forward pass"):
        losses[0].backward()


def test_the_cases_that_cannot_be_recorded_have_a_reason():
    tried = {
        "model": {"attention_backend": "triton"},
        "on_gpu": True,
        "precision": "bf16",
        "stage": 1,
        "n_processes": 1,
    }

    def reason(cuda_graphs, deepspeed=None, train=None, **changes):
        case = {**tried, **changes}
        config = PretrainConfig(
            train=PretrainTrainConfig(cuda_graphs=cuda_graphs, **(train or {})), deepspeed=deepspeed or {}
        )
        model = ModelConfig(**{**tried["model"], **case["model"]})
        return reason_against_cuda_graphs(
            config, model, case["on_gpu"], case["precision"], case["stage"], case["n_processes"]
        )

    offloading = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    for wanted in (None, True):
        assert reason(wanted) == ""
        assert "GPU" in reason(wanted, on_gpu=False)
        assert "stage 3" in reason(wanted, stage=3)
        assert "checkpointing" in reason(wanted, train={"activation_checkpointing": True})
        assert "autocast" in reason(wanted, deepspeed={"torch_autocast": {"enabled": True}})
        assert "profiler" in reason(wanted, deepspeed={"flops_profiler": {"enabled": True}})
        for model in ({"cutoffs": [20], "div_value": 2}, {"tie_embedding": False}, {"d_embed": 8}):
            assert "softmax" in reason(wanted, model=model)
        for untried in (
            {"n_processes": 2},
            {"precision": "fp16"},
            {"stage": 2},
            {"train": {"compile": True}},
            {"deepspeed": offloading},
            {"model": {"attention_backend": "sdpa"}},
        ):
            assert bool(reason(wanted, **untried)) == (wanted is None)
    assert reason(False)
