"""Models with two streams and with one equal the original (zihangdai/xlnet in TensorFlow)."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from tests.parity.xlnet import (
    build_config,
    check_gradients,
    check_window,
    copy_weights,
    initial_memory_of,
    same_length,
    select,
    skip_unsupported,
)
from xlpre.conversion.tf import from_arrays
from xlpre.model.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("by_each_backend")


@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz") + files("xlnet_single_*.npz"))
def test_outputs_memory_losses_and_gradients_equal_the_original(path):
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    windows = sorted({name.split("/")[0] for name in arrays if name.startswith("seg")})
    parts = [select(arrays, window) for window in windows] or [arrays]
    for part in parts:
        skip_unsupported(part, config)
    shape = build_config(arrays, config)
    two_streams = "in/inp_q" in parts[0]
    model = LanguageModel(shape, two_streams)
    unused = () if two_streams else ("backbone.mask_embedding",)
    copy_weights(model, from_arrays(shape, select(arrays, "param")), unused)
    memory = None
    for part in parts:  # a single window, or two, of which the second has the memory of the first
        if memory is None or same_length(config):
            memory = initial_memory_of(part, config)
        loss, memory = check_window(model, part, config, memory)
    loss.backward()
    gradients = select(parts[-1], "grad")
    if gradients:  # some files have the forward pass only
        check_gradients(model, from_arrays(shape, gradients))
