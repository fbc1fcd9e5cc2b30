"""Fixture: the numbers of the original implementations, with each attention backend."""

import os
from importlib.util import find_spec

import pytest

from xlpre.model.kernels import backend

NAMES = ["cpu", "sdpa", "reference"]
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    NAMES = ["triton"]


@pytest.fixture(params=NAMES)
def by_each_backend(request, monkeypatch):
    """Models with `model.attention_backend=auto` use this backend. Under TRITON_INTERPRET=1 it is Triton in its interpreter."""
    monkeypatch.setattr(backend, "fastest_backend", lambda device, dtype, head_width: request.param)
