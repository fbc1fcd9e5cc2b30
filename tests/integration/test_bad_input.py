"""What a user gets wrong is one sentence with the key or file and the way out, and leaves nothing half-written."""

import shutil
from pathlib import Path

import pytest

from pretrain.run import main
from tests.conftest import has_bf16
from tests.integration.conftest import run
from xlpre.common.cli_main import run_main
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def refused(done, message):
    assert done.returncode == 2, done.stdout + done.stderr
    check_sentence(done.stderr, message)


def check_sentence(stderr, message):
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("objective.max_spans=1", "there is no setting 'objective.max_spans'; did you mean 'objective.max_span'?"),
        ("mem_len=0", "did you mean 'model.mem_len' or 'eval.mem_len'?"),
        ("model.mem_len=many", "model.mem_len: Value 'many' of type 'str' could not be converted to Integer"),
        ("objective.name=permute", "objective.name: Invalid value 'permute', expected one of"),
        ("model=large", "'model' is a group of settings"),
        ("data.reuse_len=31", "set data.reuse_len=16"),
        ("data.seq_len=999998", "data.seq_len is invalid"),
        ("deepspeed.train_batch_size=8", "deepspeed.train_batch_size is decided by train.global_batch_size"),
        ("data.store_dir=nowhere", "Run pretrain/prepare.py"),
        ("model.vocab_size=5", "Leave it out; it is taken from the store."),
        ("steps", "is not of the form key=value"),
        ("[=3", "is not of the form key=value"),
        ("model.n_head=0", "must be at least 1"),
        ("eval.mem_len=-4", "eval.mem_len=-4 is invalid: it must be at least 0"),
        ("optim.lr=-1", "optim.lr=-1.0 is invalid: it must be positive"),
        ("optim.lr=inf", "optim.lr=inf is invalid: it must be a finite number"),
        ("train.hours=nan", "train.hours=nan is invalid: it must be a finite number"),
        ("text.mixture.a=.inf", "text.mixture.a=inf is invalid: it must be a finite number"),
        ("model.n_layer=0", "model.n_layer (0) must be at least 1"),
        ("model.norm_eps=-1", "model.norm_eps (-1.0) must be positive"),
        ("model.init_std=0", "model.init_std (0.0) must be positive"),
        ("modle.n_layer=2", "there is no setting 'modle.n_layer'; did you mean 'model.n_layer'?"),
        ("data.pairs=3", "data.pairs=3 is invalid: it must be true or false"),
        ("model.cutoffs=5", "model.cutoffs=5 is invalid: it must be a list such as [a, b]"),
        ("text.mixture=[a]", "text.mixture=['a'] is invalid: it must be a mapping"),
        ("text.mixture={a:1}", "'a:1' in text.mixture has no value. Put a space after its colon"),
        ("seed=${seed}", "seed: Recursive interpolation detected"),
        ("seed=${nothing}", "seed: Interpolation key 'nothing' not found"),
        ("run_dir=${", "run_dir: "),
        ("seed=99999999999999999999999", "must be at most 9223372036854775807"),
        ("name=", "name ('') names folders, in runs/ and elsewhere, and must not be empty"),
        ("name=..", "name ('..') names folders"),
        ("run_dir=", "run_dir is empty"),
        (f"run_dir={__file__}/run", "test_bad_input.py is there already and is no folder; set another run_dir"),
        ("data.store_dir=", "data.store_dir is empty"),
        (
            f"data.store_dir={Path(__file__).parent}",
            "it is not a token store. Name a folder that pretrain/prepare.py wrote",
        ),
        (f"tokenizer.path={__file__}", f"tokenizer.path={__file__} is not a SentencePiece model"),
        ("eval.sentences=[abc]", "eval.sentences: 'abc' has no blank; mark one with ____"),
        ("deepspeed.zero_optimization=1", "deepspeed.zero_optimization=1 is invalid: it must be a mapping"),
        ("deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.stage (4) must be 0, 1, 2 or 3"),
        ("optim.name=lion", "optim.name"),
        (
            "optim.name=muon deepspeed.zero_optimization.stage=3",
            "deepspeed.zero_optimization.stage=3 does not go with optim.name=muon",
        ),
        (
            "optim.name=muon deepspeed.zero_optimization.offload_optimizer.device=cpu",
            "deepspeed.zero_optimization.offload_optimizer does not go with optim.name=muon",
        ),
        ("deepspeed.zero_optimization.offload_param=cpu", "offload_param (cpu) must be a mapping, as {device: cpu}"),
        ("seed=-1", "seed (-1) must be at least 0"),
        ("train.hours=0", "train.hours (0.0) must be positive"),
        ("objective.next_sentence=true data.pairs=false", "data.pairs (False) must be true"),
        ("objective.next_sentence=true data.reuse_len=32", "data.reuse_len (32) below data.seq_len (32)"),
        (
            "objective.next_sentence=true data.reuse_len=32 objective.name=causal",
            "objective.name=causal reads plain text",
        ),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_written(make_args, tmp_path, monkeypatch, capsys, word, message):
    monkeypatch.setattr("sys.argv", ["run.py", *make_args(), *word.split()])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    check_sentence(capsys.readouterr().err, message)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__global_batch_size": 3, "train__micro_batch_size": 2},
            "train.micro_batch_size=2 is invalid: it must divide the 3 rows of each process",
        ),
        ({"deepspeed.zero_optimization.overlap": "true"}, "deepspeed: the setting overlap"),
        (
            {"deepspeed.zero_optimization.stage": 0, "train__precision": "bf16"},
            "deepspeed.zero_optimization.stage=0 is invalid with train.precision=bf16"
            if has_bf16()
            else "train.precision=bf16 is invalid: this processor has no bf16 instructions",
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_too(make_args, tmp_path, changes, message):
    refused(run("pretrain/run.py", *make_args(**changes)), message)
    assert not (tmp_path / "tiny").exists()


def test_a_run_that_ends_with_a_destroyed_model_is_not_finished(make_args, tmp_path):
    done = run("pretrain/run.py", *make_args(optim__lr=1e30, train__steps=5))  # updates are skipped from the second on
    refused(done, "the validation loss is not finite after the last step (5)")
    assert not (tmp_path / "tiny" / "model").exists() and not (tmp_path / "tiny" / "checkpoints").exists()


def test_a_config_that_is_not_there_or_no_yaml_is_named(tmp_path):
    refused(run("pretrain/run.py", "--config", tmp_path / "none.yaml"), "none.yaml: no such file")
    (tmp_path / "bad.yaml").write_text("model: [1,\n")
    refused(run("pretrain/run.py", "--config", tmp_path / "bad.yaml"), "bad.yaml: cannot be read as YAML")


def test_a_store_of_another_vocabulary_is_refused(make_args, documents, tmp_path):
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(tmp_path / "other.model")
    done = run("pretrain/run.py", *make_args(tokenizer__path=tmp_path / "other.model"))
    refused(done, "is invalid: its vocabulary")


def test_a_damaged_store_names_its_file(make_args, store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "store")
    (broken / "unigram.bin").write_bytes(b"")
    refused(run("pretrain/run.py", *make_args(data__store_dir=broken)), "unigram.bin has 0 bytes")


def test_preparing_tells_what_is_wrong_and_leaves_nothing(text_file, tmp_path):
    paths = [
        f"tokenizer.path={tmp_path / 'v.model'}",
        f"data.store_dir={tmp_path / 'store'}",
        f"text.source={text_file}",
    ]
    tokenizer, prepare = "pretrain/train_tokenizer.py", "pretrain/prepare.py"
    refused(run(tokenizer, *paths, "text.source=nothing/*.txt"), "text.source=nothing/*.txt is invalid: no file matches it")
    refused(run(tokenizer, *paths, "tokenizer.vocab_size=20000"), "Set tokenizer.vocab_size=")
    refused(run(prepare, *paths), "Train it with pretrain/train_tokenizer.py")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("\n\n")
    refused(run(tokenizer, *paths, f"text.source={tmp_path / 'empty'}/*.txt"), "it holds no text")
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}

    assert run(tokenizer, *paths, "tokenizer.vocab_size=300").returncode == 0
    refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=200"),
        "with tokenizer.vocab_size=300, not 200; set tokenizer.vocab_size=300",
    )
    refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=300", "tokenizer.character_coverage=0.99"),
        "with tokenizer.character_coverage=0.99995, not 0.99",
    )
    refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=300", "text.source=docstrings"),
        f"v.model is invalid: it was trained on other text than text.source=docstrings (missing: {text_file.name} (",
    )
    (tmp_path / "empty" / "b.txt").write_bytes(text_file.read_bytes() + b"\n\xff")
    refused(run(prepare, *paths, f"text.source={tmp_path / 'empty'}/b.txt"), "b.txt, line")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "v.model", "v.model.json"}
    assert run(prepare, *paths).returncode == 0
    refused(
        run(prepare, *paths, "text.max_chars=1000000"),
        "was built with text.max_chars=null",
    )
    more = text_file.with_name("more.txt")
    more.write_text("Ba be bi.")
    try:
        pattern = f"text.source={text_file.with_name('*.txt')}"
        several = [*paths[:1], f"data.store_dir={tmp_path / 'several'}", pattern]
        assert run(prepare, *several).returncode == 0
        more.write_text("Ba be bi bo.")
        refused(run(prepare, *several), "was made before")
    finally:
        more.unlink()


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    refused(run("pretrain/fill.py", tmp_path, "a ____"), "not a model folder")
    refused(run("pretrain/report.py", tmp_path), "has no metrics.jsonl")
