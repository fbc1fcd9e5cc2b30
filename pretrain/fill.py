"""Fill in the blanks of texts with a pretrained model.

A blank is written as ____ (three or more underscores) and stands for one piece of the vocabulary. ____{3} stands for three pieces, and
____{1,4} for one to four. All blanks of a text are filled in jointly, by beam search: each piece is predicted from the text and the pieces
before it in the order. A single piece is shown with its probability. Several pieces are shown as a table, log-probabilities in nats:

  log-probability  joint log-probability of all pieces
  per piece        the same, divided by the number of pieces; candidates of different lengths are compared by it
  independent      sum of the log-probabilities of the pieces if no piece sees another

In a denoising model, a missing piece is <mask>. Its targets were independent in training, so the joint is a pseudo-joint.

Examples:
  python pretrain/fill.py runs/quickstart "Returns the ____ of the list."
  python pretrain/fill.py runs/quickstart "If ____ is given, it must be a ____." "Returns the ____{1,3} of the list."
  python pretrain/fill.py runs/quickstart "Returns the ____ of the list." --options "length,first element,sum"
  python pretrain/fill.py runs/quickstart "The ____{2} of the list." --num-samples 10 --temperature 0.7 --order random

See docs/scoring.md, and docs/python.md for the same from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum, option_name
from xlpre.config.cli import CommandParser
from xlpre.text.blanks import BLANK

# options that have an effect in each mode
OPTIONS = {
    "search": {"top", "order", "beam", "length_penalty", "seed"},
    "--independent": {"top"},
    "--options": {"top", "order", "seed"},
    "--num-samples": {"order", "temperature", "seed"},
}


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="run folder, such as runs/quickstart, or model folder")
    parser.add_argument(
        "text", metavar="TEXT", nargs="+", help=f"text in quotes, with {BLANK} in place of missing words"
    )
    text = "order in which pieces are filled in: left-to-right, confident (the surest first) or random (default: left-to-right)"
    parser.add_argument("--order", choices=("left-to-right", "confident", "random"), help=text)
    text = "candidates to print (default: 5; with --options: all)"
    parser.add_argument("--top", metavar="N", type=int, help=text)
    parser.add_argument("--beam", metavar="N", type=int, help="width of the beam search (default: 20)")
    text = "exponent of the number of pieces that divides the log-probability to compare lengths (default: 1); 0 favors short candidates"
    parser.add_argument("--length-penalty", metavar="X", type=float, help=text)
    text = "print N samples in place of the most likely candidates"
    parser.add_argument("--num-samples", metavar="N", type=int, help=text)
    text = "temperature of sampling (default: 1)"
    parser.add_argument("--temperature", metavar="X", type=float, help=text)
    parser.add_argument("--seed", metavar="N", type=int, help="seed of samples and random order (default: 1)")
    text = "rank these answers; give the option once for each blank"
    parser.add_argument("--options", metavar="A,B,...", action="append", help=text)
    text = "predict each piece from the text only, and print the most likely ones of each"
    parser.add_argument("--independent", action="store_true", help=text)
    parser.add_device_option()
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError if options contradict each other or are out of range."""
    for name in ("top", "beam", "num_samples"):
        check_minimum(option_name(name), getattr(args, name), 1, "Correct it or leave it out.")
    check_minimum("--seed", args.seed, 0, "Correct it or leave it out.")
    modes = {"--independent": args.independent, "--options": args.options, "--num-samples": args.num_samples}
    if len(given := [name for name, value in modes.items() if value]) > 1:
        raise InputError(f"{given[1]} is invalid with {given[0]}. Leave one of them out.")
    mode = given[0] if given else "search"
    for name in ("top", "order", "beam", "length_penalty", "temperature", "seed"):
        if (value := getattr(args, name)) is not None and name not in OPTIONS[mode]:
            where = f"with {mode}" if given else "without --num-samples"
            raise InputError(f"{option_name(name)}={value} is invalid {where}: it has no effect. Leave it out.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    check_options(args)

    from xlpre import load
    from xlpre.common.messages import counted
    from xlpre.inference.cloze import TOP_K, encode_cloze, format_result
    from xlpre.inference.filling import BEAM, format_fillings, format_pieces

    lm = load(args.model, args.device)
    top = args.top or TOP_K
    names = ("order", "length_penalty", "num_samples", "temperature", "seed")
    settings = {name: value for name in names if (value := getattr(args, name)) is not None}
    settings["beam"] = max(args.beam or BEAM, top)
    options = [each.split(",") for each in args.options] if args.options else None
    for text in args.text:
        cloze = encode_cloze(text, lm.tokenizer)
        if args.independent:
            print(format_result(lm.predict_blanks(text, top)))
        else:
            (fillings,) = lm.fill([text], options=options, **settings)
            if args.num_samples:
                print(format_fillings(text, fillings))
            elif options:
                print(format_fillings(text, fillings[: args.top]))
            elif any(filling.n_pieces > 1 for filling in fillings):
                print(format_fillings(text, fillings[:top]))
            else:
                print(format_pieces(text, fillings[:top], lm.tokenizer))
        if cloze.n_unknown:
            verb = "is" if cloze.n_unknown == 1 else "are"
            print(
                f"    note: {counted(cloze.n_unknown, 'token')} of the text {verb} <unk>: the vocabulary lacks characters"
            )


if __name__ == "__main__":
    run_main(main)
