"""The two-stream and the single-stream model equal the original's own numbers (zihangdai/xlnet run in TensorFlow)."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from tests.parity.xlnet import (
    check_gradients,
    check_window,
    first_memory_of,
    part_of,
    put,
    same_length,
    shape_of,
    skip_outside,
)
from xlpre.conversion.tf import from_arrays
from xlpre.model.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("by_each_backend")


@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz") + files("xlnet_single_*.npz"))
def test_outputs_memory_losses_and_gradients_equal_the_originals(path):
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    windows = sorted({name.split("/")[0] for name in arrays if name.startswith("seg")})
    parts = [part_of(arrays, window) for window in windows] or [arrays]
    for part in parts:
        skip_outside(part, config)
    shape = shape_of(arrays, config)
    two_streams = "in/inp_q" in parts[0]
    model = LanguageModel(shape, two_streams)
    put(
        model,
        from_arrays(shape, part_of(arrays, "param")),
        spared=() if two_streams else ("backbone.mask_embedding",),
    )
    memory = None
    for part in parts:  # two windows in a row, the second with the memory of the first, or a single one
        if memory is None or same_length(config):
            memory = first_memory_of(part, config)
        loss, memory = check_window(model, part, config, memory)
    loss.backward()
    gradients = part_of(parts[-1], "grad")
    if gradients:  # some files hold the forward pass alone
        check_gradients(model, shape, gradients)
