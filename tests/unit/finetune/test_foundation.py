import dataclasses

import pytest

from finetune.config import FinetuneConfig, TaskModelConfig, TaskTrainConfig, apply_cli_precedence
from finetune.trainer.inputs import RunInputs
from tests.conftest import write_folder
from xlpre.config.loader import load_config
from xlpre.text.special_tokens import CLS, SEP


@pytest.fixture
def founded(tokenizer, tmp_path):
    """A foundation by words, on 20 examples."""
    write_folder(tmp_path / "model", tokenizer)
    rows = [f"ba {'be ' * number}\t{number % 2}\n" for number in range(20)]
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "".join(rows))
    (tmp_path / "dev.tsv").write_text("text\tlabel\nba\t1\n")
    usual = ["task=classify", f"init_from={tmp_path / 'model'}", f"data.dir={tmp_path}", "data.train=[train.tsv]"]
    usual += ["data.dev=[dev.tsv]", "data.text=[text]", "train.global_batch_size=8"]
    return lambda *words: RunInputs(load_config(FinetuneConfig, None, [*usual, *words]))


def test_epochs_and_the_share_of_warm_up_become_updates(founded):
    config = founded("epochs=3", "warmup_share=0.25").config
    assert (config.train.steps, config.schedule.warmup_steps) == (8, 2)  # 60 examples in batches of 8
    assert (config.epochs, config.warmup_share) == (None, None)


def test_a_number_that_was_typed_wins_over_a_files_share():
    config = FinetuneConfig(epochs=3, warmup_ratio=0.1)
    assert apply_cli_precedence(config, {"train.steps"}) == dataclasses.replace(config, epochs=None)
    assert apply_cli_precedence(config, {"epochs", "optim.lr"}) == config
    with pytest.raises(ValueError, match="warmup_share and schedule.warmup_steps say the same"):
        apply_cli_precedence(config, {"warmup_share", "schedule.warmup_steps"})


def test_what_was_resolved_resolves_to_itself(founded, tmp_path):
    config = founded("epochs=3", "warmup_share=0.25").config
    assert config.data.labels == ["0", "1"]
    assert RunInputs(config).config == config


def test_a_limit_draws_some_examples_by_the_seed(founded):
    drawn = [
        [x.texts for x in founded("data.max_train_examples=5", f"seed={seed}").train.examples] for seed in (1, 1, 2)
    ]
    assert len(drawn[0]) == 5 and drawn[0] == drawn[1] != drawn[2]


def test_of_test_examples_nothing_need_be_read_unless_something_is_true_of_them(founded, tmp_path):
    (tmp_path / "test.tsv").write_text("index\ttext\n0\t\u200b\n1\t\n2\tba\n")
    (test,) = founded("data.test=[test.tsv]").test
    assert [item.rows[0].input_ids.tolist() for item in test.items[:2]] == [[SEP, CLS]] * 2 and len(test.items) == 3
    (tmp_path / "test.tsv").write_text("label\ttext\n1\t\u200b\n")
    with pytest.raises(ValueError, match=r"test.tsv, line 2: of .* the vocabulary reads nothing"):
        founded("data.test=[test.tsv]")


def test_facts_tell_other_examples_weights_and_settings_apart_and_not_speed(founded, tmp_path):
    facts = founded().facts(1)
    assert (
        founded("train.accumulation=2", "model.attention_backend=reference", "data.forward_overhead_tokens=3").facts(1)
        == facts
    )
    assert founded("data.max_train_examples=19").facts(1)["examples"] != facts["examples"]
    (tmp_path / "dev.tsv").write_text("text\tlabel\nba\t0\n")
    assert founded().facts(1)["measured"] != facts["measured"]
    assert founded("data.labels=[1, 0]").facts(1)["labels"] != facts["labels"]
    assert founded("from_scratch=true").facts(1)["weights"] == "drawn" != facts["weights"]
    assert founded("model.dropout=0.3").facts(1)["model"] != facts["model"]
    assert founded("model.pooling=attn").facts(1)["model"] != facts["model"]


def test_the_folder_gives_dropout_where_nothing_else_is_said(founded):
    assert founded().shape.dropout == 0.0 and founded("model.dropout=0.2").shape.dropout == 0.2


def test_attention_written_by_hand_is_not_compiled():
    with pytest.raises(
        ValueError, match=r"train\.compile=true cannot compile model\.attention=cpu.*set model\.attention=auto"
    ):
        FinetuneConfig(model=TaskModelConfig(attention_backend="cpu"), train=TaskTrainConfig(compile=True))
