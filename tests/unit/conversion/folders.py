"""Model folders with tiny models, one of each kind."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from xlpre.conversion import tf
from xlpre.conversion.model_folder import ModelFolder, save_folder, save_huggingface
from xlpre.conversion.tf_checkpoint import write_checkpoint
from xlpre.conversion.weight_maps import to_external
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel

SHAPE = ModelConfig(vocab_size=300, n_layer=2, d_model=16, n_head=2, d_inner=24)


def make(tokenizer, next_sentence=False, **settings) -> ModelFolder:
    shape = dataclasses.replace(SHAPE, **settings)
    weights = {name: p.detach() for name, p in LanguageModel(shape, True, next_sentence).named_parameters()}
    return ModelFolder(shape, weights, tokenizer, "permutation", {"step": 3}, "xlpre")


def write_release(path: Path, folder: ModelFolder) -> Path:
    """Write the folder as the original TensorFlow release, including optimizer slots."""
    arrays = to_external(tf.weight_map(folder.config), folder.weights, folder.config)
    slots = {f"{name}/adam_m": np.zeros(2, np.float32) for name in arrays}
    path.mkdir()
    write_checkpoint(
        path / tf.CHECKPOINT,
        {**{n: a.numpy() for n, a in arrays.items()}, **slots, "global_step": np.int64(7)},
    )
    settings = {key: getattr(folder.config, native) for key, native in tf.CONFIG_KEYS.items()}
    (path / tf.CONFIG_FILE).write_text(json.dumps({**settings, "d_head": folder.config.head_width}))
    folder.tokenizer.save(path / "spiece.model")
    return path


WRITERS = {"xlpre": save_folder, "huggingface": save_huggingface, "tensorflow": write_release}
