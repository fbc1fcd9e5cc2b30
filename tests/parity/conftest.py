"""A fixture that repeats a test with each attention backend."""

import os
from importlib.util import find_spec

import pytest

from xlpre.model.kernels import backend

NAMES = ["cpu", "sdpa", "reference"]
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    NAMES = ["triton"]


@pytest.fixture(params=NAMES)
def by_each_backend(request, monkeypatch):
    """Run a test once per backend: models with `model.attention_backend=auto` use it. Under TRITON_INTERPRET=1, only `triton` is tested."""
    monkeypatch.setattr(backend, "fastest_backend", lambda device, dtype, head_width: request.param)
