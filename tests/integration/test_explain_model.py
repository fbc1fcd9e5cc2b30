"""`pretrain/explain.py --model`: probabilities of the targets and attention maps."""

import dataclasses
import re

import numpy as np
import pytest

from pretrain.config import PretrainConfig
from pretrain.explain import main
from pretrain.tools.explanation import explain, to_text
from pretrain.tools.model_explanation import draw_attention, load_model, predict_targets
from tests.conftest import write_folder
from tests.unit.model.conftest import make_model
from xlpre.batch import HIDDEN_RANK
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config, save_config
from xlpre.conversion.model_folder import ModelFolder, save_folder

SETTINGS = ["data.seq_len=48", "data.reuse_len=24", "objective.partial_k=4", "seed=5"]


@pytest.fixture(scope="module")
def text(documents):
    return documents[0][0] + "\n" + documents[1][0]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("explain") / "model", tokenizer)


def with_inputs(explanation, **arrays):
    """Return the explanation of a window with other inputs of the model."""
    return dataclasses.replace(explanation, inputs=dataclasses.replace(explanation.inputs, **arrays))


def with_token(explanation, position, token):
    """Return the explanation of a window with another input token."""
    input_ids = explanation.inputs.input_ids.copy()
    input_ids[0, position] = token
    return with_inputs(explanation, input_ids=input_ids)


def test_a_target_depends_on_earlier_targets_in_order_and_on_none_if_independent(tokenizer, text):
    model = make_model(vocab_size=len(tokenizer)).eval()
    it = explain(text, tokenizer, load_config(PretrainConfig, None, SETTINGS), step=1)
    before = predict_targets(model, it)
    ranks = it.query_rank[it.target_positions]
    assert len(ranks) > 4
    for target, position in enumerate(it.target_positions.tolist()):
        after = predict_targets(model, with_token(it, position, 9))
        changed = np.abs(after.in_order - before.in_order) > 1e-6
        np.testing.assert_array_equal(changed, ranks > ranks[target])
        np.testing.assert_allclose(after.independent, before.independent, atol=1e-6)
    first = int(ranks.argmin())
    assert before.in_order[first] == pytest.approx(before.independent[first], abs=1e-5)


def test_pairs_equal_the_paper_s_comparison_in_separate_passes(tokenizer, text):
    model = make_model(vocab_size=len(tokenizer)).eval()
    it = explain(text, tokenizer, load_config(PretrainConfig, None, SETTINGS), step=1)
    pairs = predict_targets(model, it).pairs
    assert len(pairs) == int((np.diff(it.target_positions) == 1).sum()) > 2
    ranks = it.query_rank[it.target_positions]
    for pair in pairs:
        first, second = sorted(pair.targets, key=lambda target: ranks[target])
        positions = it.target_positions[[first, second]]
        # the targets of higher rank are removed from the window; the second of the pair is moved to the rank after the first
        hidden = {"key_rank": np.where((it.key_rank > ranks[first]), HIDDEN_RANK, it.key_rank)[None]}
        seen = it.query_rank.copy()
        seen[positions[1]] = ranks[first] + 1
        joint = predict_targets(model, with_inputs(it, query_rank=seen[None], **hidden)).in_order[[first, second]].sum()
        hidden["key_rank"][0, positions[0]] = HIDDEN_RANK
        independent = (
            predict_targets(model, with_inputs(it, query_rank=seen[None], **hidden)).in_order[[first, second]].sum()
        )
        assert (pair.joint, pair.independent) == pytest.approx((joint, independent), abs=1e-4)
        assert abs(joint - independent) > 1e-6


@pytest.mark.parametrize("objective", ["denoising", "causal"])
def test_objectives_without_an_order_of_targets_have_one_probability(tokenizer, text, objective):
    model = make_model(False, vocab_size=len(tokenizer)).eval()
    overrides = [*SETTINGS, f"objective.name={objective}", *["data.reuse_len=48"][: objective == "causal"]]
    it = explain(text, tokenizer, load_config(PretrainConfig, None, overrides))
    predictions = predict_targets(model, it)
    assert predictions.independent is None and len(predictions.in_order) == len(it.target_pieces)
    page = to_text(it, predictions)
    assert "probability  is predicted from" in page and "independent" not in page.split("TARGETS")[1]
    assert f"log-probability of all targets: {predictions.in_order.sum():.2f} nats" in page


def test_the_page_lists_both_probabilities_and_their_sums(tokenizer, text, folder, capsys):
    main([text, "--model", str(folder), *SETTINGS])
    page = capsys.readouterr().out
    config, model, _ = load_model(folder, None, SETTINGS)
    it = explain(text, tokenizer, config)
    predictions = predict_targets(model, it)
    assert "probability  independent  is predicted from" in page
    joint, independent = predictions.in_order.sum(), predictions.independent.sum()
    assert f"in this order: {joint:.2f} nats; if they were independent: {independent:.2f} nats" in page
    rows = re.findall(r"^ {,4}\d+  \S+ +[\d.e-]+ +[\d.e-]+  ", page, re.MULTILINE)
    assert len(rows) == len(it.target_pieces)
    assert page.count("PAIRS") == 1 and max(map(len, page.splitlines())) <= 100


def test_windows_are_those_of_the_run_or_fit_the_objective(tokenizer, text, folder, tmp_path, capsys):
    run_dir = tmp_path / "run"
    model = make_model(vocab_size=len(tokenizer))
    save_folder(run_dir / "model", ModelFolder.from_model(model, tokenizer, "permutation", data_fingerprint="0"))
    save_config(load_config(PretrainConfig, None, SETTINGS), run_dir / "config.yaml")
    for path in (run_dir, run_dir / "model"):
        main([text, "--model", str(path)])
        assert capsys.readouterr().out.startswith("permutation, 48 tokens (24 reused), forward, seed 5, step 0")
    causal = make_model(False, vocab_size=len(tokenizer))
    save_folder(tmp_path / "causal", ModelFolder.from_model(causal, tokenizer, "causal"))
    main([text, "--model", str(tmp_path / "causal")])
    assert capsys.readouterr().out.startswith("causal, ")


def test_attention_is_drawn_by_layer_and_head_where_targets_see(tokenizer, text, folder, tmp_path, capsys):
    config, model, _ = load_model(folder, None, SETTINGS)
    it = explain(text, tokenizer, config)
    figure = draw_attention(model, it)
    L, H = model.config.n_layer, model.config.n_head
    assert len(figure.axes) == L * H + 1  # and the color bar
    sees = it.query_rank[it.target_positions][:, None] > it.key_rank[None]
    for axes in figure.axes[: L * H]:
        values = axes.collections[0].get_array()
        np.testing.assert_array_equal(np.ma.getmaskarray(values), ~sees)
        np.testing.assert_allclose(values.filled(0).sum(1), 1, rtol=1e-5)
    main([text, "--model", str(folder), *SETTINGS, "--picture", str(tmp_path / "it.png")])
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG") and "attention written" in capsys.readouterr().out


def test_without_a_text_the_pair_of_the_example_is_a_target(tokenizer, tmp_path, capsys, monkeypatch):
    words = [piece[1:] for piece in tokenizer.pieces if piece[0] == "▁" and len(piece) > 3][:24]
    monkeypatch.setattr("pretrain.tools.explanation.EXAMPLE", " ".join(words))
    monkeypatch.setattr("pretrain.tools.explanation.EXAMPLE_PAIR", " ".join(words[:2]))
    main(["--model", str(write_folder(tmp_path / "model", tokenizer)), "data.pairs=false"])
    page = capsys.readouterr().out
    assert "seed 1, step 0\n" not in page  # where other tokens are targets
    assert re.search("\n".join(rf" +{i}  ▁{word} .*[┌│└] ▁{word} .*" for i, word in enumerate(words[:2])), page)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "{folder}", "--picture", "it.gif"],
            "--picture=it.gif is invalid: the name must end with one of .png",
        ),
        (
            ["--model", "{folder}", "objective.name=denoising"],
            "objective.name=denoising is invalid with --model {folder}: the model was trained with objective.name=permutation",
        ),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_a_one_line_error(folder, text, monkeypatch, capsys, args, message):
    monkeypatch.setattr("sys.argv", ["explain.py", text, *(arg.format(folder=folder) for arg in args)])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(errors) == 1 and message.format(folder=folder) in errors[0]
