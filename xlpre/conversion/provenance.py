"""Provenance of a saved folder: kind and hash of the vocabulary, special ids, git revision and versions.

Readers use it to detect a wrong vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from xlpre.common.errors import InputError
from xlpre.common.files import FileEntry, write_bytes
from xlpre.text import special_tokens
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer

PROVENANCE_FILE = "provenance.json"
CONVERTED_FROM = "converted_from"  # field that names the other code base in which the model was trained
FORMER_FILE = "passport.json"  # name of the provenance in format 1
PACKAGES = ("xlpre", "torch", "deepspeed", "sentencepiece", "numpy")


def write_provenance(path: Path, tokenizer: Tokenizer | None, fields: Mapping[str, Any]) -> FileEntry:
    """Write provenance.json into the folder `path`. Return its size and checksum.

    Args:
        path: folder of a model.
        tokenizer: vocabulary of the model; its kind, hash and preprocessing and the special ids are stored. None stores null as the hash.
        fields: more fields. The git revision of this code and the versions of packages are added.
    """
    vocabulary: dict[str, Any] = {"vocabulary_sha256": None}
    if tokenizer:
        vocabulary = {
            "vocabulary_kind": tokenizer.kind,
            "vocabulary_sha256": tokenizer.sha256,
            "preprocess": tokenizer.preprocess,
            "special_ids": {piece: index for index, piece in enumerate(special_tokens.SPECIAL_TOKENS)},
        }
    content = {
        **fields,
        **vocabulary,
        "revision": revision(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }
    return write_bytes(path / PROVENANCE_FILE, json.dumps(content, indent=1).encode())


def read_provenance(path: Path) -> dict[str, Any] | None:
    """Return the fields of provenance.json in the folder `path`, or None if there is no such file.

    Raises:
        InputError: the file is not readable, lacks a required field, or is of an older format.
    """
    file = path / PROVENANCE_FILE
    if not file.exists() and (path / FORMER_FILE).exists():
        raise InputError(older_format(path))
    try:
        content = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a model may be a single file, such as model.pt
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}. Copy the file again from the original folder.") from None
    if not _is_valid(content):
        raise InputError(
            f"{file} is invalid: it must be an object with vocabulary_sha256 and preprocess ({', '.join(get_args(Preprocess))}). "
            "Copy the file again from the original folder."
        )
    return content


def _is_valid(content: Any) -> bool:
    """Return True if `content` names a vocabulary and its preprocessing, or states that there is no vocabulary."""
    if not isinstance(content, dict):
        return False
    sha256 = content.get("vocabulary_sha256", "")
    return sha256 is None or (isinstance(sha256, str) and content.get("preprocess") in get_args(Preprocess))


def older_format(path: Path) -> str:
    """Return the error message for a folder in an older format."""
    return (
        f"{path} is invalid: it is in an older format of xlpre. Use the version that wrote it, or use that version to export it with "
        f"pretrain/export.py --hf and delete {FORMER_FILE} from the result."
    )


def check_vocabulary(path: Path, provenance: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise InputError unless `tokenizer` is the vocabulary that the folder `path` was saved with."""
    if tokenizer.sha256 != provenance["vocabulary_sha256"]:
        raise InputError(
            f"{path}/{tokenizer.file_name} (sha256 {tokenizer.sha256[:12]}) is invalid: the model was saved with another vocabulary "
            f"(sha256 {provenance['vocabulary_sha256'][:12]}). Put the original {tokenizer.file_name} back."
        )


@cache
def revision() -> str | None:
    """Return the git revision of this code at the first call, with -dirty if files were modified; None outside a checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
