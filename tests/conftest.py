"""Fixtures and options shared by all tests: a corpus of invented words, its vocabulary and its token store."""

import dataclasses
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("XLPRE_TEST_DEVICE") != "cuda":  # see tests/gpu
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis
import numpy as np
import pytest
import torch

from xlpre.conversion.model_folder import ModelFolder, save_folder
from xlpre.data.store import TokenStore
from xlpre.data.store_builder import write_store
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

REPOSITORY = Path(__file__).parents[1]
TINY = ModelConfig(n_layer=2, d_model=16, n_head=2, d_inner=32, mem_len=8, dropout=0.0, dropatt=0.0, init_std=0.1)

# `make test` draws the same examples every time; `make test-long` draws three times as many, and new ones.
ALL_EXAMPLES = os.environ.get("XLPRE_TEST_EXAMPLES") == "all"
hypothesis.settings.register_profile("xlpre", deadline=None, derandomize=not ALL_EXAMPLES, print_blob=True)
hypothesis.settings.load_profile("xlpre")

# nohup ignores SIGHUP, and a script's background jobs ignore SIGINT; the processes that tests start would inherit both.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def examples(n: int) -> int:
    """Return the number of hypothesis examples to draw: `n` in `make test-long`, a third of it in `make test`."""
    return n if ALL_EXAMPLES else max(1, n // 3)


def refused(
    outcome: subprocess.CompletedProcess[str] | BaseException | pytest.ExceptionInfo[BaseException],
    key: str,
    value: object,
    remedy: str = "",
) -> str:
    """Check that a setting is refused: the message names it, says that it is invalid, and has a remedy.

    Args:
        outcome: result of a command, or an exception.
        key: name of the setting.
        value: value of the setting, as the message shows it.
        remedy: regular expression that the text after "is invalid" must match. By default, this text needs a second sentence (the
            remedy) or the words "it must".

    Returns:
        The message.
    """
    if isinstance(outcome, subprocess.CompletedProcess):
        assert outcome.returncode == 2, outcome.stdout + outcome.stderr
        message = only_error(outcome.stderr)
    else:
        message = str(outcome.value if isinstance(outcome, pytest.ExceptionInfo) else outcome)
    setting = re.escape(f"{key}={value}")
    rule = re.search(rf"(?:^|\s){setting} is invalid(.*)", message)
    assert rule, f"{message!r} does not contain '{key}={value} is invalid'"
    # a rule such as "it must be positive" is its own remedy
    assert re.search(remedy or r": it must |[.;] [A-Z`]", rule[1]), f"{message!r} lacks a remedy"
    return message


def only_error(stderr: str) -> str:
    """Check that a command printed a single error and no traceback. Return its message."""
    assert "Traceback" not in stderr, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    return errors[0].removeprefix("error: ")


NOT_COUNTED = (
    "this processor has no",
    "parity is not claimed",
)  # in reasons of skips that do not depend on missing files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--max-skips", type=int, help="fail if more tests than this are skipped")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if more tests were skipped than `--max-skips` allows, not counting those of NOT_COUNTED."""
    limit = session.config.getoption("--max-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if limit is None or reporter is None or hasattr(session.config, "workerinput"):
        return
    reasons = [str(skip.longrepr) for skip in reporter.stats.get("skipped", [])]
    n_skipped = sum(not any(expected in reason for expected in NOT_COUNTED) for reason in reasons)
    if n_skipped > limit:
        reporter.write_line(
            f"{n_skipped} tests were skipped, more than --max-skips={limit}: see the reasons below", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def make_documents(n_documents: int, seed: int = 0) -> list[list[str]]:
    """Return documents whose sentences consist of invented words with Zipf-like frequencies."""
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(400)]
    frequency = 1 / np.arange(1, 401)

    def sentence() -> str:
        text = " ".join(rng.choice(words, rng.integers(4, 12), p=frequency / frequency.sum()))
        return text.capitalize() + "."

    return [
        [" ".join(sentence() for _ in range(rng.integers(1, 5))) for _ in range(rng.integers(1, 4))]
        for _ in range(n_documents)
    ]


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    return make_documents(600)


@pytest.fixture(scope="session")
def tokenizer(documents) -> Tokenizer:
    return train_tokenizer(documents, TokenizerConfig(vocab_size=300))


@pytest.fixture(scope="session")
def store(documents, tokenizer, tmp_path_factory) -> TokenStore:
    return write_store(
        tmp_path_factory.mktemp("data") / "store", documents, tokenizer, 0.1, {"source": "docstrings"}, {}
    )


@pytest.fixture(scope="session")
def text_file(documents, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents))
    return path


def write_folder(path: Path, tokenizer: Tokenizer, provenance: dict[str, Any] | None = None) -> Path:
    """Write a model folder with a tiny model and random weights."""
    torch.manual_seed(0)
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, True).named_parameters()}
    save_folder(path, ModelFolder(shape, weights, tokenizer, "permutation", provenance or {}, "xlpre"))
    return path


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def has_fp16() -> bool:
    """Return True if DeepSpeed can train in fp16 on this processor."""
    return getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", bool)()


def has_bf16() -> bool:
    """Return True if this processor has instructions for bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
