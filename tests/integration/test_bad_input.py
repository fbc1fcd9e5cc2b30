"""Invalid input is refused with a one-line error that names key, value and remedy, and leaves no partial files."""

import re
import shutil
from pathlib import Path

import pytest

from pretrain.run import main
from tests.conftest import has_bf16
from tests.integration.conftest import run
from xlpre.common.cli_main import run_main
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def assert_refused(result, pattern):
    assert result.returncode == 2, result.stdout + result.stderr
    assert_one_error(result.stderr, pattern)


def assert_one_error(stderr, pattern):
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(pattern, errors[0]), stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ("objective.max_spans=1", r"objective\.max_spans.*objective\.max_span\b"),
        ("mem_len=0", r"model\.mem_len.*eval\.mem_len"),
        ("model.mem_len=many", r"model\.mem_len=many .*integer"),
        ("objective.name=permute", r"objective\.name.*permute.*permutation"),
        ("model=large", r"'model'.*group"),
        ("data.reuse_len=31", r"data\.reuse_len=31 .*data\.reuse_len=16"),
        ("data.seq_len=999998", r"data\.seq_len"),
        ("deepspeed.train_batch_size=8", r"deepspeed\.train_batch_size.*train\.global_batch_size"),
        ("data.store_dir=nowhere", r"data\.store_dir=nowhere.*pretrain/prepare\.py"),
        ("model.vocab_size=5", r"model\.vocab_size=5 .*Leave it out"),
        ("steps", r"steps.*key=value"),
        ("[=3", r"key=value"),
        ("model.n_head=0", r"model\.n_head=0 .*at least 1"),
        ("eval.mem_len=-4", r"eval\.mem_len=-4 .*at least 0"),
        ("optim.lr=-1", r"optim\.lr=-1\.0 .*positive"),
        ("optim.lr=inf", r"optim\.lr=inf .*finite"),
        ("train.hours=nan", r"train\.hours=nan .*finite"),
        ("text.mixture.a=.inf", r"text\.mixture\.a=inf .*finite"),
        ("model.n_layer=0", r"model\.n_layer=0 .*at least 1"),
        ("model.norm_eps=-1", r"model\.norm_eps=-1\.0 .*positive"),
        ("model.init_std=0", r"model\.init_std=0\.0 .*positive"),
        ("modle.n_layer=2", r"modle\.n_layer.*model\.n_layer"),
        ("data.pairs=3", r"data\.pairs=3 .*true or false"),
        ("model.cutoffs=5", r"model\.cutoffs=5 .*list"),
        ("text.mixture=[a]", r"text\.mixture=\['a'\] .*mapping"),
        ("text.mixture={a:1}", r"'a:1' in text\.mixture.*space after"),
        ("seed=${seed}", r"seed: .*interpolation"),
        ("seed=${nothing}", r"seed: .*'nothing'"),
        ("run_dir=${", r"run_dir: "),
        ("seed=99999999999999999999999", r"seed.*at most 9223372036854775807"),
        ("name=", r"name='' .*must not be empty"),
        ("name=..", r"name='\.\.' "),
        ("run_dir=", r"run_dir='' .*folder"),
        (f"run_dir={__file__}/run", r"run_dir=.*test_bad_input\.py is not a folder.*another run_dir"),
        ("data.store_dir=", r"data\.store_dir='' .*folder"),
        (f"data.store_dir={Path(__file__).parent}", r"data\.store_dir=.*not a token store.*pretrain/prepare\.py"),
        (f"tokenizer.path={__file__}", r"tokenizer\.path=.*test_bad_input\.py.*SentencePiece model"),
        ("eval.sentences=[abc]", r"eval\.sentences.*'abc'.*____"),
        ("deepspeed.zero_optimization=1", r"deepspeed\.zero_optimization=1 .*mapping"),
        ("deepspeed.zero_optimization.stage=4", r"deepspeed\.zero_optimization\.stage=4 .*0, 1, 2 or 3"),
        ("optim.name=lion", r"optim\.name"),
        (
            "optim.name=muon deepspeed.zero_optimization.stage=3",
            r"deepspeed\.zero_optimization\.stage=3 .*optim\.name=muon.*optim\.name=adamw",
        ),
        (
            "optim.name=muon deepspeed.zero_optimization.offload_optimizer.device=cpu",
            r"deepspeed\.zero_optimization\.offload_optimizer .*optim\.name=muon.*optim\.name=adamw",
        ),
        ("deepspeed.zero_optimization.offload_param=cpu", r"offload_param=cpu .*mapping.*\{device: cpu\}"),
        ("seed=-1", r"seed=-1 .*at least 0"),
        ("train.hours=0", r"train\.hours=0\.0 .*positive"),
        ("objective.next_sentence=true data.pairs=false", r"objective\.next_sentence=true .*data\.pairs=true"),
        ("objective.next_sentence=true data.reuse_len=32", r"objective\.next_sentence=true .*data\.reuse_len=32"),
        (
            "objective.next_sentence=true data.reuse_len=32 objective.name=causal",
            r"objective\.next_sentence=true .*objective\.name=causal",
        ),
    ],
)
def test_an_invalid_setting_is_refused_before_anything_is_written(
    make_args, tmp_path, monkeypatch, capsys, overrides, pattern
):
    monkeypatch.setattr("sys.argv", ["run.py", *make_args(), *overrides.split()])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    assert_one_error(capsys.readouterr().err, pattern)
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
    assert_refused(run("pretrain/run.py", "--config", tmp_path / "none.yaml"), r"none\.yaml.*no such file")
    (tmp_path / "bad.yaml").write_text("model: [1,\n")
    assert_refused(run("pretrain/run.py", "--config", tmp_path / "bad.yaml"), r"bad\.yaml.*YAML")


def test_a_store_of_another_vocabulary_is_refused(make_args, documents, tmp_path):
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(tmp_path / "other.model")
    result = run("pretrain/run.py", *make_args(tokenizer__path=tmp_path / "other.model"))
    assert_refused(result, r"vocabulary")


def test_a_damaged_store_names_its_file(make_args, store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "store")
    (broken / "unigram.bin").write_bytes(b"")
    assert_refused(run("pretrain/run.py", *make_args(data__store_dir=broken)), r"unigram\.bin")


def test_preparation_refuses_invalid_input_and_leaves_no_files(text_file, tmp_path):
    paths = [
        f"tokenizer.path={tmp_path / 'v.model'}",
        f"data.store_dir={tmp_path / 'store'}",
        f"text.source={text_file}",
    ]
    tokenizer, prepare = "pretrain/train_tokenizer.py", "pretrain/prepare.py"
    assert_refused(run(tokenizer, *paths, "text.source=nothing/*.txt"), r"text\.source=nothing/\*\.txt .*no file")
    assert_refused(run(tokenizer, *paths, "tokenizer.vocab_size=20000"), r"Set tokenizer\.vocab_size=")
    assert_refused(run(prepare, *paths), r"pretrain/train_tokenizer\.py")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("\n\n")
    assert_refused(run(tokenizer, *paths, f"text.source={tmp_path / 'empty'}/*.txt"), r"no text")
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}

    assert run(tokenizer, *paths, "tokenizer.vocab_size=300").returncode == 0
    assert_refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=200"),
        r"tokenizer\.vocab_size=200 .*Set tokenizer\.vocab_size=300",
    )
    assert_refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=300", "tokenizer.character_coverage=0.99"),
        r"tokenizer\.character_coverage=0\.99 .*tokenizer\.character_coverage=0\.99995",
    )
    assert_refused(
        run(tokenizer, *paths, "tokenizer.vocab_size=300", "text.source=docstrings"),
        rf"v\.model .*text\.source=docstrings.*{text_file.name}",
    )
    (tmp_path / "empty" / "b.txt").write_bytes(text_file.read_bytes() + b"\n\xff")
    assert_refused(run(prepare, *paths, f"text.source={tmp_path / 'empty'}/b.txt"), r"b\.txt, line")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "v.model", "v.model.json"}
    assert run(prepare, *paths).returncode == 0
    assert_refused(
        run(prepare, *paths, "text.max_chars=1000000"),
        r"text\.max_chars=1000000 .*text\.max_chars=null",
    )
    more = text_file.with_name("more.txt")
    more.write_text("Ba be bi.")
    try:
        pattern = f"text.source={text_file.with_name('*.txt')}"
        several = [*paths[:1], f"data.store_dir={tmp_path / 'several'}", pattern]
        assert run(prepare, *several).returncode == 0
        more.write_text("Ba be bi bo.")
        assert_refused(run(prepare, *several), r"more\.txt was added, removed or changed")
    finally:
        more.unlink()


def test_a_folder_without_a_model_or_metrics_is_refused(tmp_path):
    assert_refused(run("pretrain/fill.py", tmp_path, "a ____"), r"not a model folder")
    assert_refused(run("pretrain/report.py", tmp_path), r"no metrics\.jsonl")
