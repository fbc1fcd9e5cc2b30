import importlib.util
import itertools
import sys

import numpy as np
import pytest

from pretrain.config import EvalConfig, PretrainConfig
from pretrain.trainer.samples import Samples
from tests.conftest import REPOSITORY
from xlpre.config.cli import parse_config
from xlpre.data.window_layout import DataConfig
from xlpre.inference.cloze import sample_cloze_examples
from xlpre.model.config import ModelConfig
from xlpre.training.deepspeed_engine import TrainConfig

COMMANDS = sorted((REPOSITORY / "pretrain").glob("*.py"))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_no_command_shadows_a_library_when_its_folder_comes_first_on_the_path(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("pretrain")])
    if path.stem != "__init__":
        assert importlib.util.find_spec(path.stem) is None


def test_the_launchers_local_rank_may_come_before_the_users_words():
    config = parse_config(DataConfig, "", ["--local_rank=1", "window=64", "reuse_len=32", "store=x"])
    assert (config.seq_len, config.store_dir) == (64, "x")


def test_a_training_that_is_over_leaves_the_other_processes(monkeypatch, tmp_path):
    from torch import distributed

    from pretrain import run

    joined = {"backend": "gloo", "store": distributed.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(run, "pretrain", lambda *given: distributed.init_process_group(**joined))
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--config", f"{REPOSITORY}/configs/pretrain/debug.yaml", f"run_dir={tmp_path}"]
    )
    run.main()
    assert not distributed.is_initialized()


def test_puzzles_hide_a_whole_word_of_held_out_text(store, tokenizer):
    puzzles = sample_cloze_examples(store.validation, tokenizer, 6, seed=0)
    assert len(puzzles) == 6
    for tokens, position in ((example.tokens, example.position) for example in puzzles):
        assert tokenizer.pieces[tokens[position]].startswith("▁")
        assert position + 1 == len(tokens) or tokenizer.starts_word[tokens[position + 1]]
        assert tokens.min() > 8 and isinstance(tokens, np.ndarray)


def test_held_out_text_is_not_measured_twice(store, tokenizer):
    from pretrain.trainer.evaluator import Evaluator
    from xlpre.training.distributed import Comm

    data = DataConfig(store_dir="x", seq_len=32, reuse_len=16)
    config = PretrainConfig(data=data, eval=EvalConfig(batch_size=4, num_windows=10_000))
    evaluation = Evaluator(config, store, tokenizer, Comm())
    times = np.zeros(len(store.validation), int)
    for lane, step in itertools.product(range(4), range(evaluation._windows)):
        place = evaluation._loader.lanes.location(lane, step)
        begin = len(times) - place.begin - 16 if place.text.backward else place.begin
        times[begin : begin + 16] += 1
    assert (times == 1).mean() > 0.9
    assert (times > 1).sum() <= 16  # at an end, which a window backward cannot begin at


def test_a_sentence_that_is_too_long_to_fill_in_is_refused_before_the_run_begins(store, tokenizer):
    config = PretrainConfig(eval=EvalConfig(sentences=["Ba be bi bo bu. " * 1000 + "____"]))
    with pytest.raises(ValueError, match=r"eval.sentences: the text has [\d,]+ tokens, at most 2,048 are read"):
        Samples(config, store, tokenizer)


def test_attention_written_by_hand_is_not_compiled():
    rule = r"train\.compile=true cannot compile model\.attention=cpu.*set model\.attention=auto"
    with pytest.raises(ValueError, match=rule):
        PretrainConfig(model=ModelConfig(attention_backend="cpu"), train=TrainConfig(compile=True))
