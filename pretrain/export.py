"""Export the model of a run, or convert a model folder.

The source is a run folder (finished or not: the latest checkpoint is exported), a model folder of xlpre, of Hugging Face's XLNet, or of the
original TensorFlow release, or the model.pt of a Transformer-XL (nothing in the pickle is executed). With --hf,
`XLNetLMHeadModel`, `AutoModelForMaskedLM` and `AutoTokenizer` open the result. With --tf, the original TensorFlow code can train it
further. The model card, README.md, describes the training as the run recorded it.

Examples:
  python pretrain/export.py runs/quickstart exported/quickstart
  python pretrain/export.py runs/quickstart exported/quickstart_hf --hf
  python pretrain/export.py runs/quickstart exported/quickstart_hub --hf --push me/my-xlnet
  python pretrain/export.py downloads/xlnet_cased_L-12_H-768_A-12 exported/xlnet_base
  python pretrain/export.py downloads/LM-TFM-enwik8/model.pt exported/transformer_xl

See docs/python.md for using a model folder, and docs/parity.md for what converts exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.config.cli import CommandParser, add_push_option
from xlpre.text.preprocess import Preprocess

DESCRIPTIONS = {"native": "", "hf": " for Hugging Face's transformers", "tf": " for the original's TensorFlow code"}


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    text = "run folder, such as runs/quickstart, model folder, or model.pt"
    parser.add_argument("source", metavar="SOURCE", type=Path, help=text)
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write; it must not exist")
    formats = parser.add_mutually_exclusive_group()
    formats.set_defaults(format="native")
    for name in ("hf", "tf"):
        text = f"write the model{DESCRIPTIONS[name]}"
        formats.add_argument(f"--{name}", dest="format", action="store_const", const=name, help=text)
    text = "preprocessing of the training text, if the source has no provenance.json (default: cased, as published)"
    parser.add_argument("--preprocess", choices=get_args(Preprocess), help=text)
    add_push_option(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    if args.target.exists():
        raise InputError(f"TARGET={args.target} is invalid: it exists already. Name a new folder.")

    from pretrain.tools.run_record import read_record
    from xlpre.conversion.hub_upload import check_repository, finish_export
    from xlpre.conversion.model_card import language_model_card, without_paths
    from xlpre.conversion.model_folder import load_folder, save_folder, save_huggingface, save_tensorflow
    from xlpre.text.load_tokenizer import parse_tokenizer

    if args.push:
        check_repository(args.push)
    folder = load_folder(args.source)
    if args.preprocess and folder.tokenizer:
        if folder.provenance and args.preprocess != folder.tokenizer.preprocess:
            raise InputError(
                f"--preprocess={args.preprocess} is invalid: {args.source} was trained with "
                f"tokenizer.preprocess={folder.tokenizer.preprocess}. Leave --preprocess out."
            )
        tokenizer = parse_tokenizer(folder.tokenizer.content, str(args.source), args.preprocess)
        folder = dataclasses.replace(folder, tokenizer=tokenizer)
    record = read_record(args.source, folder)
    card = language_model_card(folder, args.push or args.target.name, args.format, record)
    save = {"native": save_folder, "hf": save_huggingface, "tf": save_tensorflow}[args.format]
    save(args.target, without_paths(folder), card.render())
    step = f" at step {folder.provenance['step']:,}" if "step" in folder.provenance else ""
    if folder.tokenizer and not folder.provenance and not args.preprocess:
        print(
            f"{args.source} has no provenance.json: preprocessing is assumed to be {folder.tokenizer.preprocess}; set --preprocess to "
            "change it"
        )
    if folder.next_sentence and args.format != "native":
        print(f"note: this format has no head for next-sentence prediction; {args.target} does not contain it")
    if folder.tokenizer is None:
        print(
            f"{args.source} has no vocabulary: the folder holds weights for token ids, and commands that read text refuse it"
        )
    print(f"{args.source}{step}: written to {args.target}{DESCRIPTIONS[args.format]}")
    finish_export(args.source, args.target, args.push)


if __name__ == "__main__":
    run_main(main)
