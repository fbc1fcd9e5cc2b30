"""Ablation: a file of settings and rows of overrides, the runs of each row, and their comparison."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.config import PretrainConfig, changed_settings
from pretrain.trainer.inputs import RunInputs, is_finished
from xlpre.common.plots import COLOURS, legend_label, new_axes, save_figure
from xlpre.common.tables import to_markdown, write_table
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import load_config
from xlpre.training.metrics_writer import read_metrics

ROW_KEYS = ("name", "run_dir", "seed")  # settings that the row decides
MARGIN = 0.1  # nats below the unigram baseline from which a model counts as having learned from context


@dataclass(frozen=True)
class AblationConfig:
    """Comparison of pretrainings.

    Attributes:
        base: settings file, relative to the folder of this file.
        common: overrides of every row.
        num_seeds: runs of each row, with the seeds 1, 2, ...
        rows: overrides of each row by its name. The other rows are compared with the first.
    """

    base: str = ""
    common: list[str] = field(default_factory=list)
    num_seeds: int = 1
    rows: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base or not self.rows or self.num_seeds < 1:
            raise ValueError(
                "the ablation is invalid: it must have `base:` (a settings file), `rows:` (lists of overrides by name), and "
                "num_seeds of at least 1. Add what is missing."
            )
        for row, overrides in self.rows.items():
            if row in ("", ".", "..") or "/" in row:
                raise ValueError(
                    f"row {row!r} is invalid: its name becomes a folder and must not be empty, '.' or '..', or contain a slash. Rename it."
                )
            for override in [*self.common, *overrides]:
                if override.partition("=")[0] in ROW_KEYS:
                    raise ValueError(
                        f"row {row}: {override} is invalid: the row decides {override.partition('=')[0]}. Leave it out."
                    )


@dataclass(frozen=True)
class Run:
    """One run of a row.

    Attributes:
        row: name of the row.
        seed: seed of the run.
        args: arguments of its command: --config, the base file, and overrides.
        config: settings of the run.
    """

    row: str
    seed: int
    args: Sequence[str]
    config: PretrainConfig

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run_dir)

    @property
    def explicit_keys(self) -> ExplicitKeys:
        """Keys that the command sets."""
        return ExplicitKeys.read(self.args[1], self.args[2:])

    def is_finished(self) -> bool:
        """Return True if the run is finished.

        Raises:
            ValueError: the run has other settings than its row.
        """
        if not is_finished(self.config, self.explicit_keys):
            return False
        self.check_settings()
        return True

    def check_settings(self) -> None:
        """Raise ValueError if the run in the folder has other settings than its row."""
        for key, (saved, present) in changed_settings(self.config).items():
            raise ValueError(
                f"row {self.row}: {key}={present} is invalid: {self.folder} was trained with {key}={saved}. "
                f"Set {key}={saved}, rename the row, or remove that folder."
            )

    def check_inputs(self) -> None:
        """Raise ValueError if the run cannot start because of its text, its vocabulary or its model."""
        try:
            RunInputs(self.config, self.explicit_keys)
        except ValueError as error:
            raise ValueError(f"row {self.row}: {error}") from None

    def check_batch(self, processes: int) -> None:
        """Raise ValueError if `processes` processes cannot share the batch."""
        try:
            self.config.train.batch_schedule(processes)
        except ValueError as error:
            raise ValueError(f"row {self.row} with --processes {processes}: {error}") from None


class Ablation:
    """All runs of an ablation file.

    Args:
        path: the file.
        overrides: more overrides, for every row.
        rows: names of the rows to include; empty: all.
        num_seeds: runs of each row; None: as in the file.

    Attributes:
        name: name of the file without suffix, and of the folder in `runs/` that holds all runs.
        rows: overrides of each row by its name.
        runs: all runs, ordered by seed and then by row.

    Raises:
        ValueError: the file is not an ablation, a row does not exist, or a setting is invalid.
    """

    def __init__(
        self, path: Path, overrides: Sequence[str] = (), rows: Sequence[str] = (), num_seeds: int | None = None
    ) -> None:
        config = load_config(AblationConfig, path)
        for row in rows:
            if row not in config.rows:
                raise ValueError(
                    f"--rows {row} is invalid: {path} has the rows {', '.join(config.rows)}. Give one of them."
                )
        self.name, self.base = path.stem, Path(os.path.normpath(path.parent / config.base))
        self.rows = {row: changes for row, changes in config.rows.items() if row in (rows or config.rows)}
        common = [*config.common, *overrides]
        self.num_seeds = config.num_seeds if num_seeds is None else num_seeds
        if self.num_seeds < 1:
            raise ValueError(
                f"--seeds {self.num_seeds} is invalid: it must be at least 1. Leave it out for the file's."
            )
        self.runs = [self._run(row, seed, common) for seed in range(1, self.num_seeds + 1) for row in self.rows]

    @property
    def folder(self) -> Path:
        """Folder of all runs and of the comparison."""
        return Path("runs") / self.name

    def _run(self, row: str, seed: int, common: Sequence[str]) -> Run:
        overrides = [*common, *self.rows[row]]
        try:
            config = load_config(PretrainConfig, self.base, overrides)
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from None
        name, folder = f"{self.name}_{row}_{seed}", self.folder / row / f"seed_{seed}"
        # both default to a path with the name of the run
        inputs = [f"data.store_dir={config.data.store_dir}", f"tokenizer.path={config.tokenizer.path}"]
        args = ["--config", str(self.base), *inputs, *overrides]
        args += [f"name={name}", f"run_dir={folder}", f"seed={seed}"]
        return Run(row, seed, args, load_config(PretrainConfig, self.base, args[2:]))


@dataclass(frozen=True)
class RunResult:
    """Evaluations of one run.

    Attributes:
        seed: seed of the run.
        evaluations: records of its metrics.jsonl with a validation loss.
    """

    seed: int
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, run: Run) -> RunResult | None:
        """Read the result of a run; None if it was not evaluated yet.

        Raises:
            ValueError: the run has other settings than its row.
        """
        run.check_settings()
        evaluations = [record for record in read_metrics(run.folder) if "val_loss" in record]
        return cls(run.seed, evaluations) if evaluations else None

    @property
    def last(self) -> dict[str, Any]:
        """Last evaluation."""
        return self.evaluations[-1]

    @property
    def loss(self) -> float:
        """Last validation loss in nats; infinite if it was not finite."""
        return _finite_or_inf(self.last["val_loss"])

    @property
    def losses(self) -> dict[int, float]:
        """Validation losses by the number of window tokens read."""
        return {record["tokens"]: _finite_or_inf(record["val_loss"]) for record in self.evaluations}

    @property
    def tokens_to_beat_unigram(self) -> float:
        """Millions of window tokens until the loss is `MARGIN` below the unigram baseline; infinite if it never is."""
        below = (x for x in self.evaluations if _finite_or_inf(x["val_loss"]) < x["val_unigram_loss"] - MARGIN)
        return next((record["tokens"] / 1e6 for record in below), math.inf)


def read_results(ablation: Ablation) -> dict[str, list[RunResult]]:
    """Read the results of all evaluated runs by row."""
    results: dict[str, list[RunResult]] = {row: [] for row in ablation.rows}
    for run in ablation.runs:
        if result := RunResult.read(run):
            results[run.row].append(result)
    return {row: row_results for row, row_results in results.items() if row_results}


def build_table(ablation: Ablation) -> list[dict[str, str]]:
    """Compare the rows that were evaluated with the first of them.

    Rows are compared at the end, and at the last number of window tokens at which all runs of both rows were evaluated.

    Returns:
        One dict per row, with cells by column name.

    Raises:
        ValueError: no run was evaluated yet.
    """
    results = read_results(ablation)
    if not results:
        raise ValueError(f"{ablation.folder} is invalid: it contains no evaluated run. Start the runs with --run.")
    (base_row, base), *_ = results.items()
    # until the first row is evaluated, another one is the base
    base_name = "base" if base_row == next(iter(ablation.rows)) else base_row
    base_unigram = base[0].last["val_unigram_loss"]
    table = []
    for row, row_results in results.items():
        losses, lasts = sorted(result.loss for result in row_results), [result.last for result in row_results]
        beats_at = [result.tokens_to_beat_unigram for result in row_results]
        comparable = abs(lasts[0]["val_unigram_loss"] - base_unigram) < 1e-6
        common_tokens = max(set.intersection(*(set(result.losses) for result in (*row_results, *base))))
        final_difference = median(losses) - median(result.loss for result in base)
        row_loss, base_loss = (median(r.losses[common_tokens] for r in group) for group in (row_results, base))
        table.append(
            {
                "row": row,
                "overrides": " ".join(ablation.rows[row]) or "none",
                "runs": str(len(row_results)),
                "tokens (M)": f"{median(x['tokens'] for x in lasts) / 1e6:.2f}",
                "minutes": f"{median(x['train_seconds'] for x in lasts) / 60:.1f}",
                "val loss": f"{median(losses):.3f}",
                "val loss range": f"{losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else "",
                f"difference to {base_name}": f"{final_difference:+.3f}" if comparable else "other targets",
                "at equal tokens": (f"{row_loss - base_loss:+.3f} ({common_tokens / 1e6:.2f} M)" if comparable else ""),
                "unigram baseline": f"{lasts[0]['val_unigram_loss']:.3f}",
                "tokens to beat unigram (M)": _format_range([x for x in beats_at if x < math.inf], len(beats_at)),
                "val bpb": f"{median(_finite_or_inf(x['val_bpb']) for x in lasts):.3f}",
                "accuracy": f"{median(x['val_accuracy'] for x in lasts):.1%}",
            }
        )
    return table


def write_comparison(ablation: Ablation, is_subset: bool = False) -> None:
    """Write table.md, table.csv and curves.png into the folder of the ablation, and print the table.

    Args:
        ablation: the ablation.
        is_subset: True if only some rows are included: the files are then named subset_table.md and so on.
    """
    table, prefix = build_table(ablation), "subset_" * is_subset
    write_table(table, ablation.folder, f"{prefix}table")
    save_figure(_draw_curves(ablation), ablation.folder / f"{prefix}curves.png")
    print(to_markdown(table), end="")
    if all(row["runs"] == "1" for row in table):
        print("One run per row: differences cannot be distinguished from seed noise; use --seeds 3.")


def _draw_curves(ablation: Ablation) -> Any:
    """Draw the validation loss against tokens: a color per row, a line per run."""
    figure, (axes,) = new_axes(9, 5)
    results = read_results(ablation)
    for (row, row_results), color in zip(results.items(), itertools.cycle(COLOURS), strict=False):
        for result in row_results:
            points = [x for x in result.evaluations if x["val_loss"] is not None and x["step"]]
            axes.plot(
                [x["tokens"] / 1e6 for x in points],
                [x["val_loss"] for x in points],
                color=color,
                linewidth=1.3,
                label=legend_label(row) if result is row_results[0] else None,
            )
    baselines = {round(result.last["val_unigram_loss"], 4) for group in results.values() for result in group}
    for index, baseline in enumerate(sorted(baselines)):
        label = None if index else "unigram baseline"
        axes.axhline(baseline, color="#b4442c", linestyle="--", linewidth=1, label=label)
    lowest = min(result.loss for group in results.values() for result in group)
    axes.set_ylim(min(lowest, *baselines) - 0.1, max(baselines) + 0.6)
    axes.set(xlabel="window tokens read, millions", ylabel="val loss, nats per target")
    axes.grid(axis="y", color="#e3e7ee")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def _format_range(values: Sequence[float], n_runs: int) -> str:
    if not values:
        return "never"
    text = f"{min(values):.2f}" + (f" to {max(values):.2f}" if max(values) > min(values) else "")
    return text if len(values) == n_runs else f"{text} ({n_runs - len(values)} never)"


def _finite_or_inf(value: float | None) -> float:
    return math.inf if value is None else value
