"""`pretrain/explain.py` shows the inputs of the model."""

import dataclasses
import re

import numpy as np
import pytest

from pretrain.config import PretrainConfig
from pretrain.explain import main
from pretrain.tools.explanation import draw, explain, save_picture, to_text, visible_sentence
from tests.conftest import REPOSITORY
from tests.integration.conftest import run
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

OVERRIDES = {
    "permutation": [],
    "no pairs": ["data.pairs=false"],
    "plain": ["data.reuse_len=64"],
    "small chunks": ["objective.perm_size=4"],
    "denoising": ["objective.name=denoising"],
    "causal": ["objective.name=causal", "data.reuse_len=64"],
}


def test_a_setting_may_come_without_a_text():
    with pytest.raises(ValueError, match=r"optim.beta1=2(\.0)? is invalid"):
        main(["optim.beta1=2"])


@pytest.fixture(scope="session")
def text(documents):
    return documents[0][0] + "\n" + documents[1][0]


@pytest.fixture(params=OVERRIDES)
def make(request, text, tokenizer):
    def explanation(text=text, **changes):
        return explain(text, tokenizer, settings(*OVERRIDES[request.param]), **changes)

    return explanation


def settings(*args):
    return load_config(PretrainConfig, None, ["data.seq_len=64", "data.reuse_len=32", "objective.partial_k=4", *args])


def visible(it):
    """Return the (T, T) mask from the ranks."""
    return [[query > key for key in it.key_rank.tolist()] for query in it.query_rank.tolist()]


def printed_masks(page, it):
    """Return the blocks of each stream, row by row, from the printed text."""
    length = len(it.pieces)
    lines = page.splitlines()[-length - 2 :]
    starts = [lines[0].index(name) for name in it.masks]
    n_digits = 2 if length <= 20 else 1
    return [[line[start : start + n_digits * length : n_digits] for line in lines[2:]] for start in starts]


def short(text):
    return " ".join(text.split()[:8])


@pytest.mark.parametrize("backward", [False, True])
def test_printed_masks_equal_the_comparison_of_ranks(make, text, backward):
    it = make(short(text), backward=backward)
    assert len(it.pieces) <= 40
    expected = visible(it)
    content, *query = printed_masks(to_text(it), it)
    for i, row in enumerate(content):
        assert [c == "█" for c in row] == expected[i]
        assert [j for j, c in enumerate(row) if c == "▒"] == ([] if expected[i][i] else [i])
    for i, row in enumerate(query[0] if query else []):
        if i in it.target_positions:
            assert [c == "█" for c in row] == expected[i]
        else:
            assert row.strip() == ""


def test_drawn_masks_equal_the_comparison_of_ranks(make, text):
    it = make(short(text))
    expected = np.array(visible(it))
    for number, axes in enumerate(draw(it).axes):
        colors = np.asarray(axes.collections[0].get_array().filled(-1)).reshape(expected.shape)
        rows = it.target_positions if number == 1 else np.arange(len(expected))
        np.testing.assert_array_equal(np.isin(colors[rows], (1, 2)), expected[rows])
        assert (np.delete(colors, rows, axis=0) == -1).all()


def test_every_target_is_listed_once_with_exactly_its_visible_tokens(make):
    it = make()
    listed = to_text(it).split("\n\n")[2].splitlines()[2:]
    heads = [line.split()[:2] for line in listed if re.match(r" *\d+  \S", line)]
    ranks = it.query_rank[it.target_positions].tolist()
    assert sorted(heads) == sorted([str(rank), piece] for rank, piece in zip(ranks, it.target_pieces, strict=True))
    rest = " ".join(line.strip() for line in listed)
    for target, target_position in enumerate(it.target_positions.tolist()):
        row = visible(it)[target_position]
        expected = []
        for position, piece in enumerate(it.input_pieces):
            hidden = "?" if position == target_position else "_"
            content = (piece.removeprefix("▁") or piece) if row[position] else hidden
            expected.append(f"[{content}]" if position == target_position else content)
        while expected[-1] == "_":
            expected.pop()
        assert visible_sentence(it, target).replace(" ", "") == "".join(expected)
        assert " ".join(visible_sentence(it, target).split()) in rest


@pytest.mark.parametrize("step", range(10))
def test_no_target_sees_itself_or_a_later_one_in_the_query_stream(tokenizer, text, step):
    it = explain(text, tokenizer, settings(), step)
    query = it.masks["query stream: predicts"][it.target_positions][:, it.target_positions]
    rank = it.query_rank[it.target_positions]
    np.testing.assert_array_equal(query, rank[:, None] > rank[None, :])


def test_targets_and_special_tokens_are_ordered_in_each_part(tokenizer, text):
    it = explain(text, tokenizer, settings())
    for part in (slice(0, it.reuse_len), slice(it.reuse_len, None)):
        indices = [index for index in it.order[part] if index is not None]
        assert len(set(indices)) == len(indices) > 0
        assert set(indices) <= set(range(len(it.order[part])))
    assert all(it.order[i] is not None for i in it.target_positions)


def test_the_same_step_repeats_and_another_step_differs(make):
    assert to_text(make(step=3)) == to_text(make(step=3))
    assert to_text(make(step=3)) != to_text(make(step=4))


@pytest.mark.parametrize("kind", ["no pairs", "causal"])
def test_the_window_is_shortened_to_a_short_text(tokenizer, text, kind):
    it = explain(short(text), tokenizer, settings(*OVERRIDES[kind]))
    pieces = [tokenizer.pieces[i] for i in tokenizer.encode(short(text))]
    assert it.pieces == [*pieces, "<eop>", "<sep>", "<cls>"][: len(it.pieces)]
    assert len(it.pieces) == len(pieces) + (3 if kind == "no pairs" else 1)


def test_a_backward_row_is_the_text_from_right_to_left(tokenizer, text):
    forward, backward = (
        explain(short(text), tokenizer, settings("data.pairs=false"), backward=b) for b in (False, True)
    )
    assert backward.pieces[:-2] == forward.pieces[:-2][::-1]
    assert "backward" in backward.title


@pytest.mark.parametrize("backward", [False, True])
def test_the_tokens_that_segment_b_replaces_are_counted(tokenizer, text, backward):
    n_tokens, replaced = len(tokenizer.encode_document(text.splitlines(), "paragraphs")[0]) - 1, set()
    for step in range(8):
        it = explain(text, tokenizer, settings("data.seq_len=512", "data.reuse_len=256"), step, backward)
        n_omitted = n_tokens - it.pieces.index("<sep>")
        follows = "Segment B follows A in the text." in it.notes
        end = "first" if backward else "last"
        noted = any(
            note.startswith(f"The {end} {n_omitted} tokens of the text do not fit: segment B") for note in it.notes
        )
        assert noted != follows
        replaced.add(noted)
    assert replaced == {False, True}


def test_a_long_text_is_cut_with_a_note(tokenizer, text):
    it = explain(" ".join([text.replace("\n", " ")] * 20), tokenizer, settings())
    assert len(it.pieces) == 64
    assert re.search(r"The last [\d,]+ tokens of the text do not fit: ", to_text(it))
    assert "One character is 2 x 2 tokens" in to_text(it)
    assert max(map(len, to_text(it).splitlines())) <= 100


def test_denoising_hides_its_targets_and_causal_predicts_the_next_token(tokenizer, text):
    hidden = explain(text, tokenizer, settings("objective.name=denoising"))
    changed = [
        i for i, (piece, read) in enumerate(zip(hidden.pieces, hidden.input_pieces, strict=True)) if piece != read
    ]
    assert set(changed) <= set(hidden.target_positions.tolist()) and "<mask>" in hidden.input_pieces
    assert [hidden.pieces[i] for i in hidden.target_positions] == hidden.target_pieces
    causal = explain(short(text), tokenizer, settings(*OVERRIDES["causal"]))
    assert causal.target_pieces == [*causal.pieces[1:], "<eod>"]


def test_the_command_draws_a_picture(make_args, tmp_path):
    result = run(
        "pretrain/explain.py", "Two words. Then some more.", *make_args(), "--step", 2, "--picture", tmp_path / "it.png"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "query stream: predicts" in result.stdout
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_characters_without_a_font_are_reported_once(text, tokenizer, tmp_path, capsys):
    it = explain(short(text), tokenizer, settings())
    save_picture(dataclasses.replace(it, pieces=["\U0010fffd"] * len(it.pieces)), tmp_path / "it.png")
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "\U0010fffd" in warnings[0]


def test_the_vocabulary_of_the_store_is_the_fallback(make_args, capsys):
    main(["Two words. Then some more.", *make_args(tokenizer__path="nowhere.model")])
    assert "TARGETS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ([" "], {}, "the text is empty"),
        (["A"], {"text__line_type": "sentences"}, "a window needs at least 3. Give a longer text"),
        (["one more", "word"], {}, "'word' is invalid: settings are written as key=value"),
        (["caf\udce9."], {}, r"'caf\udce9.' is not valid UTF-8"),
        (["Some text.", "--step", str(2**63)], {}, "at least 0 and below 2^63"),
        (["Some text.", "--step", "-1"], {}, "--step=-1 is invalid"),
        (
            ["Some text.", "--picture", "it.gif"],
            {},
            "--picture=it.gif is invalid: the name must end with one of .png, .svg, .pdf",
        ),
        (["Some text.", "objective.name=causal"], {}, "data.reuse_len=32"),
        (["Some text.", "objective.max_spans=1"], {}, "did you mean 'objective.max_span'?"),
        (
            ["Some text."],
            {"tokenizer__path": "no.model", "data__store_dir": "no"},
            "Train one with pretrain/train_tokenizer.py",
        ),
    ],
)
def test_bad_input_is_a_one_line_error(make_args, monkeypatch, capsys, args, changes, message):
    monkeypatch.setattr("sys.argv", ["explain.py", args[0], *make_args(**changes), *args[1:]])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]


def tokenizer_of_words(text):
    """Return the vocabulary of the page: whole words, learned from the words in random order."""
    words, rng = sorted(set(text.replace(".", " .").split())), np.random.default_rng(0)
    tokenizer = train_tokenizer(
        [[" ".join(rng.permutation(words))] for _ in range(300)], TokenizerConfig(vocab_size=50)
    )
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == text.replace(".", " .").split()
    return tokenizer


def test_the_objectives_page_shows_the_output_of_its_command():
    page = (REPOSITORY / "docs/objectives.md").read_text()
    command = re.search(r'pretrain/explain.py "([^"]*)" --config (\S+) (.*) --step (\d+)', page)
    whole_words = tokenizer_of_words(command[1])
    config = load_config(PretrainConfig, REPOSITORY / command[2], command[3].split())
    printed = to_text(explain(command[1], whole_words, config, int(command[4])))
    shown = "\n\n".join(block.rstrip("\n") for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert shown == printed, "the draws changed: run the page's command again, paste what it prints, commit its picture"
