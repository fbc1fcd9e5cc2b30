"""`pretrain/evaluate.py`: the same numbers as from Python, from any source, in any number of processes; and clear refusals."""

import dataclasses
import json

import pytest

from pretrain import evaluate as command
from pretrain.config import PretrainConfig
from pretrain.tools import held_out
from pretrain.tools.held_out import read_run_config, source_config, text_config
from tests.conftest import refused, write_folder
from tests.integration.conftest import call, run, run_together
from tests.unit.model.conftest import make_model
from xlpre.config.loader import save_config
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.data.window_layout import DataConfig
from xlpre.inference import evaluate
from xlpre.inference.evaluation import EvalSettings, eval_windows
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

WINDOW = ["--seq-len", "16"]


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("evaluate") / "permutation", tokenizer)


@pytest.fixture(scope="module")
def causal(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate") / "causal"
    shape = {"two_streams": False, "vocab_size": len(tokenizer), "mem_len": 16}
    save_folder(path, ModelFolder.from_model(make_model(**shape), tokenizer, "causal"))
    return path


@pytest.fixture(scope="module")
def text(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate") / "words.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents[:30]))
    return path


def test_a_text_without_a_sentence_has_no_order_consistency(model, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("Ba di.\n")
    command.main([str(model), str(tmp_path / "short.txt"), "--mode", "any-order", "--orders", "1"])
    assert "order consistency" not in capsys.readouterr().out


def records_of(capsys, *args):
    command.main([*map(str, args), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_numbers_equal_those_from_python_and_the_table_shows_them(causal, text, documents, tmp_path, capsys):
    out, picture = tmp_path / "out.jsonl", tmp_path / "memory.png"
    options = ["--mem-len", "0,16", "--out", str(out), "--picture", str(picture)]
    command.main([str(causal), str(text), *WINDOW, *options])
    table = capsys.readouterr().out
    folder = load_folder(causal)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for record, mem_len in zip(records, (0, 16), strict=True):
        texts = ["\n".join(document) for document in documents[:30]]
        expected = evaluate(
            folder.model(), folder.tokenizer, texts, objective="causal", seq_len=16, mem_len=mem_len
        ).to_json()
        assert {name: record[name] for name in expected} == expected
        assert f"{record['loss']:.4f}" in table and f"{record['bits_per_byte']:.4f}" in table
    assert records[0]["loss"] != records[1]["loss"] and picture.read_bytes().startswith(b"\x89PNG")
    assert "order consistency" not in table and f"{records[0]['n_words']:,} words" in table


def test_a_store_and_a_dataset_give_the_numbers_of_their_text(causal, store, tokenizer, text, tmp_path, capsys):
    import datasets

    (tmp_path / "data").mkdir()
    rows = [{"text": document} for document in text.read_text().split("\n\n")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / "validation.parquet")
    from_file, from_dataset = (
        records_of(capsys, causal, source, *WINDOW)[0] for source in (text, f"hf:{tmp_path / 'data'}:validation")
    )
    assert from_file["loss"] == from_dataset["loss"] and from_file["n_documents"] == len(rows)
    (stored,) = records_of(capsys, causal, store.path, *WINDOW, "--max-tokens", 500)
    assert 500 <= stored["n_tokens"] < len(store.validation) and stored["n_targets"] == stored["n_tokens"]


def test_options_name_the_column_and_what_a_row_and_a_line_are(causal, text, tmp_path, capsys):
    documents = text.read_text().split("\n\n")
    rows, lines = tmp_path / "rows.jsonl", tmp_path / "lines.jsonl"
    rows.write_text("".join(json.dumps({"text": "Ba.", "body": document}) + "\n" for document in documents))
    lines.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.read_text().split("\n")))
    (expected,) = records_of(capsys, causal, text, *WINDOW)
    numbers = ("n_documents", "n_tokens", "loss")
    for source, options in ((rows, ["--column", "body"]), (lines, ["--row-type", "lines"])):
        (record,) = records_of(capsys, causal, source, *WINDOW, *options)
        assert [record[name] for name in numbers] == [expected[name] for name in numbers]
    (sentences,) = records_of(capsys, causal, text, *WINDOW, "--line-type", "sentences")
    assert sentences["n_documents"] == expected["n_documents"]
    n_paragraphs = sum(1 for line in text.read_text().split("\n") if line)  # each is followed by <eop>
    assert sentences["n_tokens"] == expected["n_tokens"] - n_paragraphs


def test_a_permutation_model_has_an_objective_other_modes_and_the_spread_over_orders(model, text, capsys):
    options = [*WINDOW, "--consistency", 20, "--max-tokens", 300]
    (objective,) = records_of(capsys, model, text, *options)
    assert objective["mode"] == "objective" and objective["bits_per_target_byte"] > 0 and objective["order_std"] > 0
    assert "perplexity" not in objective and "bits_per_byte" not in objective
    (pll,) = records_of(capsys, model, text, *options, "--mode", "pll")
    (any_order,) = records_of(capsys, model, text, *options, "--mode", "any-order", "--orders", 2)
    assert pll["n_targets"] == pll["n_tokens"] == any_order["n_targets"] and pll["loss"] != any_order["loss"]
    command.main([str(model), str(text), *map(str, options)])
    assert f"{objective['order_std']:.4f} nats per token between 4 orders" in capsys.readouterr().out
    command.main([str(model), str(text), *map(str, options), "--orders", "3", "--seed", "5"])
    output = capsys.readouterr().out
    assert "between 3 orders" in output and f"{objective['order_std']:.4f} nats" not in output


def test_clamped_distances_and_limited_attention_change_the_loss(causal, text, capsys):
    plain, clamped, limited = (
        records_of(capsys, causal, text, *WINDOW, *options)[0]["loss"]
        for options in ((), ("--clamp-len", 2), ("--attention-span", "same_length"))
    )
    assert len({plain, clamped, limited}) == 3


class RecordingComm:
    """Collects what each process of a job contributes, one process after another."""

    def __init__(self):
        self.parts = []

    def all_gather(self, part):
        self.parts.append(part)
        return self.parts


@pytest.mark.parametrize("n_processes", [2, 5])
def test_the_processes_of_a_job_share_the_units_and_give_the_same_bits(
    causal, text, tokenizer, monkeypatch, n_processes
):
    data = eval_windows(DataConfig(), "causal", 16)
    settings = [EvalSettings("causal", data, mem_len, batch_size=2) for mem_len in (0, 16)]
    held_out_text = held_out.read_text([str(text)], tokenizer, "the model", TextConfig(), None)
    job = held_out.Job(str(causal), {}, held_out_text, settings, "cpu")
    expected = [x.to_json() for x in held_out.run_evaluations(job, 1, lambda done, total: None)]
    comm = RecordingComm()
    monkeypatch.setattr(held_out, "world_size", lambda: n_processes)
    monkeypatch.setattr(held_out, "_results", lambda evaluators, units, sums: None)
    monkeypatch.setattr(held_out, "_in_order", lambda parts, n_units: None)
    for rank in range(n_processes - 1):
        monkeypatch.setattr(held_out, "rank", lambda rank=rank: rank)
        held_out.run_in_job(job, comm, lambda done, total: None)
    monkeypatch.undo()
    monkeypatch.setattr(held_out, "world_size", lambda: n_processes)
    monkeypatch.setattr(held_out, "rank", lambda: n_processes - 1)
    result = held_out.run_in_job(job, comm, lambda done, total: None)
    assert [x.to_json() for x in result] == expected and min(map(len, comm.parts)) > 1


@pytest.mark.long
@pytest.mark.parametrize("start", ["spawned", "launched"])
def test_several_processes_give_the_same_bits(causal, text, tmp_path, start):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    options = [causal, text, *WINDOW, "--mem-len", "0,16", "--batch-size", 2]
    results = [run("pretrain/evaluate.py", *options, "--out", one)]
    if start == "spawned":
        results.append(run("pretrain/evaluate.py", *options, "--processes", 2, "--out", two))
    else:
        results.append(run_together(2, "pretrain/evaluate.py", *options, "--out", two))
    assert [result.returncode for result in results] == [0, 0], results
    assert one.read_bytes() == two.read_bytes() and len(one.read_bytes().splitlines()) == 2


def test_invalid_input_is_refused(model, causal, text, documents, store, tmp_path):
    def refuse(*args):
        return call("pretrain/evaluate.py", *args)

    refused(refuse(model, text, "--mode", "causal"), "mode", "causal", r"Choose any-order with one order")
    refused(refuse(causal, text, "--mode", "pll"), "mode", "pll", r"Choose causal\.")
    refused(refuse(causal, text, "--mem-len", "0,x"), "--mem-len", "0,x", r"such as 0,64,128")
    refused(refuse(causal, text, "--mem-len", "8,8"), "--mem-len", "8,8", r"different numbers")
    refused(refuse(causal, text, "--batch-size", 0), "--batch-size", 0)
    refused(refuse(causal, text, "--clamp-len", 0), "--clamp-len", 0)
    refused(refuse(causal, text, "--picture", "curve"), "--picture", "curve", r"\.png, \.svg, \.pdf")
    refused(refuse(causal, tmp_path / "none.txt"), "TEXT", tmp_path / "none.txt", "no file")
    refused(refuse(causal, tmp_path), "TEXT", tmp_path, r"it is a folder\. Give")
    refused(refuse(causal, store.path, text), "TEXT", store.path, "must be the only text")
    (tmp_path / "empty.txt").write_text("\n \n")
    refused(refuse(causal, tmp_path / "empty.txt"), "TEXT", tmp_path / "empty.txt", "holds no text")
    short = refuse(model, text, "--seq-len", 20000)
    assert short.returncode == 2 and "needs 19,998. Give more text, a shorter window, or mode any-order" in short.stderr
    other = ModelFolder.from_model(
        make_model(two_streams=False, vocab_size=290),
        train_tokenizer(documents, TokenizerConfig(vocab_size=290)),
        "causal",
    )
    save_folder(tmp_path / "other", other)
    refused(refuse(tmp_path / "other", store.path), "data.store_dir", store.path, "differs from that of .*other")


def test_only_the_named_text_is_read_and_its_rows_are_those_of_the_run():
    run = PretrainConfig(text=TextConfig(mixture={"trained.jsonl": 2}, max_chars=9, column="body", row_type="lines"))
    read = source_config("held_out.jsonl", text_config(run))
    assert (list(read.sources), read.max_chars) == (["held_out.jsonl"], None)
    assert (read.column, read.row_type) == ("body", "lines")
    assert text_config(run, column="text", row_type="documents").row_type == "documents"


def test_the_model_of_a_checkpoint_is_read_with_the_settings_of_its_run(tokenizer, tmp_path):
    run = tmp_path / "run"
    provenance = {"name": "run", "step": 20, "data_fingerprint": "0", "objective": "permutation"}
    for name in ("checkpoints/step_00000020/model", "model"):
        write_folder(run / name, tokenizer, provenance)
    save_config(PretrainConfig(data=DataConfig(seq_len=48, reuse_len=24)), run / "config.yaml")
    assert read_run_config(str(run / "checkpoints/step_00000020/model")).data.seq_len == 48
    assert read_run_config(str(run)).data.seq_len == 48
    write_folder(run / "exported", tokenizer, {**provenance, "name": "other"})
    assert read_run_config(str(run / "exported")) == PretrainConfig()  # the settings beside it are those of another run
    (tmp_path / "config.yaml").write_text("foo: 1\n")
    write_folder(tmp_path / "copied", tokenizer, provenance)
    assert read_run_config(str(tmp_path / "copied")) == PretrainConfig()
    (tmp_path / "config.yaml").unlink()
    write_folder(run / "model", tokenizer)  # as in the folder of a fine-tuning run
    assert read_run_config(str(run)) == read_run_config(str(tmp_path)) == PretrainConfig()
    (tmp_path / "model.pt").touch()  # as of Transformer-XL
    assert read_run_config(str(tmp_path / "model.pt")) == PretrainConfig()


def test_a_limited_span_ends_at_the_memory_of_the_evaluation(causal, text, tmp_path, capsys):
    """As in the original, which resets the memory length of the model for an evaluation."""
    settings = ["--attention-span", "same_length", "--mem-len", "4", *WINDOW]
    folder = load_folder(causal)
    save_folder(tmp_path / "short", dataclasses.replace(folder, config=dataclasses.replace(folder.config, mem_len=4)))
    losses = [records_of(capsys, model, text, *settings)[0]["loss"] for model in (causal, tmp_path / "short")]
    assert losses[0] == losses[1]


def test_a_limited_span_without_memory_is_refused(causal, text):
    with pytest.raises(ValueError, match=r"--mem-len=0 .*attention_span=same_length.*--attention-span all"):
        command.main([str(causal), str(text), "--attention-span", "same_length", "--mem-len", "0,4", *WINDOW])


def test_unknown_characters_are_reported(causal, tmp_path, capsys):
    (tmp_path / "snow.txt").write_text("Ba di \N{SNOWMAN} \N{SNOWMAN}.\n", "utf-8")
    command.main([str(causal), str(tmp_path / "snow.txt")])
    assert "% of the tokens are <unk>" in capsys.readouterr().out
