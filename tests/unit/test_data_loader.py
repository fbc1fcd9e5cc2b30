import dataclasses
import itertools
import time

import pytest
import torch

from tests.unit.data.test_lanes import lanes_over
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader, assign_lanes
from xlpre.inference.cloze import cloze_batch
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES, build_objective
from xlpre.text import special_tokens


@pytest.fixture
def loader_of(store, tokenizer):
    def make(seed=1, workers=1, n_lanes=8, name="permutation"):
        data = DataConfig(seq_len=64, reuse_len=64 if name == "causal" else 32, num_threads=workers)
        lanes = lanes_over(store.train, n_lanes, stride=data.reuse_len, lookahead=data.lookahead, seed=seed)
        objective = build_objective(ObjectiveConfig(name=name), data, tokenizer.starts_word)
        return Loader(lanes, data, objective, seed)

    return make


def same(a, b):
    fields = [field.name for field in dataclasses.fields(a)]
    return all(
        torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in ((getattr(a, f), getattr(b, f)) for f in fields)
    )


def joined(batches):
    first = batches[0]
    return dataclasses.replace(
        first,
        **{
            f.name: torch.cat([getattr(b, f.name) for b in batches])
            for f in dataclasses.fields(first)
            if torch.is_tensor(getattr(first, f.name))
        },
    )


def test_a_batch_is_a_function_of_its_step_whatever_was_read_before(loader_of):
    whole = list(itertools.islice(loader_of().batches(0, lambda step: [range(8)]), 12))
    late = list(itertools.islice(loader_of(workers=4).batches(7, lambda step: [range(8)]), 5))
    assert all(same(a, b) for a, b in zip(whole[7:], late, strict=True))
    assert not same(whole[0], whole[1]) and not same(whole[0], loader_of(seed=2).batch(0, range(8)))


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_processes_and_micro_steps_share_the_rows_of_a_step(loader_of, processes, accumulation):
    whole = loader_of().batch(3, range(8))
    micro_steps = []
    for micro in range(accumulation):
        for process in range(processes):
            micro_steps.append(loader_of().batch(3, assign_lanes(process, processes, 8 // (processes * accumulation), accumulation)[micro]))
    assert same(whole, joined(micro_steps))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_is_the_same_whichever_rows_are_made_with_it(loader_of, name):
    loader = loader_of(name=name)
    whole = loader.batch(3, range(8))
    for lanes in ([5], [6, 1, 3], range(1, 8, 3)):
        few = loader.batch(3, lanes)
        assert same(few, joined([loader.batch(3, [lane]) for lane in lanes]))
        assert torch.equal(few.key_rank, whole.key_rank[list(lanes)])
        assert torch.equal(few.input_ids, whole.input_ids[list(lanes)])


def test_a_loader_counts_how_long_it_was_waited_for(loader_of, monkeypatch):
    loader, make = loader_of(), Loader.batch

    def slow(self, step, lanes):
        time.sleep(0.1)
        return make(self, step, lanes)

    monkeypatch.setattr(Loader, "batch", slow)
    batches = loader.batches(0, lambda step: [range(8)])
    next(batches)
    waited = loader.wait_seconds
    assert waited > 0.08
    time.sleep(0.6)  # in which the next is made
    next(batches)
    assert loader.wait_seconds - waited < 0.08


def test_every_row_has_as_many_targets_and_they_are_its_own_tokens(loader_of):
    batch = loader_of().batch(5, range(8))
    assert batch.targets.shape == (8, 10) and (batch.target_weights == 1).all()
    assert torch.equal(batch.targets, batch.input_ids.gather(1, batch.target_positions))
    assert not torch.isin(batch.targets, torch.tensor([special_tokens.SEP, special_tokens.CLS])).any()
    assert batch.backward.tolist() == [False, True] * 4


def test_a_blank_is_hidden_and_sees_the_text_but_no_other_blank(tokenizer):
    batch = cloze_batch("Ba ____ di ____ bu.", tokenizer)
    first, second = batch.target_positions[0].tolist()
    sees = batch.query_rank[0][:, None] > batch.key_rank[0][None]
    assert (batch.input_ids[0][[first, second]] == special_tokens.MASK).all()
    assert not sees[first, second] and not sees[second, first] and not sees[first, first]
    assert sees[first].sum() == len(sees) - 2
    others = torch.ones(len(sees), dtype=bool)
    others[[first, second]] = False
    assert not sees[others][:, [first, second]].any()
    assert tokenizer.pieces[batch.input_ids[0][first + 1]].startswith(special_tokens.WORD_BOUNDARY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ba di.", "has no blank; mark one with ____"),
        ("", "has no blank"),
        ("def __init__(self): di.", "has no blank"),
        ("ba " * 3000 + "____", "at most 2,048"),
        ("<eop> ____ di.", "has <eop>, which is no text"),
    ],
)
def test_a_text_that_cannot_be_filled_in_is_refused(tokenizer, text, message):
    with pytest.raises(ValueError, match=message):
        cloze_batch(text, tokenizer)
