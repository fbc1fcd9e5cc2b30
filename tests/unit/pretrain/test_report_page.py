"""The HTML report of a run."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pretrain.config import EvalConfig, PretrainConfig
from pretrain.tools import report_page
from pretrain.tools.report_page import _loss_figure, write_report
from pretrain.trainer.inputs import describe_finished
from pretrain.trainer.samples import Samples
from tests.conftest import REPOSITORY
from xlpre.common.plots import new_axes, save_figure
from xlpre.common.tables import write_table
from xlpre.config.loader import save_config
from xlpre.inference.cloze import ClozeResult
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.text import special_tokens
from xlpre.text.corpus import TextConfig
from xlpre.training.metrics_writer import MetricsWriter


def write_run(folder, name, **text):
    save_config(PretrainConfig(name=name, text=TextConfig(**text)), folder / "config.yaml")
    with closing(MetricsWriter(folder, 0)) as log:
        log.write(1, loss=7.0, lr=0.1, tokens_per_second=10.0, tokens=5, train_seconds=1.0)
        log.write(1, val_loss=7.0, val_unigram_loss=6.0, val_accuracy=0.0, val_bpb=2.5, tokens=5, train_seconds=1.0)


def test_runs_are_labeled_with_their_names_and_text_is_that_of_the_mixture(tmp_path):
    folders = [tmp_path / row / "seed_1" for row in ("plain", "other", "third")]
    for folder, name in zip(folders, ("plain_1", "other_1", "third_1"), strict=True):
        folder.mkdir(parents=True)
        write_run(folder, name, mixture={"mine/*.txt": 2.0})
    page = write_report(folders[0], folders[1:]).read_text()
    assert all(f"{name}, validation" in page for name in ("plain_1", "other_1", "third_1"))
    assert "text: mine/*.txt" in page


def test_runs_with_other_targets_or_another_objective_are_not_compared(tmp_path):
    for name in ("mine", "targets", "objective"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, name)
    metrics = tmp_path / "targets/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"val_unigram_loss": 6.0', '"val_unigram_loss": 6.1'))
    config = PretrainConfig(name="objective", objective=ObjectiveConfig(name="denoising"))
    save_config(config, tmp_path / "objective/config.yaml")
    for name, reason in (("targets", "was evaluated on other targets"), ("objective", "has another objective")):
        with pytest.raises(ValueError, match=rf"--against=\S*/{name} is invalid: it {reason} than .*/mine"):
            write_report(tmp_path / "mine", [tmp_path / name])


def test_the_page_says_why_validation_and_training_losses_differ_and_what_bits_per_byte_are(tmp_path):
    write_run(tmp_path, "mine")
    page = write_report(tmp_path).read_text()
    assert "<li>bits per byte<b>2.500</b>" in page and "<b>Bits per byte</b>: " in page
    assert "training 1 in" not in page  # the same fraction of the tokens is predicted
    config = PretrainConfig(eval=EvalConfig(partial_k=6.0), objective=ObjectiveConfig(partial_k=2.0))
    save_config(config, tmp_path / "config.yaml")
    assert "Validation predicts 1 in 6 tokens, training 1 in 2." in write_report(tmp_path).read_text()


def test_losses_of_different_targets_are_not_one_curve(tmp_path):
    write_run(tmp_path, "mine")
    assert "settings changed" not in write_report(tmp_path).read_text()
    with closing(MetricsWriter(tmp_path, 1)) as log:
        for step, unigram in ((2, 6.0), (3, 6.2), (4, 6.2)):
            last = {"val_loss": 5.0, "val_unigram_loss": unigram, "val_accuracy": 0.0, "val_bpb": 2.5}
            log.write(step, **last, tokens=5 * step, train_seconds=1.0)
    train, val = report_page._read_metrics(tmp_path)
    lines = _loss_figure("mine", train, val, []).axes[0].lines
    assert [len(line.get_xdata()) for line in lines if line.get_label() != "training"][:2] == [2, 2]
    assert "settings changed during the run" in write_report(tmp_path).read_text()


def test_every_axis_of_the_page_has_a_label(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report_page, "figure_to_svg", lambda figure: figures.append(figure) or "")
    write_run(tmp_path, "mine")
    write_report(tmp_path)
    assert len(figures) == 3
    assert all(axes.get_xlabel() and axes.get_ylabel() for figure in figures for axes in figure.axes)


def test_a_finetuning_or_ablation_has_a_page_with_its_table_and_plots(tmp_path):
    write_table([{"name": "mrpc", "median": "<0.75>"}], tmp_path)
    save_figure(new_axes(2, 2)[0], tmp_path / "curves.png")
    page = write_report(tmp_path).read_text()
    assert "<th>median</th>" in page and "<td>&lt;0.75&gt;</td>" in page
    assert "<h2>curves</h2><img alt='curves.png' src='data:image/png;base64,iVBOR" in page
    with pytest.raises(ValueError, match=r"--against=other is invalid: "):
        write_report(tmp_path, [Path("other")])


def test_the_comparison_of_some_rows_has_a_page_until_that_of_all_rows_exists(tmp_path):
    (tmp_path / "subset_table.csv").write_text("row,note\nsome,two\n")
    save_figure(new_axes(2, 2)[0], tmp_path / "subset_losses.png")
    page = write_report(tmp_path).read_text()
    assert "<td>some</td>" in page and "<h2>subset_losses</h2>" in page
    (tmp_path / "table.csv").write_text('row,note\nall,"two\nlines"\n')
    page = write_report(tmp_path).read_text()
    assert "<td>all</td><td>two\nlines</td>" in page and "subset_losses" not in page
    (tmp_path / "table.csv").write_text("")
    with pytest.raises(ValueError, match=r"table.csv is invalid: it has no rows"):
        write_report(tmp_path)


def test_a_run_with_nonfinite_losses_has_a_report(tmp_path):
    save_config(PretrainConfig(), tmp_path / "config.yaml")
    log = MetricsWriter(tmp_path, 0)
    for step, loss in enumerate((7.0, float("nan"), float("inf"))):
        log.write(step, loss=loss, lr=0.1, tokens_per_second=10.0, tokens=step, train_seconds=1.0)
        val = {"val_loss": loss, "val_unigram_loss": 6.0, "val_accuracy": 0.0, "val_bpb": loss}
        log.write(step, **val, tokens=step, train_seconds=1.0)
    log.close()
    assert "validation loss<b>nan nats" in write_report(tmp_path).read_text()


def test_characters_without_a_font_are_reported_once(tmp_path, capfd):
    write_run(tmp_path, "\U0010fffd")
    write_report(tmp_path)
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1 and "\U0010fffd" in warnings[0]


IN_ANY_LOCALE = """
import sys
from pathlib import Path
from pretrain.tools.report_page import write_report
from pretrain.trainer.samples import read_samples
from tests.unit.pretrain.test_report_page import write_run, write_samples
from xlpre.common.cli_main import run_main
folder = Path(sys.argv[1])
write_run(folder, "gr\\u00f6\\u00dfe", source="\\u4e2d/*.txt")
write_samples(folder, "\\u4eca\\u5929 ____")
run_main(lambda: print(write_report(folder).name, read_samples(folder)[0]["results"][0]["text"]))
"""


def write_samples(folder, text):
    samples = Samples(PretrainConfig(run_dir=str(folder), eval=EvalConfig(sentences=[text])), None, StubTokenizer())
    samples.write(0, [ClozeResult(text, [[(text, 1.0)]], [])])


class StubTokenizer:
    """Tokenizer stub for texts that are not encoded."""

    kind = "sentencepiece"
    pieces = ()

    def encode(self, text):
        return [special_tokens.EOP]


def test_a_run_without_its_config_file_is_refused(tmp_path):
    write_run(tmp_path, "lost")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"config.yaml"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("\n")
    with pytest.raises(ValueError, match=r"config.yaml .*empty"):
        write_report(tmp_path)
    message = describe_finished(PretrainConfig(run_dir=str(tmp_path)))
    assert "already finished" in message and f"{tmp_path}/config.yaml" in message


def test_files_of_a_run_are_utf_8_in_any_locale(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", IN_ANY_LOCALE, str(tmp_path)]
    result = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == r"report.html \u4eca\u5929 ____"  # escaped for an ASCII terminal
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "größe" in page and "text: 中/*.txt" in page and "今天 ____" in page


def test_right_to_left_text_is_isolated(tmp_path):
    write_run(tmp_path, "mine")
    result = {"text": "الولد ____ كتاب.", "predictions": [[["قرأ", 0.5], ["كان", 0.1]]], "labels": ["قرأ"]}
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 0, "results": [result]}) + "\n")
    page = write_report(tmp_path).read_text("utf-8")
    assert "<td colspan=2 dir=auto>الولد ____ كتاب. <b>(<bdi>قرأ</bdi>)</b>" in page
    assert "<bdi>قرأ</bdi> <span class=p>50.0%</span>" in page  # otherwise the numbers of neighbors would swap


@pytest.mark.parametrize("n_points", [1, 2])
def test_a_single_training_record_is_drawn_as_a_marker(n_points):
    train = [{"tokens": k, "loss": 7.0} for k in range(n_points)]
    val = [{"tokens": 0, "val_loss": 7.0, "val_unigram_loss": 6.0}]
    line = _loss_figure("mine", train, val, []).axes[0].lines[0]
    assert line.get_label() == "training" and line.get_marker() == ("o" if n_points == 1 else "None")
