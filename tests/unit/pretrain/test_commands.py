"""Commands of `pretrain/`, and checks before a run starts."""

import importlib.util
import itertools
import sys

import numpy as np
import pytest

from pretrain import prepare, quickstart, run, train_tokenizer
from pretrain.config import EvalConfig, PretrainConfig
from pretrain.trainer.samples import Samples
from tests.conftest import REPOSITORY
from xlpre.config.cli import SettingsParser
from xlpre.data.window_layout import DataConfig
from xlpre.inference import cloze
from xlpre.inference.cloze import sample_cloze_examples
from xlpre.model.config import ModelConfig
from xlpre.training.config import TrainConfig

# `evaluate` of Hugging Face comes with lm-eval, which no command imports
COMMANDS = sorted({*(REPOSITORY / "pretrain").glob("*.py")} - {REPOSITORY / "pretrain/evaluate.py"})


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_no_command_shadows_a_library_when_its_folder_comes_first_on_the_path(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("pretrain")])
    if path.stem != "__init__":
        assert importlib.util.find_spec(path.stem) is None


@pytest.mark.parametrize("command", [prepare, quickstart, run, train_tokenizer])
def test_a_command_without_a_preset_is_refused_before_it_starts(command):
    with pytest.raises(ValueError, match="--config is missing. Pass a preset"):
        command.main(["name=some"])


def test_local_rank_of_the_launcher_is_ignored():
    argv = ["--local_rank=1", "seq_len=64", "reuse_len=32", "store_dir=x"]
    config, _, _ = SettingsParser(DataConfig, "", []).parse_config(argv)
    assert (config.seq_len, config.store_dir) == (64, "x")


def test_the_process_group_is_destroyed_after_training(monkeypatch, tmp_path):
    from torch import distributed

    from pretrain import run
    from pretrain.trainer.trainer import Trainer

    arguments = {"backend": "gloo", "store": distributed.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(Trainer, "__init__", lambda self, *args: None)
    monkeypatch.setattr(Trainer, "train", lambda self: distributed.init_process_group(**arguments))
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--config", f"{REPOSITORY}/configs/pretrain/debug.yaml", f"run_dir={tmp_path}"]
    )
    run.main()
    assert not distributed.is_initialized()


def test_cloze_examples_mask_a_whole_word_of_validation_text(store, tokenizer):
    cloze_examples = sample_cloze_examples(store.validation, tokenizer, np.asarray(store.unigram), 6, seed=0)
    assert len(cloze_examples) == 6
    for tokens, position in ((example.tokens, example.position) for example in cloze_examples):
        assert tokenizer.pieces[tokens[position]].startswith("▁")
        assert position + 1 == len(tokens) or tokenizer.starts_word[tokens[position + 1]]
        assert tokens.min() > 8 and isinstance(tokens, np.ndarray)


def test_cloze_examples_mask_frequent_words_only(store, tokenizer, monkeypatch):
    monkeypatch.setattr(cloze, "N_FREQUENT", 3)
    counts = np.asarray(store.unigram)
    masked = {
        int(example.tokens[example.position])
        for example in sample_cloze_examples(store.validation, tokenizer, counts, 30, seed=0)
    }
    words = [
        token
        for token in np.argsort(-counts)
        if cloze._is_word(tokenizer.pieces[token]) and tokenizer.starts_word[token]
    ]
    assert masked and masked <= {*words[:3]}


def test_validation_text_is_evaluated_once(store, tokenizer):
    from pretrain.trainer.evaluator import Evaluator
    from xlpre.training.distributed import Comm

    data = DataConfig(store_dir="x", seq_len=32, reuse_len=16)
    config = PretrainConfig(data=data, eval=EvalConfig(batch_size=4, num_windows=10_000))
    evaluator = Evaluator(config, store, tokenizer, Comm())
    times = np.zeros(len(store.validation), int)
    for lane, step in itertools.product(range(4), range(evaluator._n_windows)):
        location = evaluator._loader.lanes.location(lane, step)
        begin = len(times) - location.begin - 16 if location.text.backward else location.begin
        times[begin : begin + 16] += 1
    assert (times == 1).mean() > 0.9
    assert (times > 1).sum() <= 16  # at an end of the text, where a backward window cannot begin


def test_a_sentence_that_is_too_long_is_refused_before_the_run_starts(store, tokenizer):
    config = PretrainConfig(eval=EvalConfig(sentences=["Ba be bi bo bu. " * 1000 + "____"]))
    with pytest.raises(ValueError, match=r"eval.sentences: .*2,048"):
        Samples(config, store, tokenizer)


def test_the_cpu_backend_cannot_be_compiled():
    with pytest.raises(ValueError, match=r"train\.compile=true .*model\.attention_backend=auto"):
        PretrainConfig(model=ModelConfig(attention_backend="cpu"), train=TrainConfig(compile=True))
