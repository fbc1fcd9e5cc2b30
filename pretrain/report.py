"""A page about a run: loss against word frequencies, learning rate, speed, what it fills into blanks.

python pretrain/report.py runs/quickstart
python pretrain/report.py runs/quickstart --against runs/no_memory
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig, settings_of_run
from pretrain.trainer.samples import read_samples
from xlpre.common.cli_main import run_main
from xlpre.common.files import write_text
from xlpre.common.plots import COLOURS, as_svg, in_legend, new_panels, save
from xlpre.training.metrics import read_metrics

Line = dict[str, Any]

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.lead { color: #566173; margin-top: .2rem; }
.facts { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.facts li { background: #f3f5f8; border-radius: .5rem; padding: .6rem .9rem; min-width: 8.5rem; }
.facts b { display: block; font-size: 1.25rem; }
svg { width: 100%; height: auto; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 1.2rem; } td { vertical-align: top; padding: .35rem .6rem; }
tr { border-top: 1px solid #e3e7ee; } .sentence { background: #f3f5f8; } .guess { white-space: nowrap; margin-right: .9rem; }
.right { color: #0a6b3d; font-weight: 600; } .p { color: #7a8597; font-size: .85em; }
pre { background: #f3f5f8; padding: 1rem; border-radius: .5rem; overflow-x: auto; }
"""


def write_report(run_dir: Path, against: Sequence[Path] = ()) -> Path:
    """Write `report.html`, and its first picture as `loss.png`, into the folder of a run.

    Args:
        run_dir: the run.
        against: other runs, whose held-out loss is drawn beside it.

    Raises:
        ValueError: a folder that holds no metrics, or a run measured on other targets.
    """
    trained, measured = _metrics(run_dir)
    others = [(_name_of(other), _metrics(other)[1]) for other in against]
    for name, lines in others:
        if abs(lines[-1]["val_unigram_loss"] - measured[-1]["val_unigram_loss"]) > 1e-6:
            raise ValueError(f"{name} was measured on other targets than {run_dir.name}: their losses do not compare")
    config = settings_of_run(run_dir)
    figure = _loss_plot(config.name, trained, measured, others)
    save(figure, run_dir / "loss.png")
    path = run_dir / "report.html"
    settings = (run_dir / "config.yaml").read_text("utf-8")
    write_text(path, _page(config, as_svg(figure), trained, measured, read_samples(run_dir), settings))
    return path


def _name_of(run_dir: Path) -> str:
    """The run's own; folders of many have the same."""
    return settings_of_run(run_dir).name if (run_dir / "config.yaml").exists() else str(run_dir)


def _metrics(run_dir: Path) -> tuple[list[Line], list[Line]]:
    lines = [{key: math.nan if value is None else value for key, value in x.items()} for x in read_metrics(run_dir)]
    trained, measured = [x for x in lines if "loss" in x], [x for x in lines if "val_loss" in x]
    if not trained or not measured:
        raise ValueError(f"{run_dir} has no metrics.jsonl of a measured run; train first with pretrain/run.py")
    return trained, measured


def _page(
    config: PretrainConfig, picture: str, trained: list[Line], measured: list[Line], samples: list[Line], settings: str
) -> str:
    last, model = measured[-1], config.model
    facts = {
        "held-out loss": f"{last['val_loss']:.3f} nats",
        "word frequencies alone": f"{last['val_unigram_loss']:.3f} nats",
        "targets right": f"{last['val_accuracy']:.1%}",
        "window tokens read": f"{last['tokens'] / 1e6:.2f} M",
        "time": f"{last['seconds'] / 60:.1f} min",
    }
    return "".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(config.name)}</title><style>{STYLE}</style>",
            f"<h1>{escape(config.name)}</h1><p class=lead>{escape(config.objective.name)} language model, {model.n_layer} layers, ",
            f"d {model.d_model}, vocabulary {model.vocab_size:,}, windows of {config.data.seq_len} tokens, memory {model.mem_len}; ",
            f"text: {escape(' '.join(config.text.sources))}</p><ul class=facts>",
            *(f"<li>{escape(name)}<b>{escape(value)}</b></li>" for name, value in facts.items()),
            "</ul><h2>Loss</h2>",
            picture,
            "<div class=pair><div><h2>Learning rate</h2>",
            _plot(trained, "lr", "learning rate"),
            "</div><div><h2>Speed</h2>",
            _plot(trained, "tokens_per_second", "window tokens / s"),
            "</div></div>",
            _samples(samples),
            f"<h2>Settings</h2><details><summary>config.yaml</summary><pre>{escape(settings)}</pre></details></html>",
        ]
    )


def _loss_plot(name: str, trained: list[Line], measured: list[Line], others: Sequence[tuple[str, list[Line]]]) -> Any:
    figure, axes = _axes(9, 4)
    losses = [x["loss"] for x in trained]
    axes.plot(_millions(trained), losses, _line(losses), color="#9db4d6", linewidth=1, markersize=4, label="training")
    for (label, lines), color in zip([(name, measured), *others], itertools.cycle(COLOURS), strict=False):
        losses = [x["val_loss"] for x in lines]
        axes.plot(_millions(lines), losses, "o-", color=color, markersize=4, label=in_legend(f"{label}, held out"))
    unigram = measured[-1]["val_unigram_loss"]
    axes.axhline(
        unigram,
        color="#b4442c",
        linestyle="--",
        linewidth=1.2,
        label=f"word frequencies alone ({unigram:.2f}), same targets",
    )
    # the first updates leave the logarithm of the vocabulary size; what matters is around the baseline
    lowest = min((x["val_loss"] for x in measured if math.isfinite(x["val_loss"])), default=unigram)
    axes.set_ylim(min(lowest, unigram) - 0.2, max(unigram, lowest) + 1.0)
    axes.set_ylabel("loss, nats a target")
    axes.legend(frameon=False)
    return figure


def _plot(lines: list[Line], key: str, label: str) -> str:
    figure, axes = _axes(4.5, 2.6)
    axes.plot(_millions(lines), [x[key] for x in lines], _line(lines), color=COLOURS[0], linewidth=1.2, markersize=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    return as_svg(figure)


def _line(points: Sequence[Any]) -> str:
    """How matplotlib is to draw a curve: a single point has no line that would show it."""
    return "o" if len(points) == 1 else "-"


def _axes(width: float, height: float) -> tuple[Any, Any]:
    figure, (axes,) = new_panels(width, height)
    axes.set_xlabel("window tokens read, millions")
    axes.grid(axis="y", color="#e3e7ee")
    return figure, axes


def _millions(lines: list[Line]) -> list[float]:
    return [x["tokens"] / 1e6 for x in lines]


def _samples(samples: list[Line]) -> str:
    if not samples or not samples[-1]["filled"]:
        return ""
    shown = [samples[0], samples[-1]] if len(samples) > 1 else samples
    rows = []
    for filled in shown[-1]["filled"]:
        rows.append(f"<tr class=sentence><td colspan=2 dir=auto>{escape(filled['text'])}")
        truth = ", ".join(f"<bdi>{escape(one)}</bdi>" for one in filled["truth"])
        rows.append(f" <b>({truth})</b></td></tr>" if truth else "</td></tr>")
        for moment in shown:
            for answer in (one for one in moment["filled"] if one["text"] == filled["text"]):
                truths = answer["truth"] or [None] * len(answer["blanks"])
                for guesses, truth in zip(answer["blanks"], truths, strict=True):
                    spans = "".join(_guess(piece, p, piece == truth) for piece, p in guesses)
                    rows.append(f"<tr><td>step {moment['step']:,}</td><td>{spans}</td></tr>")
    return f"<h2>What it fills into blanks</h2><table>{''.join(rows)}</table>"


def _guess(piece: str, probability: float, right: bool) -> str:
    mark = " right" if right else ""
    return f"<span class='guess{mark}'><bdi>{escape(piece)}</bdi> <span class=p>{probability:.1%}</span></span>"


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run, such as runs/quickstart")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other runs to draw beside it")
    words = parser.parse_args(argv)
    print(write_report(words.run, words.against))


if __name__ == "__main__":
    run_main(main)
