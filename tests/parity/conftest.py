"""The originals' numbers, whoever computes attention."""

import os
from importlib.util import find_spec

import pytest

from xlpre.model.kernels import backend
from xlpre.model.kernels.backend import backend_named

NAMES = ["cpu", "sdpa", "reference"]
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    NAMES = ["triton"]


@pytest.fixture(params=NAMES)
def by_each_backend(request, monkeypatch):
    """Models with model.attention_backend=auto take this one; under TRITON_INTERPRET=1 that is triton's interpreter."""
    monkeypatch.setattr(backend, "fastest", lambda device, dtype, width: backend_named(request.param))
