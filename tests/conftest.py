"""What tests share: a corpus of made-up words, a vocabulary and a store of it, all made in seconds."""

import dataclasses
import os
import signal
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import pytest
import torch

from xlpre.conversion.model_folder import ModelFolder, save_folder
from xlpre.data.store import TokenStore
from xlpre.data.store_builder import write_store
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import Tokenizer, train
from xlpre.text.tokenizer_config import TokenizerConfig

REPOSITORY = Path(__file__).parents[1]
TINY = ModelConfig(n_layer=2, d_model=16, n_head=2, d_inner=32, mem_len=8, dropout=0.0, dropatt=0.0, init_std=0.1)

# under nohup it is ignored, and so are interrupts by what a script starts in its background; also by all that tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def make_documents(n_documents: int, seed: int = 0) -> list[list[str]]:
    """Documents of sentences of words of syllables, of which some are frequent."""
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
    return train(documents, TokenizerConfig(vocab_size=300))


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


def write_folder(path: Path, tokenizer: Tokenizer) -> Path:
    """A folder of a tiny model with random weights."""
    torch.manual_seed(0)
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, True).named_parameters()}
    save_folder(path, ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre"))
    return path


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def has_fp16() -> bool:
    """Whether DeepSpeed trains in fp16 on this processor."""
    return getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", bool)()


def has_bf16() -> bool:
    """Whether training in bf16 is not refused on this processor."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
