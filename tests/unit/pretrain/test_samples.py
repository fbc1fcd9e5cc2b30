import json

import pytest

from pretrain.config import PretrainConfig
from pretrain.trainer.samples import Samples, read_samples
from xlpre.config.loader import load_config
from xlpre.inference.cloze import readable_piece


def test_a_sentence_may_hold_what_some_take_for_the_end_of_a_line(tmp_path):
    lines = [{"step": step, "results": [{"text": "Hello \u2028\u0085\u2029 ____ world"}]} for step in (1, 2)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "samples.jsonl").write_text(text)
    assert read_samples(tmp_path) == lines


def test_a_damaged_line_is_named_and_does_not_end_a_run(tmp_path, store, tokenizer):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "results": []}\n{"st\n')
    with pytest.raises(ValueError, match=r"samples.jsonl, line 2 \(take the line out\): not JSON"):
        read_samples(tmp_path)
    Samples(load_config(PretrainConfig, None, [f"run_dir={tmp_path}"]), store, tokenizer).write(3, [])
    assert [line["step"] for line in read_samples(tmp_path)] == [1, 3]


@pytest.mark.parametrize(
    ("piece", "shown"),
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
def test_a_hyphen_says_that_a_piece_goes_on_a_word_where_words_are_written_with_spaces(piece, shown):
    assert readable_piece(piece) == shown
