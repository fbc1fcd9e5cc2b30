"""Invalid input is refused with a one-line error that names key, value and remedy, and leaves no partial files."""

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import has_bf16, only_error, refused
from tests.integration.conftest import call, run
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

FOLDER = Path(__file__).parent


def assert_refused(result, pattern):
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(pattern, only_error(result.stderr)), result.stderr


@pytest.mark.parametrize(
    ("overrides", "key", "value", "remedy"),
    [
        ("model.mem_len=many", "model.mem_len", "many", "integer"),
        ("objective.name=permute", "objective.name", "permute", "permutation"),
        ("data.reuse_len=31", "data.reuse_len", 31, r"data\.reuse_len=16"),
        ("data.store_dir=nowhere", "data.store_dir", "nowhere", r"pretrain/prepare\.py"),
        ("model.vocab_size=5", "model.vocab_size", 5, "Leave it out"),
        ("model.n_head=0", "model.n_head", 0, "at least 1"),
        ("eval.mem_len=-4", "eval.mem_len", -4, "at least 0"),
        ("optim.lr=-1", "optim.lr", -1.0, "positive"),
        ("optim.lr=inf", "optim.lr", "inf", "finite"),
        ("train.hours=nan", "train.hours", "nan", "finite"),
        ("text.mixture.a=.inf", "text.mixture.a", "inf", "finite"),
        ("model.n_layer=0", "model.n_layer", 0, "at least 1"),
        ("model.norm_eps=-1", "model.norm_eps", -1.0, "positive"),
        ("model.init_std=0", "model.init_std", 0.0, "positive"),
        ("data.pairs=3", "data.pairs", 3, "true or false"),
        ("model.cutoffs=5", "model.cutoffs", 5, "list"),
        ("text.mixture=[a]", "text.mixture", "[a]", "mapping"),
        ("seed=99999999999999999999999", "seed", 99999999999999999999999, "at most 9223372036854775807"),
        ("name=", "name", "''", "must not be empty"),
        ("name=..", "name", "'..'", r"`\.\.`"),
        ("run_dir=", "run_dir", "''", "folder"),
        (f"run_dir={__file__}/run", "run_dir", f"{__file__}/run", "is not a folder.*another run_dir"),
        ("data.store_dir=", "data.store_dir", "''", "folder"),
        (f"data.store_dir={FOLDER}", "data.store_dir", FOLDER, r"not a token store.*pretrain/prepare\.py"),
        ("eval.sentences=[abc]", "eval.sentences", "'abc'", "____"),
        ("deepspeed.zero_optimization=1", "deepspeed.zero_optimization", 1, "mapping"),
        ("deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.stage", 4, "0, 1, 2 or 3"),
        ("optim.name=lion", "optim.name", "lion", "adamw"),
        (
            "optim.name=muon deepspeed.zero_optimization.stage=3",
            "deepspeed.zero_optimization.stage",
            3,
            r"optim\.name=muon.*optim\.name=adamw",
        ),
        (
            "deepspeed.zero_optimization.offload_param=cpu",
            "deepspeed.zero_optimization.offload_param",
            "cpu",
            r"mapping.*\{device: cpu\}",
        ),
        ("seed=-1", "seed", -1, "at least 0"),
        ("train.hours=0", "train.hours", 0.0, "positive"),
        ("objective.next_sentence=true data.pairs=false", "objective.next_sentence", "true", r"data\.pairs=true"),
        ("objective.next_sentence=true data.reuse_len=32", "objective.next_sentence", "true", r"data\.reuse_len=32"),
        (
            "objective.next_sentence=true data.reuse_len=32 objective.name=causal",
            "objective.next_sentence",
            "true",
            r"objective\.name=causal",
        ),
    ],
)
def test_an_invalid_setting_is_refused_before_anything_is_written(make_args, tmp_path, overrides, key, value, remedy):
    refused(call("pretrain/run.py", *make_args(), *overrides.split()), key, value, remedy)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ("objective.max_spans=1", r"objective\.max_spans.*objective\.max_span\b"),
        ("mem_len=0", r"model\.mem_len.*eval\.mem_len"),
        ("model=large", r"'model'.*group"),
        ("modle.n_layer=2", r"modle\.n_layer.*model\.n_layer"),
        ("data.seq_len=999998", r"data\.seq_len"),
        ("deepspeed.train_batch_size=8", r"deepspeed\.train_batch_size.*train\.global_batch_size"),
        ("steps", r"steps.*key=value"),
        ("[=3", r"key=value"),
        ("text.mixture={a:1}", r"'a:1' in text\.mixture.*space after"),
        ("seed=${seed}", r"seed: .*interpolation"),
        ("seed=${nothing}", r"seed: .*'nothing'"),
        ("run_dir=${", r"run_dir: "),
        (f"tokenizer.path={__file__}", r"tokenizer\.path=.*test_bad_input\.py.*SentencePiece model"),
        (
            "optim.name=muon deepspeed.zero_optimization.offload_optimizer.device=cpu",
            r"deepspeed\.zero_optimization\.offload_optimizer .*optim\.name=muon.*optim\.name=adamw",
        ),
    ],
)
def test_arguments_that_are_not_settings_with_one_value_are_refused(make_args, tmp_path, overrides, pattern):
    assert_refused(call("pretrain/run.py", *make_args(), *overrides.split()), pattern)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (
            {"train__global_batch_size": 3, "train__micro_batch_size": 2},
            r"train\.micro_batch_size=2 .*3 rows",
        ),
        ({"deepspeed.zero_optimization.overlap": "true"}, r"deepspeed.*overlap"),
        (
            {"deepspeed.zero_optimization.stage": 0, "train__precision": "bf16"},
            r"deepspeed\.zero_optimization\.stage=0 .*train\.precision=bf16"
            if has_bf16()
            else r"train\.precision=bf16 .*no bf16",
        ),
    ],
)
def test_a_setting_that_deepspeed_does_not_support_is_refused(make_args, tmp_path, changes, pattern):
    assert_refused(run("pretrain/run.py", *make_args(**changes)), pattern)
    assert not (tmp_path / "tiny").exists()


def test_a_run_with_a_diverged_model_is_not_finished(make_args, tmp_path):
    result = run("pretrain/run.py", *make_args(optim__lr=1e30, train__steps=5))  # steps are skipped from the second on
    assert_refused(result, r"not finite after the last step \(5\)")
    assert not (tmp_path / "tiny" / "model").exists() and not (tmp_path / "tiny" / "checkpoints").exists()


def test_a_missing_or_invalid_config_file_is_named(tmp_path):
    assert_refused(call("pretrain/run.py", "--config", tmp_path / "none.yaml"), r"none\.yaml.*no such file")
    (tmp_path / "bad.yaml").write_text("model: [1,\n")
    assert_refused(call("pretrain/run.py", "--config", tmp_path / "bad.yaml"), r"bad\.yaml.*YAML")


def test_a_store_of_another_vocabulary_is_refused(make_args, documents, tmp_path):
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(tmp_path / "other.model")
    result = call("pretrain/run.py", *make_args(tokenizer__path=tmp_path / "other.model"))
    assert_refused(result, r"vocabulary")


def test_a_damaged_store_names_its_file(make_args, store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "store")
    (broken / "unigram.bin").write_bytes(b"")
    assert_refused(call("pretrain/run.py", *make_args(data__store_dir=broken)), r"unigram\.bin")


def test_preparation_refuses_invalid_input_and_leaves_no_files(text_file, tmp_path):
    paths = [
        f"tokenizer.path={tmp_path / 'v.model'}",
        f"data.store_dir={tmp_path / 'store'}",
        f"text.source={text_file}",
    ]
    tokenizer, prepare = "pretrain/train_tokenizer.py", "pretrain/prepare.py"
    refused(call(tokenizer, *paths, "text.source=nothing/*.txt"), "text.source", "nothing/*.txt", "no file")
    too_large = call(tokenizer, *paths, "tokenizer.vocab_size=20000")
    refused(too_large, "tokenizer.vocab_size", 20000, r"Set tokenizer\.vocab_size=")
    assert_refused(call(prepare, *paths), r"pretrain/train_tokenizer\.py")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("\n\n")
    assert_refused(call(tokenizer, *paths, f"text.source={tmp_path / 'empty'}/*.txt"), r"no text")
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}

    assert call(tokenizer, *paths, "tokenizer.vocab_size=300").returncode == 0
    smaller = call(tokenizer, *paths, "tokenizer.vocab_size=200")
    refused(smaller, "tokenizer.vocab_size", 200, r"Set tokenizer\.vocab_size=300")
    other = call(tokenizer, *paths, "tokenizer.vocab_size=300", "tokenizer.character_coverage=0.99")
    refused(other, "tokenizer.character_coverage", 0.99, r"tokenizer\.character_coverage=0\.99995")
    assert_refused(
        call(tokenizer, *paths, "tokenizer.vocab_size=300", "text.source=docstrings"),
        rf"v\.model .*text\.source=docstrings.*{text_file.name}",
    )
    (tmp_path / "empty" / "b.txt").write_bytes(text_file.read_bytes() + b"\n\xff")
    assert_refused(call(prepare, *paths, f"text.source={tmp_path / 'empty'}/b.txt"), r"b\.txt, line")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "v.model", "v.model.json"}
    assert call(prepare, *paths).returncode == 0
    refused(call(prepare, *paths, "text.max_chars=1000000"), "text.max_chars", 1000000, r"text\.max_chars=null")
    more = text_file.with_name("more.txt")
    more.write_text("Ba be bi.")
    try:
        pattern = f"text.source={text_file.with_name('*.txt')}"
        several = [*paths[:1], f"data.store_dir={tmp_path / 'several'}", pattern]
        assert call(prepare, *several).returncode == 0
        more.write_text("Ba be bi bo.")
        assert_refused(call(prepare, *several), r"more\.txt was added, removed or changed")
    finally:
        more.unlink()


def test_a_folder_without_a_model_or_metrics_is_refused(tmp_path):
    assert_refused(call("pretrain/fill.py", tmp_path, "a ____"), r"not a model folder")
    assert_refused(call("pretrain/report.py", tmp_path), r"no metrics\.jsonl .*no table\.csv")
