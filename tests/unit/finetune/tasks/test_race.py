"""RACE is read as distributed."""

import json

import numpy as np
import pytest

from finetune.data.examples import Split
from finetune.tasks.race import insert_option
from tests.unit.finetune.conftest import build


def write_race(folder):
    for split in ("train", "dev", "test"):
        for level, answers in (("middle", "AB"), ("high", "D")):
            (folder / split / level).mkdir(parents=True)
            content = {
                "article": "A passage.",
                "questions": ["It is _ .", "What?"][: len(answers)],
                "options": [["a", "b", "c", "d"]] * len(answers),
                "answers": list(answers),
                "id": f"{level}1.txt",
            }
            (folder / split / level / "1.txt").write_text(json.dumps(content))


def test_questions_are_read_level_by_level_with_options_in_blanks(tmp_path, tokenizer):
    write_race(tmp_path)
    task = build("race", tmp_path, max_seq_len=32)
    first, second, third = task.read_split("dev")
    assert first.texts == ("A passage.", "It is a .", "It is b .", "It is c .", "It is d .")
    assert second.texts[4] == "What? d"
    assert insert_option("a _ b _", "x") == "a x b x"
    labels = [(example.label, example.group) for example in (first, second, third)]
    assert labels == [(0, "middle"), (1, "middle"), (3, "high")]
    assert [example.group for example in build("race/high", tmp_path).read_split("train")] == ["high"]
    features = task.encode([first, second, third], tokenizer)
    assert [len(feature.rows) for feature in features] == [4, 4, 4]
    logits = np.eye(4)[[0, 2, 3]].astype(np.float32)
    metrics = task.compute_metrics(Split("dev", [first, second, third], features), {"logits": logits})
    assert metrics == {"accuracy": 2 / 3, "accuracy_high": 1.0, "accuracy_middle": 0.5}
    assert task.to_predictions(Split("dev", [first], []), {"logits": logits[1:2]})[0]["prediction"] == "C"


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_question_without_an_answer_is_only_allowed_in_the_test_split(tmp_path, split):
    write_race(tmp_path)
    for name in (split, "test"):
        file = tmp_path / name / "middle" / "1.txt"
        file.write_text(json.dumps({**json.loads(file.read_text()), "answers": [None, "A"]}))
    task = build("race", tmp_path)
    assert task.read_split("test")[0].label is None
    with pytest.raises(ValueError, match=rf"{split}/middle/1.txt, question 1: the answer is missing"):
        task.read_split(split)


def test_a_passage_is_tokenized_once_for_all_its_questions(tmp_path, tokenizer, monkeypatch):
    write_race(tmp_path)
    task = build("race/middle", tmp_path, max_seq_len=32)
    encoded, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: encoded.append(text) or encode(text))
    assert len(task.encode(task.read_split("dev"), tokenizer)) == 2
    assert encoded.count("A passage.") == 1


@pytest.mark.parametrize(("max_option_len", "n_kept"), [(8, 8), (128, 29)])
def test_a_long_passage_is_truncated_and_the_end_of_an_option_kept(tmp_path, tokenizer, max_option_len, n_kept):
    write_race(tmp_path)
    task = build("race", tmp_path, max_seq_len=32, max_option_len=max_option_len)
    options = ["bi", "bo", "bu", "da"]
    example = task.parse_example({"article": "ba " * 90, "question": "be " * 90, "options": options}, "")
    for row, option in zip(task.encode([example], tokenizer)[0].rows, options, strict=True):
        assert len(row.input_ids) == 32 and (row.segment_ids == 1).sum() == n_kept + 1
        assert tokenizer.decode(row.input_ids[row.segment_ids == 1]).endswith(option)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": ["E", "B"]}, "question 1: answer='E' .* A, B, C, D"),
        ({"options": [["a", "b"], ["a", "b", "c", "d"]]}, "question 1: .* 4 options"),
        ({"answers": ["A"]}, "2 questions, 2 lists of options and 1 answers"),
        ({"article": ""}, "question 1: the article is empty"),
        ({"questions": None}, "no column 'questions'"),
        ({"questions": 5}, "questions, options and answers must be lists"),
        ({"options": ["abcd", "efgh"]}, "question 1: options='abcd' .* 4 options"),
    ],
)
def test_an_invalid_question_is_refused_with_its_file(changes, message, tmp_path):
    write_race(tmp_path)
    path = tmp_path / "dev" / "middle" / "1.txt"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=f"1.txt.*{message}"):
        build("race", tmp_path).read_split("dev")


def test_an_incomplete_file_is_refused(tmp_path):
    write_race(tmp_path)
    path = tmp_path / "dev" / "middle" / "1.txt"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match="1.txt: not JSON"):
        build("race", tmp_path).read_split("dev")


def test_a_byte_order_mark_is_ignored_and_a_split_without_questions_refused(tmp_path):
    write_race(tmp_path)
    path = tmp_path / "dev" / "middle" / "1.txt"
    content = json.loads(path.read_text())
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert len(build("race/middle", tmp_path).read_split("dev")) == 2
    path.write_text(json.dumps({**content, "questions": [], "options": [], "answers": []}))
    with pytest.raises(ValueError, match="dev contains no question of level middle"):
        build("race/middle", tmp_path).read_split("dev")
