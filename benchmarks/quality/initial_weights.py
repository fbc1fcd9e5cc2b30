"""Model folders with starting values that no setting has, to begin a pretraining from with init_from=FOLDER.

python benchmarks/quality/initial_weights.py --config configs/pretrain/plateau.yaml --out runs/starts

    output_bias      the bias of the softmax is the logarithm of word frequencies: their loss is where it starts
    position_x8      the matrix of position keys eight times as large: position scores that are not flat, without a favourite
    bias_std_1       the bias of the position score normal with 1 in place of 0.02, as some implementations have it
    one_local        one head in four begins as model.init_scheme=local has it, the others as published
    mask_x8          the mask embedding, with which the query stream begins, eight times as large
    mask_0.02        the same with the standard deviation of all others
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.config import PretrainConfig
from pretrain.trainer.inputs import RunInputs
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.conversion.model_folder import ModelFolder, save_folder
from xlpre.model.language_model import LanguageModel
from xlpre.training.distributed import seed_everything

Weights = dict[str, Tensor]


def changes(frequencies: Tensor, local: Weights, n_head: int) -> dict[str, Callable[[str, Tensor], Tensor]]:
    """By the name of a start, what becomes of a parameter."""

    def one_local(name: str, value: Tensor) -> Tensor:
        if ".terms.position." not in name:
            return value
        width = value.size(0) // n_head if value.size(0) > n_head else 1  # rows of the matrix, or a row of the bias
        return torch.cat([local[name][:width], value[width:]])

    return {
        "output_bias": lambda name, value: frequencies.log() if name == "lm_head.bias" else value,
        "position_x8": lambda name, value: value * 8 if name.endswith("terms.position.key.weight") else value,
        "bias_std_1": lambda name, value: value * 50 if name.endswith("terms.position.r_bias") else value,
        "one_local": one_local,
        "mask_x8": lambda name, value: value * 8 if name.endswith("mask_embedding") else value,
        "mask_0.02": lambda name, value: value / value.std() * 0.02 if name.endswith("mask_embedding") else value,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--out", type=Path, required=True, help="where the folders go")
    parser.add_argument("words", nargs="*", metavar="key=value")
    said = parser.parse_intermixed_args(argv)
    config = load_config(PretrainConfig, said.config, said.words)
    foundation = RunInputs(config)

    def weights(init: str) -> Weights:
        seed_everything(config.seed)
        shape = dataclasses.replace(foundation.weight_init.shape, init_scheme=init)
        model = LanguageModel(shape, foundation.objective.two_streams)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    published, local = weights("published"), weights("local")
    counts = torch.tensor(foundation.store.unigram, dtype=torch.float32) + 1
    for start, change in changes(counts / counts.sum(), local, config.model.n_head).items():
        changed = {name: change(name, value.clone()) for name, value in published.items()}
        folder = said.out / start
        facts = {"name": start, "step": 0, "data_fingerprint": foundation.store.fingerprint}
        shape = foundation.weight_init.shape
        save_folder(folder, ModelFolder(shape, changed, foundation.tokenizer, config.objective.name, facts, "xlpre"))
        print(folder)


if __name__ == "__main__":
    run_main(main)
