"""Files that the original's train.py leaves, read without torch.load, give the losses that the original computed from them."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from tests.parity.test_transformer_xl_goldens import batch_of
from tests.parity.xlnet import TOLERANCE
from xlpre.conversion.model_folder import load_folder, save_folder
from xlpre.conversion.transformer_xl import config_from
from xlpre.model.memory import initial_memory


def put(file, config, folder):
    """Copy one file of the original into a folder, with settings if it has none."""
    folder.mkdir()
    if file.name == "state_dict.pt":
        (folder / "config.json").write_text(json.dumps({"model_type": "transfo-xl", **config}))
        return shutil.copy(file, folder / "pytorch_model.bin").parent
    return shutil.copy(file, folder / "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model_zip.pt", "state_dict.pt"])
@pytest.mark.parametrize("path", files("txl_weights/*"))
def test_losses_with_memory_equal_those_of_the_original(path, name, tmp_path):
    expected = np.load(path / "expected.npz")
    config = json.loads(str(expected["config"]))
    folder = load_folder(put(path / name, config, tmp_path / "original"))
    assert folder.kind == "transformer-xl" and folder.objective == "causal" and folder.tokenizer is None
    assert folder.config.clusters == config_from(config).clusters and folder.config.mem_len == config["mem_len"]
    save_folder(tmp_path / "native", folder)
    model = load_folder(tmp_path / "native").model()
    memory = initial_memory(folder.config, expected["in/data"].shape[1])
    absolute = folder.config.positions in ("sinusoidal", "learned")
    n_segments = 1 if absolute and config["mem_len"] else 2  # the original adds absolute positions to memory again
    for i in range(n_segments):
        rows = slice(i * config["tgt_len"], (i + 1) * config["tgt_len"])
        batch = batch_of({f"in/{part}": expected[f"in/{part}"][rows] for part in ("data", "target")}, config["ext_len"])
        with torch.no_grad():
            hidden, memory = model.backbone(batch, memory)
            losses = model.lm_head(hidden, batch.targets)
        # the original returns the losses of the first cluster first, then those of the next, in its time-major order
        clusters = np.searchsorted(config["cutoffs"], batch.targets.T.flatten(), side="right")
        in_its_order = losses.T.flatten()[np.argsort(clusters, kind="stable")]
        np.testing.assert_allclose(in_its_order, expected[f"out/loss_{i}"].flatten(), atol=TOLERANCE)
