"""Write the model of a run as a folder that travels.

python pretrain/export.py runs/quickstart exported/quickstart
python pretrain/export.py runs/quickstart exported/quickstart_hf --hf
python pretrain/export.py runs/quickstart exported/quickstart_tf --tf
python pretrain/export.py downloads/xlnet_cased_L-12_H-768_A-12 exported/xlnet_base

The source is a run folder, finished or not (its newest checkpoint is meant), or a folder of a model: ours, of Hugging Face's XLNet, or
of the original TensorFlow release. With --hf, `XLNetLMHeadModel.from_pretrained` and `AutoTokenizer.from_pretrained` open the result. With
--tf, it is laid out as that release is, and the original's code goes on from it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from xlpre.common.cli_main import run_main
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder, save_huggingface, save_tensorflow
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint

KINDS = {
    "ours": (save_folder, ""),
    "hf": (save_huggingface, " for Hugging Face's transformers"),
    "tf": (save_tensorflow, " for the original's TensorFlow code"),
}


def find_model(source: Path) -> ModelFolder:
    """The model of a run folder or a model folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder, checkpoints = source / "model", source / checkpoint.CHECKPOINTS_DIR
    if checkpoints.is_dir() and not folder.is_dir():
        saved = checkpoint.latest_valid(checkpoints)
        if saved is None:
            raise ValueError(f"{source}: the run has no whole checkpoint yet, and so no model")
        folder = saved / checkpoint.MODEL_DIR
    return load_folder(folder if folder.is_dir() else source)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run folder such as runs/quickstart, or a model's folder")
    parser.add_argument("target", type=Path, help="the folder to write; one that is there is never overwritten")
    kinds = parser.add_mutually_exclusive_group()
    kinds.set_defaults(kind="ours")
    kinds.add_argument("--hf", dest="kind", action="store_const", const="hf", help="for Hugging Face's transformers")
    kinds.add_argument("--tf", dest="kind", action="store_const", const="tf", help="for the original's TensorFlow code")
    parser.add_argument(
        "--preprocess",
        choices=get_args(Preprocess),
        help="what was done to the text, where the source has no passport to say it; else it is taken to be as published, cased",
    )
    words = parser.parse_args(argv)
    if words.target.exists():
        raise ValueError(f"{words.target} is there already; name a folder that is not")
    folder = find_model(words.source)
    if words.preprocess and folder.tokenizer:
        if folder.facts and words.preprocess != folder.tokenizer.preprocess:
            raise ValueError(
                f"{words.source} says that its text was {folder.tokenizer.preprocess}; leave --preprocess out"
            )
        tokenizer = Tokenizer(folder.tokenizer.model, str(words.source), words.preprocess)
        folder = dataclasses.replace(folder, tokenizer=tokenizer)
    save, reader = KINDS[words.kind]
    save(words.target, folder)
    step = f" at step {folder.facts['step']:,}" if "step" in folder.facts else ""
    if folder.tokenizer and not folder.facts and not words.preprocess:
        print(f"{words.source} does not say how its text was prepared: taken as cased; --preprocess says otherwise")
    print(f"{words.source}{step}: written to {words.target}{reader}")


if __name__ == "__main__":
    run_main(main)
