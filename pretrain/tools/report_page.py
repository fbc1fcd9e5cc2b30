"""HTML report of a pretraining run: loss, learning rate, speed, and predictions for blanks.

The folder of a fine-tuning run or of an ablation gets a page with its table and its plots.
"""

from __future__ import annotations

import base64
import csv
import itertools
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig, load_run_config
from pretrain.trainer.evaluator import target_fraction_note
from pretrain.trainer.samples import read_samples
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.plots import COLORS, figure_to_svg, legend_label, new_axes, save_figure
from xlpre.training.metrics_writer import read_metrics

Record = dict[str, Any]  # one line of metrics.jsonl or samples.jsonl

SUBSET_PREFIX = "subset_"  # of the files that compare some rows of an ablation

CHANGED_TARGETS = (
    "The eval settings changed during the run. Validation losses before and after a gap in their line are of different targets and cannot "
    "be compared."
)

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.lead { color: #566173; margin-top: .2rem; }
.summary { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.summary li { background: #f3f5f8; border-radius: .5rem; padding: .6rem .8rem; }
.summary b { display: block; font-size: 1.25rem; }
.note { color: #566173; font-size: .9rem; padding-left: 0; list-style: none; } img { max-width: 100%; }
.results { font-size: .75rem; } .results td, .results th { padding: .2rem .4rem; }
th { text-align: left; vertical-align: bottom; padding: .35rem .6rem; }
svg { width: 100%; height: auto; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 1.2rem; } td { vertical-align: top; padding: .35rem .6rem; }
tr { border-top: 1px solid #e3e7ee; } .sentence { background: #f3f5f8; } .candidate { white-space: nowrap; margin-right: .9rem; }
.correct { color: #0a6b3d; font-weight: 600; } .p { color: #7a8597; font-size: .85em; }
pre { background: #f3f5f8; padding: 1rem; border-radius: .5rem; overflow-x: auto; }
"""


def write_report(run_dir: Path, against: Sequence[Path] = ()) -> Path:
    """Write `report.html` into a folder, and for a pretraining run also its first figure, `loss.png`.

    Args:
        run_dir: folder of a pretraining run, of a fine-tuning run, or of an ablation.
        against: folders of other pretraining runs, whose validation loss is drawn in the same figure.

    Returns:
        Path of the page.

    Raises:
        InputError: a folder has no results, or the runs were evaluated on different targets.
    """
    for prefix in ("", SUBSET_PREFIX):
        if (run_dir / f"{prefix}table.csv").exists():
            return _write_table_page(run_dir, prefix, against)
    train, val = _read_metrics(run_dir)
    config = load_run_config(run_dir)
    others = [(_run_name(other), _read_metrics(other)[1]) for other in against]
    for other, (_, records) in zip(against, others, strict=True):
        has_config = (other / "config.yaml").exists()
        same_objective = not has_config or load_run_config(other).objective.name == config.objective.name
        if not same_objective or abs(records[-1]["val_unigram_loss"] - val[-1]["val_unigram_loss"]) > 1e-6:
            difference = "was evaluated on other targets" if same_objective else "has another objective"
            raise InputError(
                f"--against={other} is invalid: it {difference} than {run_dir}, so the losses are not comparable. Leave it out."
            )
    figure = _loss_figure(config.name, train, val, others)
    save_figure(figure, run_dir / "loss.png")
    path = run_dir / "report.html"
    write_text(path, _page(config, figure_to_svg(figure), train, val, read_samples(run_dir), _settings(run_dir)))
    return path


def _run_name(run_dir: Path) -> str:
    """Return the `name` setting of a run: the folders of several runs may have equal names."""
    return load_run_config(run_dir).name if (run_dir / "config.yaml").exists() else str(run_dir)


def _write_table_page(folder: Path, prefix: str, against: Sequence[Path]) -> Path:
    """Write `report.html` with the table and the plots of a fine-tuning run or an ablation, whose names start with `prefix`."""
    if against:
        raise InputError(
            f"--against={against[0]} is invalid: {folder} is a fine-tuning run or an ablation, and only pretraining runs can be drawn in "
            "one figure. Leave it out."
        )
    table = folder / f"{prefix}table.csv"
    with table.open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if not rows:
        raise InputError(f"{table} is invalid: it has no rows. Run the command that writes it again.")
    cells = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>"]
    cells += [f"<tr>{''.join(f'<td>{escape(value)}</td>' for value in row)}</tr>" for row in rows]
    parts = [
        _page_start(folder.name),
        f"<h1>{escape(folder.name)}</h1><table class=results>{''.join(cells)}</table>",
    ]
    for picture in sorted(folder.glob("*.png")):
        if picture.name.startswith(SUBSET_PREFIX) != bool(prefix):
            continue
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(
            f"<h2>{escape(picture.stem)}</h2><img alt='{escape(picture.name)}' src='data:image/png;base64,{data}'>"
        )
    if (folder / "config.yaml").exists():
        parts.append(_settings(folder))
    path = folder / "report.html"
    write_text(path, "".join(parts) + "</html>")
    return path


def _read_metrics(run_dir: Path) -> tuple[list[Record], list[Record]]:
    """Return the training records and the validation records of a pretraining run."""
    records = [{key: math.nan if value is None else value for key, value in x.items()} for x in read_metrics(run_dir)]
    train, val = [x for x in records if "loss" in x], [x for x in records if "val_loss" in x]
    if not train or not val:
        raise InputError(
            f"{run_dir} is not the folder of a run with results: it has no metrics.jsonl with training and validation losses, and no "
            "table.csv of a fine-tuning run or an ablation. Give the folder of a run, and wait for its first evaluation."
        )
    return train, val


def _page(
    config: PretrainConfig, loss_svg: str, train: list[Record], val: list[Record], samples: list[Record], settings: str
) -> str:
    last, model = val[-1], config.model
    summary = {
        "validation loss": f"{last['val_loss']:.3f} nats",
        "unigram baseline": f"{last['val_unigram_loss']:.3f} nats",
        "bits per byte": f"{last['val_bpb']:.3f}",
        "accuracy": f"{last['val_accuracy'] * 100:.1f} %",
        **({"minimal pairs": f"{last['val_minimal_pairs']:.1f} %"} if "val_minimal_pairs" in last else {}),
        "window tokens read": f"{last['tokens'] / 1e6:.2f} M",
        "training time": f"{last['train_seconds'] / 60:.1f} min",
    }
    return "".join(
        [
            _page_start(config.name),
            f"<h1>{escape(config.name)}</h1><p class=lead>{escape(config.objective.name)} language model, {model.n_layer} layers, ",
            f"d {model.d_model}, vocabulary {model.vocab_size or config.tokenizer.n_pieces:,}, "
            f"windows of {config.data.seq_len} tokens, memory {model.mem_len}; ",
            f"text: {escape(' '.join(config.text.sources))}</p><ul class=summary>",
            *(f"<li>{escape(name)}<b>{escape(value)}</b></li>" for name, value in summary.items()),
            f"</ul><h2>Loss</h2><p class=note>{target_fraction_note(config)}</p>",
            f"<p class=note>{CHANGED_TARGETS}</p>" if len(_segments(val)) > 1 else "",
            loss_svg,
            f"<ul class=note>{_definitions(config)}</ul>",
            "<div class=pair><div><h2>Learning rate</h2>",
            _small_plot(train, "lr", "learning rate"),
            "</div><div><h2>Speed</h2>",
            _small_plot(train, "tokens_per_second", "window tokens per second"),
            "</div></div>",
            _minimal_pairs_plot(val),
            _samples_table(samples),
            settings,
            "</html>",
        ]
    )


def _page_start(title: str) -> str:
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"


def _settings(run_dir: Path) -> str:
    """Return the settings of a run as a part of a page."""
    settings = (run_dir / "config.yaml").read_text("utf-8")
    return f"<h2>Settings</h2><details><summary>config.yaml</summary><pre>{escape(settings)}</pre></details>"


def _definitions(config: PretrainConfig) -> str:
    """Return the definitions of the numbers on the page as a list."""
    data = config.data
    definitions = {
        "Loss": "mean cross-entropy of the targets, the tokens to predict.",
        "Unigram baseline": "validation loss of predicting every token by its frequency in the training text.",
        "Bits per byte": "validation loss in bits, summed over the targets and divided by their UTF-8 bytes. It is comparable between "
        "vocabularies.",
        "Window tokens": f"tokens of all training windows. Windows of {data.seq_len} tokens advance by {data.reuse_len} tokens of text.",
    }
    return "".join(f"<li><b>{name}</b>: {definition}</li>" for name, definition in definitions.items())


def _loss_figure(name: str, train: list[Record], val: list[Record], others: Sequence[tuple[str, list[Record]]]) -> Any:
    figure, axes = _token_axes(9, 4)
    losses = [x["loss"] for x in train]
    axes.plot(
        _tokens_m(train), losses, _line_style(losses), color="#9db4d6", linewidth=1, markersize=4, label="training"
    )
    for (run, records), color in zip([(name, val), *others], itertools.cycle(COLORS), strict=False):
        label = f"{run}, validation"
        for segment in _segments(records):
            losses = [x["val_loss"] for x in segment]
            axes.plot(_tokens_m(segment), losses, "o-", color=color, markersize=4, label=legend_label(label))
            label = ""  # one entry in the legend
    unigram = val[-1]["val_unigram_loss"]
    label = f"unigram baseline ({unigram:.2f}), same targets"
    axes.axhline(unigram, color="#b4442c", linestyle="--", linewidth=1.2, label=label)
    # the first losses, near log(vocab_size), are cut off: the differences of interest are around the baseline
    lowest = min((x["val_loss"] for x in val if math.isfinite(x["val_loss"])), default=unigram)
    axes.set_ylim(min(lowest, unigram) - 0.2, max(unigram, lowest) + 1.0)
    axes.set_ylabel("loss, nats per target")
    axes.legend(frameon=False)
    return figure


def _segments(records: list[Record]) -> list[list[Record]]:
    """Divide evaluations where their targets change, as they do if a run resumes with other `eval` settings."""
    return [
        list(group) for _, group in itertools.groupby(records, key=lambda record: round(record["val_unigram_loss"], 5))
    ]


def _small_plot(records: list[Record], key: str, label: str) -> str:
    figure, axes = _token_axes(4.5, 2.6)
    values = [x[key] for x in records]
    axes.plot(_tokens_m(records), values, _line_style(records), color=COLORS[0], linewidth=1.2, markersize=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    return figure_to_svg(figure)


def _minimal_pairs_plot(val: list[Record]) -> str:
    """Return a plot of the accuracy on minimal pairs as a part of a page; "" if the run has none."""
    records = [record for record in val if "val_minimal_pairs" in record]
    if not records:
        return ""
    figure, axes = _token_axes(9, 2.6)
    values = [record["val_minimal_pairs"] for record in records]
    axes.plot(_tokens_m(records), values, "o-", color=COLORS[0], markersize=4)
    axes.axhline(50, color="#b4442c", linestyle="--", linewidth=1.2, label="chance")
    axes.set_ylim(min(45, *values), 100)
    axes.set_ylabel("correct, %")
    axes.legend(frameon=False)
    note = (
        "Percentage of the pairs in which the model gives the correct sentence the higher score; mean over paradigms."
    )
    return f"<h2>Minimal pairs</h2><p class=note>{note}</p>{figure_to_svg(figure)}"


def _line_style(points: Sequence[Any]) -> str:
    """Return a marker for a single point, which a line would not show."""
    return "o" if len(points) == 1 else "-"


def _token_axes(width: float, height: float) -> tuple[Any, Any]:
    figure, (axes,) = new_axes(width, height)
    axes.set_xlabel("window tokens read, millions")
    axes.grid(axis="y", color="#e3e7ee")
    return figure, axes


def _tokens_m(records: list[Record]) -> list[float]:
    return [x["tokens"] / 1e6 for x in records]


def _samples_table(samples: list[Record]) -> str:
    """Return the predictions for blanks at the first and the last evaluation as an HTML table."""
    if not samples or not samples[-1]["results"]:
        return ""
    shown = [samples[0], samples[-1]] if len(samples) > 1 else samples
    rows = []
    for example in shown[-1]["results"]:
        rows.append(f"<tr class=sentence><td colspan=2 dir=auto>{escape(example['text'])}")
        labels = ", ".join(f"<bdi>{escape(label)}</bdi>" for label in example["labels"])
        rows.append(f" <b>({labels})</b></td></tr>" if labels else "</td></tr>")
        for evaluation in shown:
            for result in (x for x in evaluation["results"] if x["text"] == example["text"]):
                blank_labels = result["labels"] or [None] * len(result["predictions"])
                for candidates, label in zip(result["predictions"], blank_labels, strict=True):
                    cells = "".join(_candidate(piece, p, piece == label) for piece, p in candidates)
                    rows.append(f"<tr><td>step {evaluation['step']:,}</td><td>{cells}</td></tr>")
    return f"<h2>Predictions for blanks</h2><table>{''.join(rows)}</table>"


def _candidate(piece: str, probability: float, correct: bool) -> str:
    mark = " correct" if correct else ""
    return f"<span class='candidate{mark}'><bdi>{escape(piece)}</bdi> <span class=p>{probability:.1%}</span></span>"
