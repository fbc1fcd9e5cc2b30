import errno
import json
import os

import pytest

from pretrain.config import PretrainConfig
from pretrain.trainer.samples import Samples, read_samples
from xlpre.config.loader import load_config
from xlpre.inference.cloze import readable_piece
from xlpre.training import jsonl


def test_unicode_line_separators_in_a_sentence_do_not_end_a_record(tmp_path):
    records = [{"step": step, "results": [{"text": "Hello \u2028\u0085\u2029 ____ world"}]} for step in (1, 2)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (tmp_path / "samples.jsonl").write_text(text)
    assert read_samples(tmp_path) == records


def test_a_damaged_line_is_reported_and_does_not_stop_a_run(tmp_path, store, tokenizer):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "results": []}\n{"st\n')
    with pytest.raises(ValueError, match=r"samples.jsonl, line 2 \(remove this line\)"):
        read_samples(tmp_path)
    Samples(load_config(PretrainConfig, None, [f"run_dir={tmp_path}"]), store, tokenizer).write(3, [])
    assert [record["step"] for record in read_samples(tmp_path)] == [1, 3]


def test_on_a_full_disk_predictions_wait_for_the_next_evaluation(tmp_path, store, tokenizer, monkeypatch, capsys):
    def fail(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    samples = Samples(load_config(PretrainConfig, None, [f"run_dir={tmp_path}"]), store, tokenizer)
    samples.write(1, [])
    with monkeypatch.context() as full_disk:
        full_disk.setattr(jsonl, "write_text", fail)
        samples.write(2, [])
    assert "The predictions of step 2 are written later" in capsys.readouterr().err
    samples.write(3, [])
    assert [record["step"] for record in read_samples(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("▁house", "house"),
        ("ing", "-ing"),
        ("▁", "␣"),
        (".", "."),
        ("▁中国", "中国"),
        ("中国", "中国"),
        ("です", "です"),
    ]
    + [("ี่", "◌ี่"), ("लड़", "-लड़"), ("ी", "-◌ी"), ("الكتاب", "-الكتاب"), ("2", "-2")],
)
def test_a_hyphen_marks_a_piece_that_continues_a_word(piece, expected):
    assert readable_piece(piece) == expected
