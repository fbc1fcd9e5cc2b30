"""Tables and JSON lines."""

import io
import json
import sys

import pytest

from xlpre.common.tables import print_json


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_printed_record_is_json_in_any_encoding(encoding, monkeypatch):
    record = {"text": "Bücher, 本 and \N{GRINNING FACE}"}
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace"))
    print_json(record)
    sys.stdout.flush()
    assert json.loads(sys.stdout.buffer.getvalue().decode(encoding)) == record
