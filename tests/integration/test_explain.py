"""What `pretrain/explain.py` shows is what the model is given."""

import dataclasses
import re

import numpy as np
import pytest

from pretrain.config import PretrainConfig
from pretrain.explain import main, sentence, show
from pretrain.tools.explain_picture import draw, save_picture
from pretrain.tools.explanation import explain
from tests.conftest import REPOSITORY
from tests.integration.conftest import run
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.text.tokenizer_training import train_tokenizer
from xlpre.text.tokenizer import TokenizerConfig

KINDS = {
    "permutation": [],
    "no pairs": ["data.pairs=false"],
    "plain": ["data.reuse_len=64"],
    "small chunks": ["objective.perm_size=4"],
    "denoising": ["objective.name=denoising"],
    "causal": ["objective.name=causal", "data.reuse_len=64"],
}


@pytest.fixture(scope="session")
def text(documents):
    return documents[0][0] + "\n" + documents[1][0]


@pytest.fixture(params=KINDS)
def make(request, text, tokenizer):
    def explanation(text=text, **changes):
        return explain(text, tokenizer, settings(*KINDS[request.param]), **changes)

    return explanation


def settings(*args):
    return load_config(PretrainConfig, None, ["data.seq_len=64", "data.reuse_len=32", "objective.partial_k=4", *args])


def visible(it):
    return [[query > key for key in it.key_rank.tolist()] for query in it.query_rank.tolist()]


def printed_masks(page, it):
    """The blocks of each stream, row by row, read off the terminal."""
    length = len(it.pieces)
    lines = page.splitlines()[-length - 2 :]
    starts = [lines[0].index(name) for name in it.streams]
    wide = 2 if length <= 20 else 1
    return [[line[start : start + wide * length : wide] for line in lines[2:]] for start in starts]


def short(text):
    return " ".join(text.split()[:8])


@pytest.mark.parametrize("backward", [False, True])
def test_the_printed_masks_are_the_comparison_of_ranks(make, text, backward):
    it = make(short(text), backward=backward)
    assert len(it.pieces) <= 40
    seen = visible(it)
    content, *query = printed_masks(show(it), it)
    for i, row in enumerate(content):
        assert [c == "█" for c in row] == seen[i]
        assert [j for j, c in enumerate(row) if c == "▒"] == ([] if seen[i][i] else [i])
    for i, row in enumerate(query[0] if query else []):
        if i in it.target_positions:
            assert [c == "█" for c in row] == seen[i]
        else:
            assert row.strip() == ""


def test_the_drawn_masks_are_the_comparison_of_ranks(make, text):
    it = make(short(text))
    seen = np.array(visible(it))
    for number, axes in enumerate(draw(it).axes):
        kinds = np.asarray(axes.collections[0].get_array().filled(-1)).reshape(seen.shape)
        rows = it.target_positions if number == 1 else np.arange(len(seen))
        np.testing.assert_array_equal(np.isin(kinds[rows], (1, 2)), seen[rows])
        assert (np.delete(kinds, rows, axis=0) == -1).all()


def test_every_target_is_listed_once_with_exactly_the_tokens_that_it_sees(make):
    it = make()
    listed = show(it).split("\n\n")[2].splitlines()[2:]
    heads = [line.split()[:2] for line in listed if re.match(r" *\d+  \S", line)]
    ranks = it.query_rank[it.target_positions].tolist()
    assert sorted(heads) == sorted([str(rank), piece] for rank, piece in zip(ranks, it.wanted, strict=True))
    rest = " ".join(line.strip() for line in listed)
    for target, place in enumerate(it.target_positions.tolist()):
        seen = visible(it)[place]
        expected = []
        for position, piece in enumerate(it.read):
            bare = (piece.removeprefix("▁") or piece) if seen[position] else "?" if position == place else "_"
            expected.append(f"[{bare}]" if position == place else bare)
        while expected[-1] == "_":
            expected.pop()
        assert sentence(it, target).replace(" ", "") == "".join(expected)
        assert " ".join(sentence(it, target).split()) in rest


@pytest.mark.parametrize("step", range(10))
def test_no_target_sees_itself_or_a_later_one_in_the_query_stream(tokenizer, text, step):
    it = explain(text, tokenizer, settings(), step)
    query = it.streams["query stream: predicts"][it.target_positions][:, it.target_positions]
    rank = it.query_rank[it.target_positions]
    np.testing.assert_array_equal(query, rank[:, None] > rank[None, :])


def test_places_are_an_order_of_targets_and_symbols_in_each_part(tokenizer, text):
    it = explain(text, tokenizer, settings())
    for part in (slice(0, it.reuse_len), slice(it.reuse_len, None)):
        placed = [place for place in it.places[part] if place is not None]
        assert len(set(placed)) == len(placed) > 0
        assert set(placed) <= set(range(len(it.places[part])))
    assert all(it.places[i] is not None for i in it.target_positions)


def test_the_same_step_shows_the_same_and_another_step_another(make):
    assert show(make(step=3)) == show(make(step=3))
    assert show(make(step=3)) != show(make(step=4))


@pytest.mark.parametrize("kind", ["no pairs", "causal"])
def test_a_window_is_as_long_as_a_short_text(tokenizer, text, kind):
    it = explain(short(text), tokenizer, settings(*KINDS[kind]))
    pieces = [tokenizer.pieces[i] for i in tokenizer.encode(short(text))]
    assert it.pieces == [*pieces, "<eop>", "<sep>", "<cls>"][: len(it.pieces)]
    assert len(it.pieces) == len(pieces) + (3 if kind == "no pairs" else 1)


def test_a_backward_row_is_the_text_from_right_to_left(tokenizer, text):
    forward, backward = (
        explain(short(text), tokenizer, settings("data.pairs=false"), backward=b) for b in (False, True)
    )
    assert backward.pieces[:-2] == forward.pieces[:-2][::-1]
    assert "backward" in backward.title


def test_a_long_text_is_cut_with_a_note(tokenizer, text):
    it = explain(" ".join([text.replace("\n", " ")] * 20), tokenizer, settings())
    assert len(it.pieces) == 64
    assert re.search(r"The text has [\d,]+ tokens; a window of 64 holds 61, the rest is cut off\.", show(it))
    assert "One character is 2 x 2 tokens" in show(it)
    assert max(map(len, show(it).splitlines())) <= 100


def test_denoising_hides_its_targets_and_causal_predicts_the_next_token(tokenizer, text):
    hidden = explain(text, tokenizer, settings("objective.name=denoising"))
    changed = [i for i, (piece, read) in enumerate(zip(hidden.pieces, hidden.read, strict=True)) if piece != read]
    assert set(changed) <= set(hidden.target_positions.tolist()) and "<mask>" in hidden.read
    assert [hidden.pieces[i] for i in hidden.target_positions] == hidden.wanted
    causal = explain(short(text), tokenizer, settings(*KINDS["causal"]))
    assert causal.wanted == [*causal.pieces[1:], "<eod>"]


def test_the_command_draws_a_picture(make_args, tmp_path):
    done = run(
        "pretrain/explain.py", "Two make_args. Then some more.", *make_args(), "--step", 2, "--picture", tmp_path / "it.png"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "query stream: predicts" in done.stdout
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_letters_that_no_font_has_are_told_once(text, tokenizer, tmp_path, capsys):
    it = explain(short(text), tokenizer, settings())
    save_picture(dataclasses.replace(it, pieces=["\U0010fffd"] * len(it.pieces)), tmp_path / "it.png")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("warning: no installed font has \U0010fffd; install one")


def test_the_stores_vocabulary_serves_where_there_is_no_other(make_args, capsys):
    main(["Two make_args. Then some more.", *make_args(tokenizer__path="nowhere.model")])
    assert "TARGETS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ([" "], {}, "the text is empty"),
        (["A"], {"text__line_type": "sentences"}, "a window needs 3; give a longer one"),
        (["one more", "word"], {}, "'word' is not of the form key=value; if it belongs to the text, put quotes"),
        (["caf\udce9."], {}, r"'caf\udce9.' is not UTF-8; convert it"),
        (["Some text.", "--step", str(2**63)], {}, "must be at least 0, and below 2^63"),
        (["Some text.", "--step", "-1"], {}, "--step -1: must be at least 0"),
        (["Some text.", "--picture", "it.gif"], {}, "--picture it.gif: the name must end with .png or .svg or .pdf"),
        (["Some text.", "objective.name=causal"], {}, "set data.reuse_len=32"),
        (["Some text.", "objective.max_spans=1"], {}, "did you mean 'objective.max_span'?"),
        (
            ["Some text."],
            {"tokenizer__path": "no.model", "data__store_dir": "no"},
            "make one with pretrain/train_tokenizer.py",
        ),
    ],
)
def test_bad_input_is_one_sentence(make_args, monkeypatch, capsys, given, changes, message):
    monkeypatch.setattr("sys.argv", ["explain.py", given[0], *make_args(**changes), *given[1:]])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]


def vocabulary_of_words(text):
    """Whole args, as the vocabulary of the page has them, learned from the args in any order."""
    some, rng = sorted(set(text.replace(".", " .").split())), np.random.default_rng(0)
    tokenizer = train_tokenizer([[" ".join(rng.permutation(some))] for _ in range(300)], TokenizerConfig(vocab_size=50))
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == text.replace(".", " .").split()
    return tokenizer


def test_the_page_about_objectives_shows_what_the_command_prints():
    page = (REPOSITORY / "docs/objectives.md").read_text()
    command = re.search(r'pretrain/explain.py "([^"]*)" --config (\S+) (.*) --step (\d+)', page)
    whole_words = vocabulary_of_words(command[1])
    config = load_config(PretrainConfig, REPOSITORY / command[2], command[3].split())
    printed = show(explain(command[1], whole_words, config, int(command[4])))
    shown = "\n\n".join(block.rstrip("\n") for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert shown == printed, "the draws changed: run the page's command again, paste what it prints, commit its picture"
