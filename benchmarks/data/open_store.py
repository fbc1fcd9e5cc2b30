"""Opening a store and reading batches from it, by the size of the store: seconds, and memory of the process's own.

python benchmarks/data/open_store.py --tokens 1000000 1000000000

The tokens are zeros in sparse files, with a sentence every 20 and a document every 1,000. One JSON line a size, from a process of
its own: seconds to open (a small store is read through), memory (RssAnon: pages of the file that the system keeps do not count) after
opening and after the batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.data.lanes import Lanes
from xlpre.data.store import ARRAYS, FORMAT, MAX_BYTES_VERIFIED_ON_OPEN, META, SPLITS, TokenStore, compute_fingerprint
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective

VOCABULARY = 32_000


def make(path: Path, n_tokens: int) -> None:
    """A store of `n_tokens` zeros in each part."""
    lengths = {"tokens": 1, "sentences": 20, "documents": 1000}
    for part in SPLITS:
        (path / part).mkdir(parents=True)
        with open(path / part / "tokens.bin", "wb") as file:
            file.truncate(2 * n_tokens)
        for name in ("sentences", "documents"):
            length = lengths[name]
            with open(path / part / f"{name}.bin", "wb") as file:
                for begin in range(length, n_tokens + 1, length << 20):
                    np.arange(begin, min(begin + (length << 20), n_tokens + 1), length).tofile(file)
    np.ones(VOCABULARY, np.int64).tofile(path / "unigram.bin")
    (path / "vocabulary.model").touch()
    sizes = {name: (path / name).stat().st_size for name in (*ARRAYS, "unigram.bin", "vocabulary.model")}
    small = sum(sizes.values()) <= MAX_BYTES_VERIFIED_ON_OPEN
    sha256 = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() if small else "" for name in sizes}
    meta = {
        "format": FORMAT,
        "dtype": "uint16",
        "source": {},
        "files": {},
        "bytes": sizes,
        "sha256": sha256,
        "vocab_size": VOCABULARY,
        "vocabulary_sha256": "",
        "preprocess": "cased",
        **{f"{part}_n_{name}": n_tokens // length for part in SPLITS for name, length in lengths.items()},
        "fingerprint": compute_fingerprint("", "cased", sha256),
    }
    (path / META).write_text(json.dumps(meta), encoding="utf-8")


def own_megabytes() -> float:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def measure(path: Path, n_batches: int) -> dict:
    """Open, and read batches of 32 rows of 512."""
    before = own_megabytes()
    since = time.perf_counter()
    store = TokenStore(path)
    opened = time.perf_counter() - since
    after = own_megabytes()
    data = DataConfig()
    starts_word = np.random.default_rng(0).random(VOCABULARY) < 0.7
    lanes = Lanes(
        store.train,
        32,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=data.windows_per_run,
        bidirectional=True,
        seed=1,
    )
    loader = Loader(lanes, data, build_objective(ObjectiveConfig(), data, starts_word), 1)
    for step in range(20):
        loader.batch(step * 1000, range(32))
    ready = own_megabytes()
    for step in range(n_batches):
        loader.batch(step * 1000, range(32))  # far apart: other runs each time
    return {
        "tokens": len(store.train),
        "seconds_to_open": round(opened, 4),
        "own_mb_of_opening": round(after - before, 2),
        f"own_mb_of_{n_batches}_more_batches": round(own_megabytes() - ready, 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1_000_000, 1_000_000_000])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(measure(words.measure, words.batches)))
        return
    for n_tokens in words.tokens:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "store", n_tokens)
            command = [sys.executable, __file__, "--measure", f"{folder}/store", "--batches", str(words.batches)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
