import pytest

from finetune.config import FinetuneConfig
from pretrain.config import PretrainConfig
from xlpre.config.key_suggestions import ALIASES, suggest_key
from xlpre.config.schema_docs import setting_keys

PRETRAIN_KEYS, FINETUNE_KEYS = (list(setting_keys(schema)) for schema in (PretrainConfig, FinetuneConfig))


def test_every_alias_names_existing_settings():
    assert {key.partition("=")[0] for keys in ALIASES.values() for key in keys} <= {*PRETRAIN_KEYS, *FINETUNE_KEYS}


@pytest.mark.parametrize(
    ("key", "suggestions"),
    [
        ("learning_rate", ["optim.lr"]),
        ("optim.learning_rate", ["optim.lr"]),
        ("output-dir", ["run_dir"]),
        ("model.hidden_size", ["model.d_model"]),
        ("bf16", ["train.precision=bf16"]),
        ("train.fp16", ["train.precision=fp16"]),
        ("train.output_dir", ["run_dir"]),
        ("text.path", ["text.source"]),
        ("epochs", ["train.steps"]),
        ("warmup", ["schedule.warmup_steps"]),
        ("train.lr", ["optim.lr"]),
        ("mem_len", ["model.mem_len", "eval.mem_len"]),
        ("modle.n_layer", ["model.n_layer"]),
        ("objective.max_spans", ["objective.max_span"]),
        ("model.seqlen", ["data.seq_len"]),
        ("max_seq_length", ["data.seq_len"]),
        ("batch_size", ["train.global_batch_size", "train.micro_batch_size"]),
    ],
)
def test_aliases_other_groups_and_typos_are_recognized(key, suggestions):
    assert suggest_key(key, PRETRAIN_KEYS) == f"did you mean {' or '.join(map(repr, suggestions))}?"


@pytest.mark.parametrize("key", ["banana", "gpus", "model.num_steads", "model.banana", "text.colour", "hidden.state"])
def test_nothing_is_suggested_for_an_unrelated_key(key):
    assert suggest_key(key, PRETRAIN_KEYS) == ""


def test_fine_tuning_suggests_its_own_settings():
    assert suggest_key("max_seq_length", FINETUNE_KEYS) == "did you mean 'data.max_seq_len'?"
    assert suggest_key("hidden_size", FINETUNE_KEYS) == ""


def test_the_keys_of_a_single_group_have_no_prefix():
    assert suggest_key("maxlen", ["dir", "max_seq_len", "label"]) == "did you mean 'max_seq_len'?"
