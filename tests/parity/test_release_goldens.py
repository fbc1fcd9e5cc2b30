"""TensorFlow checkpoints of the original, read without TensorFlow, give the outputs of the original."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.parity.goldens import GOLDENS, files
from tests.parity.xlnet import build_config, check_window, initial_memory_of, select
from xlpre.conversion.model_folder import load_folder
from xlpre.conversion.tf import from_arrays


def outputs_of(weights: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """Arrays and config of the golden file that was recorded with `weights`."""
    for path in sorted(GOLDENS.glob("xlnet_pretrain_*.npz")):
        arrays = dict(np.load(path))
        config = json.loads(str(arrays["config"]))
        recorded = from_arrays(build_config(arrays, config), select(arrays, "param"))
        is_equal = (name in weights and torch.equal(weights[name], recorded[name]) for name in recorded)
        if "in/inp_k" in arrays and all(is_equal):
            return arrays, config
    raise AssertionError("no golden file was recorded with these weights")


@pytest.mark.parametrize("release", files("tf_release*"))
def test_a_release_gives_the_outputs_of_the_original(release):
    folder = load_folder(release)
    arrays, config = outputs_of(folder.weights)
    assert folder.kind == "tensorflow" and folder.tokenizer is None and folder.config.vocab_size == config["n_token"]
    check_window(folder.model(), arrays, config, initial_memory_of(arrays, config))


@pytest.mark.parametrize("release", files("tf_release*"))
def test_a_release_with_damaged_data_is_refused(release, tmp_path):
    shutil.copytree(release, tmp_path / "release")
    for file in (tmp_path / "release").iterdir():
        file.chmod(0o644)
    data = next((tmp_path / "release").glob("*.data-*"))
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))  # damages every variable
    with pytest.raises(ValueError, match=str(data.parent)):
        load_folder(tmp_path / "release")
