"""Draw the figures of the reports from their results files: `python reports/plot.py`."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REPORTS = Path(__file__).parent
STEPS_OF_WHOLE_EPOCHS = ("2105", "1714")  # of fine-tuning runs that read all examples, in contrast to short runs


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a results file."""
    with open(REPORTS / name, newline="") as file:
        return list(csv.DictReader(file))


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a results file in JSON."""
    with open(REPORTS / name) as file:
        return [json.loads(line) for line in file]


def save(axes: plt.Axes, name: str) -> None:
    """Write a figure without its upper and right border."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.savefig(REPORTS / name, dpi=110, bbox_inches="tight")
    plt.close(axes.figure)


def draw_losses(report: str, runs: Iterable[str], top: float) -> None:
    """Draw val loss against tokens: one color per run, one line per seed."""
    curves = defaultdict(list)
    for row in read(f"{report}/results.csv"):
        if float(row["tokens"]):
            curves[row["run"], row["seed"]].append((float(row["tokens"]) / 1e6, float(row["val_loss"])))
    _, axes = plt.subplots(figsize=(7, 4))
    for number, run in enumerate(runs):
        seeds = [seed for name, seed in curves if name == run]
        for seed in seeds:
            label = run if seed == seeds[0] else None
            axes.plot(*zip(*curves[run, seed], strict=True), color=f"C{number}", label=label, linewidth=1.4)
    axes.set(xlabel="window tokens (millions)", ylabel="val loss (nats)", ylim=(None, top))
    axes.legend(frameon=False, fontsize=8)
    save(axes, f"{report}/curves.png")


def draw_final_losses(report: str, runs: dict[str, str], key: str, label: str, name: str) -> None:
    """Draw the last measurement of each run as a point per seed."""
    last: dict[tuple[str, str], float] = {}
    for row in read(f"{report}/results.csv"):
        last[row["run"], row["seed"]] = float(row[key])
    _, axes = plt.subplots(figsize=(6, 0.4 * len(runs) + 1.2))
    for height, run in enumerate(reversed(runs)):
        values = [value for (name, _), value in last.items() if name == run]
        axes.plot(values, [height] * len(values), "o", color="C0")
    axes.set_yticks(range(len(runs)), list(reversed(runs.values())))
    axes.set(xlabel=label, ylim=(-0.5, len(runs) - 0.5))
    axes.grid(axis="x", alpha=0.3)
    save(axes, f"{report}/{name}")


def draw_scores(report: str, models: list[str], tasks: dict[str, str]) -> None:
    """Draw scores of short fine-tuning runs: a color per model, a point per seed at its best learning rate, a bar at the median."""
    values = defaultdict(lambda: defaultdict(list))
    for row in read(f"{report}/results.csv"):
        if row["train_examples"] == "all" and row["steps"] not in STEPS_OF_WHOLE_EPOCHS:
            values[row["task"], row["model"]][row["learning_rate"]].append(100 * float(row["value"]))
    _, axes = plt.subplots(figsize=(7.5, 4))
    width = 0.8 / len(models)
    for place, task in enumerate(tasks):
        for number, model in enumerate(models):
            rates = values[task, model]
            if not rates:
                continue
            scores = max(rates.values(), key=lambda scores: (len(scores), median(scores)))
            x = place + (number - (len(models) - 1) / 2) * width
            axes.bar(x, median(scores), width, color=f"C{number}", alpha=0.5, label=model if not place else None)
            axes.plot([x] * len(scores), scores, ".", color=f"C{number}")
    axes.set_xticks(range(len(tasks)), list(tasks.values()))
    axes.set(ylabel="score (percent)", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    save(axes, f"{report}/scores.png")


def draw_step_speed() -> None:
    """Draw how many times as fast as Hugging Face's model a step is on the Xeon, eager and compiled."""
    ratios: dict[tuple[str, str], float] = {}
    for line in read_lines("step_speed/results.jsonl"):
        if line["run"] == "compiled_huggingface" and line["impl"] == "xlpre":
            config = line["config"]
            name = f"{config['n_layer']} layers, width {config['d_model']},\n{config['window']} tokens"
            dropout = ", dropout" if config["dropout"] else ""
            for peer, ratio in line["times_as_fast_as"].items():
                ratios[name, {"hf": "eager", "hf-compile": "compiled"}[peer] + dropout] = ratio
    models = list(dict.fromkeys(name for name, _ in ratios))
    kinds = ["eager", "eager, dropout", "compiled", "compiled, dropout"]
    _, axes = plt.subplots(figsize=(7, 3.5))
    for number, kind in enumerate(kinds):
        axes.bar(
            [place + 0.2 * (number - 1.5) for place in range(len(models))],
            [ratios[model, kind] for model in models],
            0.19,
            label=f"Hugging Face {kind}",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), models)
    axes.set(ylabel="xlpre: times as fast as Hugging Face", xlabel="model (one core of an Intel Xeon, fp32)")
    axes.legend(frameon=False, fontsize=8)
    save(axes, "step_speed/ratios.png")


def draw_gpu_steps() -> None:
    """Draw the tokens per second of each contender on a GPU, relative to those of Hugging Face."""
    names = {
        "hf": "Hugging Face",
        "hf-compile": "Hugging Face, compiled",
        "xlpre:sdpa": "sdpa",
        "xlpre:triton": "triton",
        "xlpre:triton:layers": "triton, compiled",
        "xlpre:triton:graphs": "triton, CUDA graphs",
        "xlpre:triton:layers+graphs": "triton, compiled, CUDA graphs",
    }
    speeds: dict[tuple[str, str], float] = {}
    for line in read_lines("gpu/steps.jsonl"):
        if "impl" in line:
            config = line["config"]
            model = {24: "Large", 12: "Base"}.get(
                config["n_layer"], f"{config['n_layer']} layers, d {config['d_model']}"
            )
            speeds[f"{model}\n{config['rows']} rows", line["impl"]] = line["tokens_per_second"]
    models = sorted({model for model, _ in speeds})
    _, axes = plt.subplots(figsize=(8, 3.8))
    for number, (impl, label) in enumerate(names.items()):
        places = [place for place, model in enumerate(models) if (model, impl) in speeds]
        ratios = [speeds[models[place], impl] / speeds[models[place], "hf"] for place in places]
        axes.bar([place + 0.12 * (number - 3) for place in places], ratios, 0.11, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), models)
    axes.set(ylabel="tokens per second on an H200,\nHugging Face = 1")
    axes.legend(frameon=False, fontsize=8)
    save(axes, "gpu/tokens_per_second.png")


def draw_gpu_pretraining() -> None:
    """Draw the losses of the causal model trained on a GPU, and the val loss of the one trained on a CPU with the same text."""
    lines = read_lines("gpu_pretraining/causal.jsonl")
    on_gpu = [(line["tokens"], line["val_loss"]) for line in lines if "val_loss" in line]
    training = [(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    name = "causal, 4 layers of width 256, 20 million words"
    on_cpu = [(row["tokens"], row["val_loss"]) for row in read("one_hour/results.csv") if row["run"] == name]
    _, axes = plt.subplots(figsize=(7, 4))
    for label, points in (
        ("validation: 12 layers of width 384, 8 minutes on an H200", on_gpu),
        ("validation: 4 layers of width 256, 2 hours on two CPU cores", on_cpu),
        ("training (with dropout): 12 layers of width 384", training),
    ):
        tokens, losses = zip(*((float(n) / 1e6, float(loss)) for n, loss in points if float(n)), strict=True)
        axes.plot(tokens, losses, "o-" if points is not training else "-", markersize=3, label=label)
    axes.set(xlabel="window tokens (millions)", ylabel="loss (nats)", ylim=(None, 5))
    axes.legend(frameon=False, fontsize=8)
    save(axes, "gpu_pretraining/curves.png")


def draw_preparation_memory() -> None:
    """Draw the peak memory of preparing a token store against the amount of text."""
    lines = [line for line in read_lines("data_path/results.jsonl") if line.get("what") == "preparing"]
    _, axes = plt.subplots(figsize=(6, 3.5))
    sizes = [line["text_mb"] for line in lines]
    axes.plot(sizes, [line["peak_mb"] for line in lines], "o-", label="main process")
    axes.plot(sizes, [line["peak_mb_of_a_worker"] for line in lines], "s--", label="largest worker")
    axes.set(xlabel="text (MB)", ylabel="peak resident memory (MB)", ylim=(0, None))
    axes.legend(frameon=False)
    save(axes, "data_path/memory.png")


def draw_cached_evaluation() -> None:
    """Draw the speed-up of cached evaluation and the ratio of FLOPs against the attention length."""
    lines = [line for line in read_lines("cached_evaluation/results.jsonl") if line.get("tree") == "43ab10f"]
    lines = [line for line in lines if line["settings"]["rows"] == 1]
    _, axes = plt.subplots(figsize=(6, 3.5))
    lengths = [line["attention_length"] for line in lines]
    axes.plot(lengths, [line["times_as_fast"] for line in lines], "o-", label="measured")
    axes.plot(lengths, [line["flop_ratio"] for line in lines], "--", color="gray", label="ratio of FLOPs")
    axes.set(xlabel="attention length (tokens)", ylabel="times as fast as a sliding window")
    axes.legend(frameon=False)
    save(axes, "cached_evaluation/speed.png")


def draw_pairs_by_objective() -> None:
    """Draw the accuracy on minimal pairs of each objective against tokens, at the end of a run (points) and during one (line)."""
    rows = [
        row for row in read("minimal_pairs/objectives.csv") if row["mode"] in ("pll", "causal") and not row["prefix"]
    ]
    _, axes = plt.subplots(figsize=(6.5, 3.8))
    for number, objective in enumerate(("causal", "permutation", "denoising")):
        of_objective = [
            (float(row["tokens"]) / 1e6, float(row["accuracy"]), row["when"])
            for row in rows
            if row["objective"] == objective
        ]
        for when, style in (("end", "o"), ("during", "-")):
            points = [(tokens, accuracy) for tokens, accuracy, moment in of_objective if moment == when]
            if points:
                label = objective if when == "end" else f"{objective}, during the hour"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label, linewidth=1)
    axes.axhline(50, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="window tokens (millions)", ylabel="accuracy on BLiMP (%)")
    axes.set_xticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    save(axes, "minimal_pairs/objectives.png")


def draw_contexts() -> None:
    """Draw the accuracy in two groups of paradigms against the text that is read before each sentence, for each model."""
    groups = {"agreement": "10 paradigms of agreement", "other": "35 paradigms (see the table)"}
    contexts = {"none": "none", ".": "a period", "sentence": "a sentence", "paragraph": "a paragraph"}
    _, all_axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
    for axes, (group, title) in zip(all_axes, groups.items(), strict=True):
        models = defaultdict(dict)
        for row in read("minimal_pairs/context.csv"):
            models[row["model"]][row["context"]] = float(row[group])
        for model, accuracies in models.items():
            points = [(contexts[name], accuracies[name]) for name in contexts if name in accuracies]
            axes.plot(*zip(*points, strict=True), "o-", label=model)
        axes.set(title=title, xlabel="text before the sentence", ylabel="accuracy (%)")
        axes.grid(axis="y", alpha=0.3)
    all_axes[0].spines[["top", "right"]].set_visible(False)
    all_axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(all_axes[1], "minimal_pairs/context.png")


def draw_memory_curves() -> None:
    """Draw how much the loss falls with the length of memory, for each model and text."""
    curves = defaultdict(dict)
    for line in read_lines("evaluation/results.jsonl"):
        if line["mode"] in ("causal", "objective"):
            curves[line["model"].removeprefix("runs/"), line["text"][0]][line["mem_len"]] = line["loss"]
    _, axes = plt.subplots(figsize=(6.5, 3.6))
    for (model, text), losses in curves.items():
        style = "o-" if text.startswith("stores") else "s--"
        color = f"C{('causal', 'permutation', 'denoising').index(model)}"
        label = f"{model}, {'Wikipedia' if text.startswith('stores') else 'WikiText-2'}"
        gains = [losses[0] - losses[length] for length in sorted(losses)]
        axes.plot([f"{length}" for length in sorted(losses)], gains, style, color=color, label=label)
    axes.set(xlabel="memory (tokens)", ylabel="loss without memory minus loss (nats)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(axes, "evaluation/memory.png")


def draw_minimal_pairs() -> None:
    """Draw the mean accuracy over paradigms of each model and mode, and those of published models."""
    accuracies = defaultdict(list)
    for row in read("minimal_pairs/results.csv"):
        orders = f", {row['orders']} orders" if row["mode"] == "any-order" else ""
        name = f"{row['model']}: {row['mode']}{orders}".replace(", 1 orders", ", left to right")
        accuracies[name].append(float(row["accuracy"]))
    published = {"5-gram": 60.7, "LSTM": 67.1, "Transformer-XL, WikiText-103": 66.7, "GPT-2": 80.7}
    bars = {name: sum(values) / len(values) for name, values in accuracies.items()} | published
    _, axes = plt.subplots(figsize=(7, 0.34 * len(bars) + 1))
    colors = ["C0"] * len(accuracies) + ["0.7"] * len(published)
    axes.barh(range(len(bars)), list(bars.values()), color=colors, height=0.7)
    axes.axvline(50, color="0.3", linewidth=1)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set(xlabel="accuracy on 46 paradigms of BLiMP (%); chance is 50; published models in grey", xlim=(40, 85))
    save(axes, "minimal_pairs/accuracy.png")


def draw_enwik8() -> None:
    """Draw bits per character against the length of memory, with the other models and the compressors as lines."""
    curves = defaultdict(dict)
    for line in read_lines("transformer-xl/results.jsonl"):
        curves[line["model"].removeprefix("runs/")][line["mem_len"]] = line["bits_per_byte"]
    memory = curves.pop("memory")
    lines = {name.replace("_", " "): next(iter(values.values())) for name, values in curves.items()}
    compressors = {
        row["compressor"]: float(row["bits_per_character"]) for row in read("transformer-xl/compressors.csv")
    }
    _, axes = plt.subplots(figsize=(6.5, 4))
    lengths = sorted(memory)
    axes.plot([f"{length}" for length in lengths], [memory[length] for length in lengths], "o-", label="with memory")
    for number, (name, value) in enumerate(lines.items(), 1):
        axes.axhline(value, color=f"C{number}", label=name)
    for number, (name, value) in enumerate(compressors.items()):
        axes.axhline(value, color="0.6", linestyle=("--", ":", "-.", (0, (1, 3)))[number], label=name)
    axes.set(xlabel="memory at evaluation (bytes)", ylabel="bits per byte of the test text")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(axes, "transformer-xl/memory.png")


def draw_quickstart() -> None:
    """Draw training and validation loss of the quickstart."""
    lines = read_lines("quickstart/results.jsonl")
    train = [(line["tokens"] / 1e6, line["loss"]) for line in lines if "loss" in line]
    measured = [line for line in lines if "val_loss" in line]
    _, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(*zip(*train, strict=True), label="training loss", linewidth=1)
    axes.plot([x["tokens"] / 1e6 for x in measured], [x["val_loss"] for x in measured], "o-", label="val loss")
    axes.axhline(measured[-1]["val_unigram_loss"], color="gray", linestyle="--", label="unigram baseline")
    axes.set(xlabel="window tokens (millions)", ylabel="loss (nats)", ylim=(None, 8))
    axes.legend(frameon=False)
    save(axes, "quickstart/loss.png")


def main() -> None:
    """Draw all figures that are not written by a benchmark."""
    draw_quickstart()
    draw_minimal_pairs()
    draw_contexts()
    draw_memory_curves()
    draw_enwik8()
    draw_losses("text_amount", ["6.1 M tokens", "11.3 M tokens", "24.0 M tokens"], top=6)
    rows = ["published", "local", "init_std_0.05", "no_memory", "one_local", "bias_std_1", "output_bias", "lr_3e-4"]
    draw_losses("initialization", rows, top=7)
    draw_losses("ablations", ["base", "no_memory", "no_spans", "k_3", "next_sentence"], top=5.6)
    draw_losses(
        "one_hour",
        [
            "4 layers of width 192",
            "6 layers of width 256",
            "4 layers of width 192, 20 million words",
            "causal, 4 layers of width 256, 20 million words",
            "causal, width 256, continued to 4.15 hours",
            "causal, 8 layers of width 256, 20 million words",
        ],
        top=5.2,
    )
    draw_losses("optimizers", ["adamw", "adamw_lr_2e-3", "muon", "muon_all_4e-3"], top=7)
    rows = {
        "muon_16_no_memory": "Muon, 16 rows, no memory",
        "muon_16": "Muon, 16 rows",
        "muon_16_lower_rates": "Muon, 16 rows, two thirds of the learning rates",
        "muon_16_qk_norm": "Muon, 16 rows, query-key norm",
        "muon_16_pre_norm": "Muon, 16 rows, pre-norm",
        "muon_16_geglu": "Muon, 16 rows, gated feed-forward",
        "muon": "Muon, 8 rows",
        "muon_32": "Muon, 32 rows",
        "geglu": "base, gated feed-forward",
        "muon_16_lr": "Muon, 16 rows, twice the learning rates",
        "base": "base: AdamW, 8 rows",
        "pre_norm": "base, pre-norm",
        "muon_16_large": "Muon, 16 rows, 6 layers of width 256",
    }
    draw_final_losses("ten_million_words", rows, "val_loss", "val loss (nats)", "losses.png")
    rows = {
        "width_192": "width 192",
        "k_2": "K = 2",
        "k_1.5": "K = 1.5",
        "base": "base",
        "rows_4": "4 rows",
        "lr_5e-4": "learning rate 5e-4",
        "lr_2e-3": "learning rate 2e-3",
    }
    draw_final_losses("small_budgets", rows, "val_loss", "val loss (nats)", "losses.png")
    sizes = {"v_2000": "2,000", "v_4000": "4,000", "v_8000": "8,000", "v_16000": "16,000"}
    draw_final_losses("vocabulary", sizes, "val_bpb", "bits per byte", "bits_per_byte.png")
    tasks = {
        "glue/sst-2": "SST-2\naccuracy",
        "glue/cola": "CoLA\nMatthews",
        "glue/mrpc": "MRPC\naccuracy",
        "glue/qnli": "QNLI\naccuracy",
        "squad/1.1": "SQuAD 1.1\nF1",
        "race/middle": "RACE-middle\naccuracy",
    }
    draw_scores("task_gains", ["6.1 M tokens", "24.0 M tokens", "from scratch"], tasks)
    draw_scores("objectives", ["permutation", "denoising", "from scratch"], dict(list(tasks.items())[:5]))
    draw_pairs_by_objective()
    draw_step_speed()
    draw_gpu_steps()
    draw_gpu_pretraining()
    draw_cached_evaluation()
    draw_preparation_memory()


if __name__ == "__main__":
    main()
