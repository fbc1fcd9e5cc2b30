"""Texts longer than a window: what is read, what is remembered, and what must change no number."""

import dataclasses

import numpy as np
import pytest
import torch

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.data.examples import Example, Split
from finetune.data.long_text import check_memory, pooled
from finetune.tasks.registry import build_task
from finetune.trainer.evaluator import answer
from finetune.trainer.task_model import TaskModel
from xlpre.model.config import ModelConfig
from xlpre.model.memory import initial_memory
from xlpre.training.distributed import Comm

WINDOW = 8
SHAPE = ModelConfig(
    n_layer=3, d_model=16, n_head=2, d_inner=32, vocab_size=100, mem_len=64, attention_backend="reference", dropout=0.0, dropatt=0.0
)  # fmt: skip


class Numbers:
    """A tokenizer of texts that are numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]


def text_of(n, seed=0):
    return " ".join(map(str, np.random.default_rng([seed, n]).integers(10, 100, n)))


def task_of(long, labels=("a", "b"), name="classify", **data):
    settings = TaskDataConfig(text=["text"], labels=list(labels), max_seq_len=WINDOW, long_text=long, **data)
    return build_task(name, settings, "last")


def model_of(task, **changes):
    torch.manual_seed(0)
    model = TaskModel(dataclasses.replace(SHAPE, **changes), task).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def split_of(task, texts):
    examples = [Example(str(number), (text,), number % 2, f"f, line {number}") for number, text in enumerate(texts)]
    return Split("dev", examples, task.encode(examples, Numbers()))


def logits_of(task, model, texts, rows=32, pass_tokens=10**6):
    split = split_of(task, texts)
    return task.pool_outputs(split, answer(model, split, rows, pass_tokens, Comm()))["logits"]


def parts_of(task, texts):
    return list(LengthBucketSampler(split_of(task, texts).features, "left", 0, 1, 10**6).eval_batches(32))


def test_a_text_that_fits_into_one_window_is_answered_alike_in_all_ways():
    texts = [text_of(n) for n in (1, 3, WINDOW - 2)]
    found = [logits_of(task, model_of(task), texts) for task in map(task_of, ("cut", "memory", "windows"))]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_a_text_is_read_to_its_end_in_full_windows_counted_from_there():
    (part,) = parts_of(task_of("memory"), [text_of(2 * WINDOW + 1)])  # and two symbols
    windows = part.windows()
    assert [window.input_ids.size(1) for window in windows] == [3, WINDOW, WINDOW]
    assert torch.equal(torch.cat([window.input_ids for window in windows], 1), part.input_ids)
    assert [window.segment_ids.unique().tolist() for window in windows] == [[0], [0], [0, 2]]


def test_the_last_window_remembers_what_pretraining_would():
    task = task_of("memory")
    model = model_of(task)
    (part,) = parts_of(task, [text_of(3 * WINDOW)])
    *earlier, last = part.windows()
    expected = initial_memory(SHAPE, 1)  # as the loop of pretraining has it: the model's length, empty
    for window in earlier:
        batch = window.model_batch(window.input_ids.new_zeros(1, 1), torch.tensor([10**6]), reuse_len=window.input_ids.size(1))
        _, expected = model.backbone(batch, expected)
    found, seen = model._memory(earlier, last)
    assert found.hidden.size(2) == seen.item() == expected.valid.item() == 2 * WINDOW + 2
    torch.testing.assert_close(found.hidden, expected.hidden[:, :, -found.hidden.size(2) :], rtol=1e-6, atol=1e-6)
    assert not found.hidden.requires_grad


def test_windows_in_memory_of_one_layer_are_one_long_row():
    """Of one layer memory holds the tokens themselves, so that the last place sees the same in both."""
    task, texts = task_of("memory"), [text_of(n) for n in (5, 17, 40)]
    whole = build_task("classify", dataclasses.replace(task.data, long="cut", max_len=64), "last")
    found = [logits_of(one, model_of(one, n_layer=1), texts) for one in (task, whole)]
    np.testing.assert_allclose(found[0], found[1], atol=2e-6)


def test_the_answer_depends_on_text_of_earlier_windows_as_far_as_memory_reaches():
    tokens = text_of(4 * WINDOW).split()
    near, far = list(tokens), list(tokens)
    near[-WINDOW - 2] = far[0] = "11"
    for mem_len, reaches_far in ((None, True), (4, False)):
        task = task_of("memory", mem_len=mem_len)
        model = model_of(task, n_layer=1)  # a memory of more layers reaches farther than its columns
        of_text, of_near, of_far = logits_of(task, model, [" ".join(one) for one in (tokens, near, far)])
        assert np.abs(of_near - of_text).max() > 1e-4
        assert (np.abs(of_far - of_text).max() > 1e-4) == reaches_far
    cut = task_of("cut")
    of_text, of_near, of_far = logits_of(cut, model_of(cut), [" ".join(one) for one in (tokens, near, far)])
    assert (of_text == of_near).all() and (of_text != of_far).any()  # which is what is lost


@pytest.mark.parametrize("long", ["memory", "windows"])
def test_neither_padding_nor_company_changes_an_answer(long):
    task, texts = task_of(long), [text_of(n) for n in (1, 6, 7, 15, 16, 40, 90)]
    model = model_of(task)
    together = logits_of(task, model, texts)
    alone = np.concatenate([logits_of(task, model, [text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(logits_of(task, model, texts[::-1], rows=2, pass_tokens=0)[::-1], alone, atol=2e-6)


def test_what_is_padded_is_never_looked_at_in_any_window():
    task = task_of("memory")
    model = model_of(task)
    (part,) = parts_of(task, [text_of(3), text_of(30)])
    other = dataclasses.replace(part, input_ids=torch.where(part.padding_mask, 99, part.input_ids))
    torch.testing.assert_close(model.answer(part), model.answer(other), rtol=0, atol=0)


def test_gradient_comes_from_the_last_window_alone():
    task = task_of("memory")
    model = model_of(task).train()
    (part,) = parts_of(task, [" ".join(map(str, range(10, 40)))])
    *_, last = part.windows()
    (parts,) = LengthBucketSampler(split_of(task, [" ".join(map(str, range(10, 40)))]).features, "left", 0, 1, 16).micro_steps(
        1, 0, 1, 1
    )
    model(parts).backward()
    gradient = model.backbone.word_embedding.weight.grad.abs().sum(1)
    assert set(gradient.nonzero().flatten().tolist()) == set(last.input_ids.flatten().tolist())


def test_windows_overlap_and_cover_the_text():
    task = task_of("windows", window_stride=4)
    rows = [item.rows[0].input_ids for item in split_of(task, [" ".join(map(str, range(10, 25)))]).features]
    assert [row[:-2].tolist() for row in rows] == [[*range(b, min(b + 6, 25))] for b in (10, 14, 18, 22)]


def test_answers_of_windows_are_pooled_by_hand():
    task = task_of("windows", window_stride=6)
    split = split_of(task, [text_of(7), text_of(2), text_of(13)])
    assert [item.example_index for item in split.features] == [0, 0, 1, 2, 2, 2]
    logits = np.array([[1, 0], [3, 4], [5, 6], [0, 0], [3, -3], [0, 9]], np.float32)
    assert pooled(split, {"logits": logits}, "mean")["logits"].tolist() == [[2, 2], [5, 6], [1, 2]]
    assert pooled(split, {"logits": logits}, "max")["logits"].tolist() == [[3, 4], [5, 6], [3, 9]]
    assert pooled(split, {"logits": logits[:, 0]}, "mean")["logits"].tolist() == [2, 5, 1]
    assert [one["prediction"] for one in task.to_predictions(split, {"logits": logits})] == ["a", "b", "b"]
    assert task.compute_metrics(split, {"logits": logits})["accuracy"] == pytest.approx(2 / 3)  # truth is a, b, a


def test_numbers_are_pooled_too():
    task = task_of("windows", labels=(), name="regress", window_stride=6)
    split = split_of(task, [text_of(7), text_of(2)])
    assert [one["prediction"] for one in task.to_predictions(split, {"logits": np.array([1.0, 2, 4])})] == [1.5, 4.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_len": 5}, r"data.mem_len \(5\) must be at least 1 and goes with data.long_text=memory"),
        ({"long": "windows", "window_stride": 7, "max_len": 8}, r"data.window_stride \(7\) must be between 1 and 6"),
        ({"window_stride": 7}, "goes with data.long_text=windows"),
        ({"pool": "max"}, "data.window_pooling=max has no effect without data.long_text=windows"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskDataConfig(**settings)


def test_what_cannot_be_read_so_is_refused():
    pair = Example("0", ("10 11", "12"), 0, "dev.tsv, line 2")
    with pytest.raises(ValueError, match="dev.tsv, line 2: data.long_text=memory reads one text, and here are 2"):
        task_of("memory").encode([pair], Numbers())
    with pytest.raises(ValueError, match="data.long_text=windows reads one text, and task=race several"):
        build_task("race", TaskDataConfig(long_text="windows"), "last")
    with pytest.raises(ValueError, match="data.long_text=memory reads one text, and task=squad/2.0 several"):
        build_task("squad/2.0", TaskDataConfig(long_text="memory"), "last")
    with pytest.raises(ValueError, match="model.pooling=first"):
        build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b"], long_text="memory"), "first")
    with pytest.raises(ValueError, match="the model of init= has model.mem_len=0; say how much: data.mem_len=384"):
        check_memory(TaskDataConfig(long_text="memory"), dataclasses.replace(SHAPE, mem_len=0))


def learned(long, steps=120):
    """Accuracy on new texts of three windows, whose class is whether a word is in the second."""
    rng = np.random.default_rng(0)

    def texts(n):
        tokens = rng.integers(10, 18, (n, 20))
        tokens[1::2, 9] = 20
        return [" ".join(map(str, row)) for row in tokens]

    task = task_of(long)
    torch.manual_seed(0)
    model = TaskModel(dataclasses.replace(SHAPE, n_layer=2, init_std=0.3), task)
    dealer = LengthBucketSampler(split_of(task, texts(512)).features, "left", 0, 1, 10**6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        (parts,) = dealer.micro_steps(1, step, 32, 1)
        optimizer.zero_grad()
        model(parts).backward()
        optimizer.step()
    new = texts(64)
    return (logits_of(task, model, new).argmax(1) == np.arange(64) % 2).mean()


def test_what_stands_in_the_middle_of_a_text_is_learned_with_memory_and_by_windows_and_not_when_cut():
    assert learned("memory") > 0.95 and learned("windows") > 0.95
    assert learned("cut") < 0.75
