"""Texts longer than a window: what is read, what is in memory, and what must not change a number."""

import dataclasses

import numpy as np
import pytest
import torch

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.data.examples import Example, Split
from finetune.data.long_text import check_memory, pool_windows
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import predict_split
from finetune.trainer.task_model import TaskModel
from xlpre.model.config import ModelConfig
from xlpre.model.memory import initial_memory
from xlpre.training.distributed import Comm

WINDOW_LEN = 8
CONFIG = ModelConfig(
    n_layer=3, d_model=16, n_head=2, d_inner=32, vocab_size=100, mem_len=64, attention_backend="reference", dropout=0.0, dropatt=0.0
)  # fmt: skip


class NumberTokenizer:
    """Tokenizer of texts that consist of numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]


def random_text(n, seed=0):
    return " ".join(map(str, np.random.default_rng([seed, n]).integers(10, 100, n)))


def make_task(long_text, labels=("a", "b"), name="classify", **data):
    settings = TaskDataConfig(
        text=["text"], labels=list(labels) or None, max_seq_len=WINDOW_LEN, long_text=long_text, **data
    )
    return build_task(name, settings, "last")


def make_model(task, **changes):
    torch.manual_seed(0)
    model = TaskModel(dataclasses.replace(CONFIG, **changes), task).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def make_split(task, texts):
    examples = [Example(str(index), (text,), index % 2, f"f, line {index}") for index, text in enumerate(texts)]
    return Split("dev", examples, task.encode(examples, NumberTokenizer()))


def compute_logits(task, model, texts, batch_size=32, overhead_tokens=10**6):
    split = make_split(task, texts)
    outputs = predict_split(model, split, batch_size, overhead_tokens, Comm())
    return task.pool_outputs(split, outputs)["logits"]


def make_batches(task, texts):
    return list(LengthBucketSampler(make_split(task, texts).features, "left", 0, 1, 10**6).eval_batches(32))


def test_a_text_that_fits_into_one_window_has_the_same_outputs_under_all_strategies():
    texts = [random_text(n) for n in (1, 3, WINDOW_LEN - 2)]
    logits = [
        compute_logits(task, make_model(task), texts) for task in map(make_task, ("truncate", "memory", "windows"))
    ]
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


def test_memory_reads_full_windows_counted_from_the_end():
    (batch,) = make_batches(make_task("memory"), [random_text(2 * WINDOW_LEN + 1)])  # and two special tokens
    windows = batch.windows()
    assert [window.input_ids.size(1) for window in windows] == [3, WINDOW_LEN, WINDOW_LEN]
    assert torch.equal(torch.cat([window.input_ids for window in windows], 1), batch.input_ids)
    assert [window.segment_ids.unique().tolist() for window in windows] == [[0], [0], [0, 2]]


def test_memory_of_the_last_window_is_that_of_pretraining():
    task = make_task("memory")
    model = make_model(task)
    (batch,) = make_batches(task, [random_text(3 * WINDOW_LEN)])
    *earlier, last = batch.windows()
    expected = initial_memory(CONFIG, 1)  # as in pretraining: the memory length of the model, empty
    for window in earlier:
        inputs = window.model_batch(
            window.input_ids.new_zeros(1, 1), torch.tensor([10**6]), reuse_len=window.input_ids.size(1)
        )
        _, expected = model.backbone(inputs, expected)
    memory, n_seen = model._read_memory(earlier, last)
    assert memory.hidden.size(2) == n_seen.item() == expected.valid.item() == 2 * WINDOW_LEN + 2
    torch.testing.assert_close(memory.hidden, expected.hidden[:, :, -memory.hidden.size(2) :], rtol=1e-6, atol=1e-6)
    assert not memory.hidden.requires_grad


def test_windows_with_memory_of_one_layer_equal_one_long_row():
    """With one layer, memory holds the token embeddings, so that the last position sees the same in both."""
    task, texts = make_task("memory"), [random_text(n) for n in (5, 17, 40)]
    one_row = build_task("classify", dataclasses.replace(task.data, long_text="truncate", max_seq_len=64), "last")
    logits = [compute_logits(each, make_model(each, n_layer=1), texts) for each in (task, one_row)]
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-6)


def test_the_prediction_depends_on_earlier_windows_as_far_as_memory_reaches():
    tokens = random_text(4 * WINDOW_LEN).split()
    near, far = list(tokens), list(tokens)
    near[-WINDOW_LEN - 2] = far[0] = "11"
    texts = [" ".join(each) for each in (tokens, near, far)]
    for mem_len, reaches_far in ((None, True), (4, False)):
        task = make_task("memory", mem_len=mem_len)
        model = make_model(task, n_layer=1)  # with more layers, information travels farther than the memory length
        original, changed_near, changed_far = compute_logits(task, model, texts)
        assert np.abs(changed_near - original).max() > 1e-4
        assert (np.abs(changed_far - original).max() > 1e-4) == reaches_far
    truncating = make_task("truncate")
    original, changed_near, changed_far = compute_logits(truncating, make_model(truncating), texts)
    assert (original == changed_near).all() and (original != changed_far).any()


@pytest.mark.parametrize("long_text", ["memory", "windows"])
def test_padding_and_other_rows_change_no_prediction(long_text):
    task, texts = make_task(long_text), [random_text(n) for n in (1, 6, 7, 15, 16, 40, 90)]
    model = make_model(task)
    batched = compute_logits(task, model, texts)
    single = np.concatenate([compute_logits(task, model, [text]) for text in texts])
    np.testing.assert_allclose(batched, single, atol=2e-6)
    reversed_logits = compute_logits(task, model, texts[::-1], batch_size=2, overhead_tokens=0)
    np.testing.assert_allclose(reversed_logits[::-1], single, atol=2e-6)


def test_padding_is_masked_in_every_window():
    task = make_task("memory")
    model = make_model(task)
    (batch,) = make_batches(task, [random_text(3), random_text(30)])
    other = dataclasses.replace(batch, input_ids=torch.where(batch.padding_mask, 99, batch.input_ids))
    torch.testing.assert_close(model.predict(batch), model.predict(other), rtol=0, atol=0)


def test_only_the_last_window_has_a_gradient():
    task, text = make_task("memory"), " ".join(map(str, range(10, 40)))
    model = make_model(task).train()
    (batch,) = make_batches(task, [text])
    *_, last = batch.windows()
    (micro_step,) = LengthBucketSampler(make_split(task, [text]).features, "left", 0, 1, 16).micro_steps(1, 0, 1, 1)
    model(micro_step).backward()
    gradient = model.backbone.word_embedding.weight.grad.abs().sum(1)
    assert set(gradient.nonzero().flatten().tolist()) == set(last.input_ids.flatten().tolist())


def test_sliding_windows_overlap_and_cover_the_text():
    task = make_task("windows", window_stride=4)
    features = make_split(task, [" ".join(map(str, range(10, 25)))]).features
    rows = [feature.rows[0].input_ids for feature in features]
    assert [row[:-2].tolist() for row in rows] == [[*range(b, min(b + 6, 25))] for b in (10, 14, 18, 22)]


def test_logits_of_windows_are_pooled_by_mean_or_max():
    task = make_task("windows", window_stride=6)
    split = make_split(task, [random_text(7), random_text(2), random_text(13)])
    assert [feature.example_index for feature in split.features] == [0, 0, 1, 2, 2, 2]
    logits = np.array([[1, 0], [3, 4], [5, 6], [0, 0], [3, -3], [0, 9]], np.float32)
    assert pool_windows(split, {"logits": logits}, "mean")["logits"].tolist() == [[2, 2], [5, 6], [1, 2]]
    assert pool_windows(split, {"logits": logits}, "max")["logits"].tolist() == [[3, 4], [5, 6], [3, 9]]
    assert pool_windows(split, {"logits": logits[:, 0]}, "mean")["logits"].tolist() == [2, 5, 1]
    predictions = task.to_predictions(split, {"logits": logits})
    assert [prediction["prediction"] for prediction in predictions] == ["a", "b", "b"]
    assert task.compute_metrics(split, {"logits": logits})["accuracy"] == pytest.approx(2 / 3)  # labels are a, b, a


def test_numbers_of_windows_are_pooled():
    task = make_task("windows", labels=(), name="regress", window_stride=6)
    split = make_split(task, [random_text(7), random_text(2)])
    predictions = task.to_predictions(split, {"logits": np.array([1.0, 2, 4])})
    assert [prediction["prediction"] for prediction in predictions] == [1.5, 4.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_len": 5}, "data.mem_len=5 .*long_text=memory"),
        ({"mem_len": 0, "long_text": "memory"}, "data.mem_len=0 .*at least 1"),
        ({"long_text": "windows", "window_stride": 7, "max_seq_len": 8}, "data.window_stride=7 .*between 1 and 6"),
        ({"window_stride": 7}, "data.window_stride=7 .*long_text=windows"),
        ({"window_pooling": "max"}, "data.window_pooling=max .*long_text=windows"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskDataConfig(**settings)


def test_a_text_pair_is_refused_by_strategies_for_a_single_text():
    pair = Example("0", ("10 11", "12"), 0, "dev.tsv, line 2")
    with pytest.raises(ValueError, match="dev.tsv, line 2: data.long_text=memory .*has 2.*long_text=truncate"):
        make_task("memory").encode([pair], NumberTokenizer())


@pytest.mark.parametrize(("task", "long_text"), [("race", "windows"), ("squad/2.0", "memory")])
def test_a_task_with_several_texts_only_truncates(task, long_text):
    with pytest.raises(ValueError, match=f"data.long_text={long_text} .*task={task} .*long_text=truncate"):
        build_task(task, TaskDataConfig(long_text=long_text), "last")


def test_memory_needs_a_memory_length_and_the_last_position():
    with pytest.raises(ValueError, match="model.pooling=first"):
        build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b"], long_text="memory"), "first")
    with pytest.raises(ValueError, match="model.mem_len=0.* data.mem_len=384"):
        check_memory(TaskDataConfig(long_text="memory"), dataclasses.replace(CONFIG, mem_len=0))


def train_and_measure(long_text, steps=120):
    """Return the accuracy on new texts of three windows, whose label is whether the second contains a certain token."""
    rng = np.random.default_rng(0)

    def make_texts(n):
        tokens = rng.integers(10, 18, (n, 20))
        tokens[1::2, 9] = 20
        return [" ".join(map(str, row)) for row in tokens]

    task = make_task(long_text)
    torch.manual_seed(0)
    model = TaskModel(dataclasses.replace(CONFIG, n_layer=2, init_std=0.3), task)
    sampler = LengthBucketSampler(make_split(task, make_texts(512)).features, "left", 0, 1, 10**6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        (micro_step,) = sampler.micro_steps(1, step, 32, 1)
        optimizer.zero_grad()
        model(micro_step).backward()
        optimizer.step()
    new_texts = make_texts(64)
    return (compute_logits(task, model, new_texts).argmax(1) == np.arange(64) % 2).mean()


def test_a_token_in_the_middle_of_a_text_is_learned_with_memory_and_windows_only():
    assert train_and_measure("memory") > 0.95 and train_and_measure("windows") > 0.95
    assert train_and_measure("truncate") < 0.75
