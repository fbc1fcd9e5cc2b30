"""Accuracies on minimal pairs, and files of pairs that cannot be read."""

import json

import numpy as np
import pytest

from pretrain.tools.text_scores import draw_accuracies
from xlpre.inference.minimal_pairs import MinimalPair, pair_accuracies, read_pairs
from xlpre.inference.scoring import TextScore

GOOD = {"sentence_good": "a b", "sentence_bad": "b a", "UID": "order", "linguistics_term": "syntax"}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def scores_of(*values):
    return [TextScore("", np.array([9]), np.array([[value]])) for value in values]


def make_pairs(**counts):
    """Return `counts[paradigm]` pairs of each paradigm. The phenomenon is the first letter of the paradigm."""
    return [MinimalPair("g", "b", name, name[0], "file") for name, count in counts.items() for _ in range(count)]


def test_accuracies_are_means_over_paradigms_with_standard_errors_and_ties_are_wrong():
    pairs = make_pairs(a1=4, a2=1, b1=2)
    good_minus_bad = [1, 1, 1, -1, 2, 0, 3]  # a1: 3 of 4, a2: 1 of 1, b1: 1 of 2 with a tie
    scores = scores_of(*(value for difference in good_minus_bad for value in (difference - 5.0, -5.0)))
    result = pair_accuracies(pairs, scores)
    assert {name: accuracy.percent for name, accuracy in result.paradigms.items()} == {"a1": 75, "a2": 100, "b1": 50}
    assert {name: accuracy.percent for name, accuracy in result.phenomena.items()} == {"a": 87.5, "b": 50}
    assert result.overall.percent == pytest.approx(75) and result.overall.n_pairs == 7
    a1, b1 = 100 * np.sqrt(0.75 * 0.25 / 4), 100 * np.sqrt(0.5 * 0.5 / 2)
    assert result.paradigms["a1"].standard_error == pytest.approx(a1)
    assert result.overall.standard_error == pytest.approx(np.hypot(a1, b1) / 3)
    record = result.to_json()
    assert record["accuracy"] == pytest.approx(75) and record["paradigms"] == {"a1": 75, "a2": 100, "b1": 50}
    assert [row["paradigm"] for row in result.paradigm_table()] == ["a1", "a2", "b1"]
    assert result.phenomenon_table()[-1]["accuracy (%)"] == "75.0"


def test_pairs_are_read_from_files_and_folders_each_file_once(tmp_path):
    first = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "pairID": "1"}, GOOD)
    write(tmp_path / "named.jsonl", {"sentence_good": "c", "sentence_bad": "d"})
    pairs = read_pairs([tmp_path, first])
    assert [pair.paradigm for pair in pairs] == ["order"] * 3 + ["named"]
    assert pairs[0] == MinimalPair("a b", "b a", "order", "syntax", f"{first}, line 1")
    assert pairs[3].phenomenon == "other"
    assert [pair.paradigm for pair in read_pairs([tmp_path], limit=2)] == ["order", "order", "named"]
    first.with_name("a.jsonl~").write_text("a backup")
    assert len(read_pairs([tmp_path])) == 4
    first.with_name("a.jsonl.gz").touch()
    with pytest.raises(ValueError, match=r"both a\.jsonl and a\.jsonl\.gz, .* Remove one"):
        read_pairs([tmp_path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence_good": "a"', "line 2: not JSON"),
        ("[]", "line 2: must be a JSON object"),
        ({**GOOD, "sentence_bad": ""}, "line 2: sentence_bad='' is invalid: it must be a text that is not empty"),
        ({**GOOD, "sentence_good": 3}, "line 2: sentence_good=3 is invalid"),
        ({"sentence_good": "a"}, "line 2: sentence_bad is missing"),
        ({**GOOD, "UID": None}, "line 2: UID=None is invalid"),
        ({**GOOD, "linguistics_term": "other"}, "line 2: linguistics_term='other' is invalid: earlier pairs of order have 'syntax'"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_refused_with_its_file_and_number(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", GOOD, line)
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        read_pairs([file])


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the folder has no .jsonl file"):
        read_pairs([tmp_path])
    with pytest.raises(ValueError, match="there is no such file"):
        read_pairs([tmp_path / "a.jsonl"])
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="there are no pairs"):
        read_pairs([tmp_path])
    with pytest.raises(ValueError, match="limit=0 is invalid"):
        read_pairs([tmp_path], limit=0)


def test_a_picture_is_drawn(tmp_path):
    pairs = make_pairs(a=2, _b=3, c=1)
    draw_accuracies(pair_accuracies(pairs, scores_of(*range(12))), tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
