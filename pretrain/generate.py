"""Continue a text with a pretrained causal or permutation model.

The text is printed as it is generated, after the prompt. Without a prompt, a new document starts. A text ends at the
end of its document, at a stop string, or after --max-new-tokens.

Examples:
  python pretrain/generate.py runs/mine "The history of the town"
  python pretrain/generate.py runs/mine --num-samples 3 --max-new-tokens 200 --seed 7
  python pretrain/generate.py runs/mine - --temperature 0 --stop . < prompt.txt

See docs/generation.md for the settings and for what short prompts do, and docs/python.md for the same from Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.config.cli import CommandParser


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="run folder, such as runs/quickstart, or model folder")
    text = "text to continue; - reads it from standard input (default: the start of a document)"
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="", help=text)
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=100, help="tokens to generate (default: 100)"
    )
    text = "below 1, likely tokens become likelier; 0: always the most likely token (default: 1)"
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help=text)
    text = "choose among the K most likely tokens (default: all)"
    parser.add_argument("--top-k", metavar="K", type=int, help=text)
    text = "choose among the fewest tokens whose probabilities sum to P (default: 0.95)"
    parser.add_argument("--top-p", metavar="P", type=float, default=0.95, help=text)
    text = "above 1, tokens of the text so far become less likely (default: 1)"
    parser.add_argument("--repetition-penalty", metavar="X", type=float, default=1.0, help=text)
    parser.add_argument("--num-samples", metavar="N", type=int, default=1, help="number of texts (default: 1)")
    text = "end the text before this string; may be repeated"
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help=text)
    text = "tokens before the next one that the model sees (default: see docs/generation.md)"
    parser.add_argument("--mem-len", metavar="N", type=int, help=text)
    text = "permutation models: read the text again after every N tokens; more is faster (default: 32)"
    parser.add_argument("--free-len", metavar="N", type=int, default=32, help=text)
    text = "text of another document to read before the prompt, which helps permutation models with short prompts"
    parser.add_argument("--padding", metavar="TEXT", default="", help=text)
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="seed of the samples (default: 1)")
    parser.add_device_option()
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)

    from xlpre import load
    from xlpre.common.messages import counted
    from xlpre.inference.generation import GenerationConfig, check_objective, encode_prompt
    from xlpre.text.special_tokens import UNK

    settings = vars(args).copy()
    origin, prompt, device = (settings.pop(name) for name in ("model", "prompt", "device"))
    GenerationConfig(**settings)  # checks the settings before the model is read
    lm = load(origin, device)
    check_objective(lm.objective)
    text = _read_stdin() if prompt == "-" else prompt
    if n_unknown := int((encode_prompt(lm.tokenizer, text) == UNK).sum()):
        verb = "is" if n_unknown == 1 else "are"
        lacking = "words" if lm.tokenizer.kind == "words" else "characters"
        note = f"note: {counted(n_unknown, 'token')} of the prompt {verb} <unk>: the vocabulary lacks {lacking}"
        print(note, file=sys.stderr, flush=True)
    if args.num_samples == 1:
        print(text, end="", flush=True)
        lm.generate([text], on_text=lambda _, part: print(part, end="", flush=True), **settings)
        print()
        return
    for number, continuation in enumerate(lm.generate([text], **settings), 1):
        print(f"--- {number} of {args.num_samples}\n{text}{continuation.text}")


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"PROMPT=- is invalid: standard input is not {error.encoding}. Convert it first.") from None


if __name__ == "__main__":
    run_main(main)
