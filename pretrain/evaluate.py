"""Measure how well a model predicts held-out text.

TEXT is a file (.txt, .jsonl, .parquet; also .gz, .zst), a quoted glob, a dataset hf:NAME[:SPLIT], or the folder of a token store, whose
validation part is read. The command prints the loss in nats per token, perplexity, bits per byte and per character, and perplexity per
word. The result depends neither on the batch size nor on the number of processes. Modes:

  causal     chain rule from left to right with memory, of causal models (their default)
  objective  the training objective on fixed targets, of permutation and denoising models (their default)
  any-order  chain rule in several factorization orders, document by document, of permutation models
  pll        pseudo-log-likelihood: each token, given all others, of permutation and denoising models; slow

Windows are those of the training run, or 512 tokens if MODEL does not belong to a run.

With --compare sliding, the command compares a causal model that reads with a cache with the same model that predicts each token from a
window of its own, as a model without recurrence must do: time per token, loss and ratio of FLOPs by attention length.

Examples:
  python pretrain/evaluate.py runs/mine stores/mine
  python pretrain/evaluate.py runs/mine 'books/*.txt.gz' --mem-len 0,64,128,256 --picture memory.png
  python pretrain/evaluate.py runs/causal stores/mine --compare sliding --lengths 128,256,512 --picture sliding.png
  torchrun --nproc_per_node 8 pretrain/evaluate.py runs/mine hf:Salesforce/wikitext/wikitext-2-raw-v1:test --row-type lines

See docs/evaluation.md for the meaning of the numbers, and docs/python.md for the same from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum, option_name
from xlpre.common.launcher import read_launcher
from xlpre.config.cli import CommandParser, check_output_files

if TYPE_CHECKING:
    import torch

    from pretrain.config import PretrainConfig
    from pretrain.tools.held_out import Job
    from xlpre.conversion.model_folder import ModelFolder
    from xlpre.data.window_layout import DataConfig
    from xlpre.inference.evaluation import EvalSettings, Evaluation, HeldOutText

MINIMUM = {"batch_size": 1, "processes": 1, "orders": 1, "seed": 0, "consistency": 0, "max_tokens": 1, "clamp_len": 1}
LENGTHS = "128,256,400,800"


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="run folder, such as runs/quickstart, or model folder")
    parser.add_argument("text", metavar="TEXT", nargs="+", help="files, globs, datasets, or one token store")
    parser.add_argument("--mode", choices=("causal", "objective", "any-order", "pll"), help="see above")
    text = "tokens of memory, one evaluation for each (default: as in the run)"
    parser.add_argument("--mem-len", metavar="N,N,...", help=text)
    text = "compare cached evaluation with a sliding window"
    parser.add_argument("--compare", choices=("sliding",), help=text)
    text = f"attention lengths of --compare (default: {LENGTHS})"
    parser.add_argument("--lengths", metavar="N,N,...", help=text)
    parser.add_argument("--seq-len", metavar="N", type=int, help="tokens of a window (default: as in the run)")
    text = "longest distance between tokens, see model.clamp_len (default: that of the model)"
    parser.add_argument("--clamp-len", metavar="N", type=int, help=text)
    spans = ("all", "same_length", "exclude_self_slot")
    text = "see model.attention_span (default: that of the model)"
    parser.add_argument("--attention-span", choices=spans, help=text)
    parser.add_argument("--orders", metavar="N", type=int, default=4, help="orders of any-order (default: 4)")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="seed of the random orders (default: 1)")
    text = "sentences that measure the spread over orders of permutation models (default: 200; 0: none)"
    parser.add_argument("--consistency", metavar="N", type=int, default=200, help=text)
    text = "stop after the first document with which the text has N tokens"
    parser.add_argument("--max-tokens", metavar="N", type=int, help=text)
    parser.add_argument("--column", metavar="NAME", help="see text.column (default: as in the run)")
    rows, lines = ("documents", "lines"), ("paragraphs", "sentences", "verbatim")
    parser.add_argument("--row-type", choices=rows, help="see text.row_type (default: as in the run)")
    parser.add_argument("--line-type", choices=lines, help="see text.line_type (default: as in the run)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="rows of a batch (default: 8)")
    parser.add_argument("--processes", metavar="N", type=int, default=1, help="processes on the CPU (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write JSON lines, one per memory length")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="plot the loss against the memory length (.png, .svg, .pdf)"
    )
    parser.add_device_option()
    return parser


def check_options(args: argparse.Namespace) -> list[int] | None:
    """Raise InputError if an option is out of range. Return the memory lengths."""
    for name, minimum in MINIMUM.items():
        check_minimum(option_name(name), getattr(args, name), minimum)
    check_output_files(args.out, args.picture)
    if args.lengths and not args.compare:
        raise InputError(
            f"--lengths={args.lengths} is invalid without --compare. Add --compare sliding, or set --mem-len."
        )
    if args.compare and args.mem_len:
        raise InputError(f"--mem-len={args.mem_len} is invalid with --compare. Set --lengths.")
    if args.compare and args.attention_span:
        raise InputError(
            f"--attention-span={args.attention_span} is invalid with --compare, which limits the span to each length. Leave it out."
        )
    if args.compare and args.mode:
        raise InputError(
            f"--mode={args.mode} is invalid with --compare, which predicts from left to right. Leave it out."
        )
    return None if args.mem_len is None else parse_lengths("--mem-len", args.mem_len)


def parse_lengths(option: str, value: str) -> list[int]:
    """Return the numbers of an option. Raise InputError if they are not different numbers."""
    lengths = value.split(",")
    if not all(length.isdecimal() for length in lengths) or len({*map(int, lengths)}) < len(lengths):
        raise InputError(
            f"{option}={value} is invalid: it must be different numbers of tokens, separated by commas, such as 0,64,128."
        )
    return [int(length) for length in lengths]


def write_results(args: argparse.Namespace, record: dict[str, Any], results: Sequence[Any], table: str) -> None:
    """Write JSON lines to --out, and print a table, or JSON lines with --json.

    Args:
        args: options.
        record: values of every line.
        results: objects with `to_json`, one per line.
        table: the table.
    """
    from xlpre.common.files import write_text
    from xlpre.common.tables import print_json, to_jsonl

    records = [{**record, **result.to_json()} for result in results]
    if args.out:
        write_text(args.out, to_jsonl(records))
    if not args.json:
        print(table)
        return
    for line in records:
        print_json(line)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    read_launcher()
    args = build_parser().parse(argv)
    mem_lens = check_options(args)

    from pretrain.tools.held_out import (
        Job,
        describe_text,
        draw_memory_curve,
        open_model,
        read_run_config,
        read_text,
        text_config,
        to_rows,
    )
    from xlpre.common.tables import to_text
    from xlpre.inference.evaluation import eval_windows
    from xlpre.training.distributed import is_rank_zero

    device = _select_device(args)
    overrides = {name: value for name in ("clamp_len", "attention_span") if (value := getattr(args, name)) is not None}
    folder, config = open_model(args.model, overrides), read_run_config(args.model)
    data = eval_windows(config.data, folder.objective, config.data.seq_len if args.seq_len is None else args.seq_len)
    source = text_config(config, args.column, args.row_type, args.line_type)
    text = read_text(args.text, folder.require_tokenizer(args.model), args.model, source, args.max_tokens)
    record = {"model": args.model, "text": args.text, "objective": folder.objective, **overrides}
    if args.compare:
        _compare(args, folder, text, data.seq_len, device, record)
        return
    settings = eval_settings(args, mem_lens, folder, config, data)
    evaluations = _run_job(Job(args.model, overrides, text, settings, str(device)), device, args.processes)
    if not is_rank_zero():
        return
    values, spread = _order_spread(args, folder, text, data.seq_len, device)
    mode = settings[0].mode
    if args.picture:
        draw_memory_curve(evaluations, args.picture, f"{args.model}, {mode}")
    heading = (
        f"{args.model} on {' '.join(args.text)}: {describe_text(text)}\nmode {mode}, windows of {data.seq_len} tokens"
    )
    write_results(args, record | values, evaluations, f"{heading}\n\n{to_text(to_rows(evaluations))}{spread}")


def _select_device(args: argparse.Namespace) -> torch.device:
    """Return the device of this process. Raise InputError if it does not fit the number of processes."""
    from xlpre.training.distributed import device_type, select_device, use_device, world_size

    is_job, selected = world_size() > 1, select_device(args.device)
    if is_job and selected.type != device_type():
        raise InputError(
            f"--device={args.device} is invalid with several processes: each one uses a GPU if there are any. Leave it out, or set "
            "CUDA_VISIBLE_DEVICES= to hide GPUs."
        )
    if args.compare and (is_job or args.processes > 1):
        raise InputError(
            "--compare=sliding is invalid with several processes: it measures one. Start it in one process."
        )
    device = use_device() if is_job else selected
    if args.processes > 1 and (is_job or device.type == "cuda"):
        raise InputError(
            f"--processes={args.processes} is invalid: it starts processes on the CPU of one machine. Leave it out. "
            "`torchrun --nproc_per_node N` starts a process per GPU."
        )
    return device


def _compare(
    args: argparse.Namespace,
    folder: ModelFolder,
    text: HeldOutText,
    seq_len: int,
    device: torch.device,
    record: dict[str, Any],
) -> None:
    """Compare cached evaluation with a sliding window."""
    from pretrain.tools.sliding_comparison import compare_sliding, comparison_rows, draw_comparisons
    from xlpre.common.progress_bar import ProgressBar
    from xlpre.common.tables import to_text

    lengths = parse_lengths("--lengths", args.lengths or LENGTHS)
    with ProgressBar(None, "turn") as progress:
        comparisons = compare_sliding(folder, text.data.tokens, lengths, seq_len, device, progress.report)
    if args.picture:
        draw_comparisons(comparisons, args.picture, f"{args.model}, cached evaluation and sliding window")
    heading = f"{args.model} on {' '.join(args.text)}: {comparisons[0].n_compared} tokens predicted in both ways"
    write_results(args, record, comparisons, f"{heading}\n\n{to_text(comparison_rows(comparisons))}")


def eval_settings(
    args: argparse.Namespace, mem_lens: list[int] | None, folder: ModelFolder, config: PretrainConfig, data: DataConfig
) -> list[EvalSettings]:
    """Return the settings of the evaluation with each length of memory."""
    from xlpre.inference.evaluation import EvalSettings
    from xlpre.inference.modes import EVAL_MODES, resolve_mode

    default_mem_len = folder.config.mem_len if config.eval.mem_len is None else config.eval.mem_len
    return [
        EvalSettings(
            mode=resolve_mode(args.mode, folder.objective, EVAL_MODES),
            data=data,
            mem_len=mem_len,
            at_document_end=config.memory.at_document_end,
            partial_k=config.eval.partial_k or config.objective.partial_k,
            perm_size=config.objective.perm_size,
            n_orders=args.orders,
            seed=args.seed,
            batch_size=args.batch_size,
        )
        for mem_len in mem_lens or [default_mem_len]
    ]


def _run_job(job: Job, device: torch.device, n_processes: int) -> list[Evaluation]:
    """Run the evaluations in this process, in the processes of a launcher, or in `n_processes` processes on the CPU."""
    import torch

    from pretrain.tools.held_out import run_evaluations, run_in_job
    from xlpre.common.progress_bar import ProgressBar
    from xlpre.training.distributed import Comm, destroy_process_group, is_rank_zero, world_size

    with ProgressBar(None, "unit", is_rank_zero()) as progress:
        if world_size() == 1:
            return run_evaluations(job, n_processes, progress.report)
        # processes with short documents wait for those with long ones; the launcher notices one that has died
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
        comm = Comm()
        if device.type == "cpu":
            comm.divide_cores()
        evaluations = run_in_job(job, comm, progress.report)
        destroy_process_group()
        return evaluations


def _order_spread(
    args: argparse.Namespace, folder: ModelFolder, text: HeldOutText, seq_len: int, device: torch.device
) -> tuple[dict[str, Any], str]:
    """Measure the spread of log-likelihoods over orders. Return it as values of a JSON line and as text; nothing for other objectives."""
    from xlpre.inference.evaluation import sample_sentences
    from xlpre.inference.scoring import order_consistency
    from xlpre.text.special_tokens import N_SYMBOLS

    max_len = seq_len - N_SYMBOLS
    sentences = sample_sentences(text.data, args.consistency, max_len)
    if folder.objective != "permutation" or not sentences:
        return {}, ""
    model, tokenizer = folder.model().to(device), folder.require_tokenizer(args.model)
    result = order_consistency(model, tokenizer, sentences, max(args.orders, 2), seed=args.seed, window=max_len)
    return {"order_std": result.std_per_token, "order_n_sentences": len(sentences)}, (
        f"\norder consistency: the log-likelihood of {len(sentences)} sentences differs by {result.std_per_token:.4f} nats per "
        f"token between {result.n_orders} orders (mean {result.log_likelihood_per_token:.4f})"
    )


if __name__ == "__main__":
    run_main(main)
