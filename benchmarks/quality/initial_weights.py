"""Write model folders with initial weights that no setting creates. Pretraining with init_from=FOLDER starts from them.

python benchmarks/quality/initial_weights.py --config configs/pretrain/unigram_plateau.yaml --out runs/starts

Writes one folder for each variant:

    output_bias      output bias set to the log unigram frequencies, so that training starts at the unigram loss
    position_x8      position key projection multiplied by 8, so that position scores vary but prefer no distance
    bias_std_1       position bias with standard deviation 1 instead of 0.02, as in some implementations
    one_local        the first head of each layer as with model.init_scheme=local, the other heads as published
    mask_x8          mask embedding (the initial query stream) multiplied by 8
    mask_0.02        mask embedding with the standard deviation of all other weights
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

Weights = dict[str, Tensor]


def make_changes(frequencies: Tensor, local: Weights, n_head: int) -> dict[str, Callable[[str, Tensor], Tensor]]:
    """Return, for each variant, the function that changes its weights. Its arguments are a parameter's name and published value.

    Args:
        frequencies: (V,) relative token frequencies.
        local: weights with model.init_scheme=local.
        n_head: number of heads.
    """

    def one_local(name: str, value: Tensor) -> Tensor:
        if ".terms.position." not in name:
            return value
        n_rows = (
            value.size(0) // n_head if value.size(0) > n_head else 1
        )  # rows of one head, in the matrix or in the bias
        return torch.cat([local[name][:n_rows], value[n_rows:]])

    return {
        "output_bias": lambda name, value: frequencies.log() if name == "lm_head.bias" else value,
        "position_x8": lambda name, value: value * 8 if name.endswith("terms.position.key.weight") else value,
        "bias_std_1": lambda name, value: value * 50 if name.endswith("terms.position.r_bias") else value,
        "one_local": one_local,
        "mask_x8": lambda name, value: value * 8 if name.endswith("mask_embedding") else value,
        "mask_0.02": lambda name, value: value / value.std() * 0.02 if name.endswith("mask_embedding") else value,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML file, see configs/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    config = load_config(PretrainConfig, args.config, args.settings)
    inputs = RunInputs(config)

    def initialize(init_scheme: str) -> Weights:
        torch.manual_seed(config.seed)
        shape = dataclasses.replace(inputs.weight_init.model_config, init_scheme=init_scheme)
        model = LanguageModel(shape, inputs.objective.two_streams)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    published, local = initialize("published"), initialize("local")
    counts = torch.tensor(inputs.store.unigram, dtype=torch.float32) + 1
    for variant, change in make_changes(counts / counts.sum(), local, config.model.n_head).items():
        changed = {name: change(name, value.clone()) for name, value in published.items()}
        folder = args.out / variant
        provenance = {"name": variant, "step": 0, "data_fingerprint": inputs.store.fingerprint}
        shape = inputs.weight_init.model_config
        save_folder(folder, ModelFolder(shape, changed, inputs.tokenizer, config.objective.name, provenance, "xlpre"))
        print(folder)


if __name__ == "__main__":
    run_main(main)
