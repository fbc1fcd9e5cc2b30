r"""All that is to be known of a GPU, by one command, in minutes: right or wrong, how fast, how much memory; into one JSON file.

python benchmarks/gpu/report.py --out report.json [--minutes 8] [--only "attention bf16" "step large"] [--skip tiles]

Each part is a process of its own with a time of its own, so that one that fails, hangs or breaks the GPU's context takes nothing with
it; its lines are in the file as soon as they are printed, with the end of what it said if it failed. A part for which too little of
--minutes is left is not begun: run it by another command with --only. Data are random; no file is read. At the end stands a summary, line
by line. A part whose packages are not installed is left out, and says which: attention, between and tiles need torch, triton and psutil,
steps also transformers and omegaconf, the pretraining all that this project needs. On a machine without a network, bring what it lacks as
wheels:
where there is one, with the GPU machine's version of Python,

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels \
        annotated-types google-crc32c hjson omegaconf pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection
    DS_BUILD_OPS=0 python -m pip wheel --no-deps --no-build-isolation -w wheels deepspeed==0.19.8

(and whatever else of pyproject.toml `pip list` there does not name), and there

    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

--tiny does the same on a processor with tiny shapes, in a minute or two, five where torch compiles anew, and leaves out what needs a
GPU, saying so.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.processes import REPOSITORY, make_environment, kill_tree
from benchmarks.gpu.report_parts import Part, parts, tiny_parts
from benchmarks.gpu.report_summary import summary

PATIENCE = 40.0  # seconds for a part to end by itself when it is asked to, in the middle of compiling perhaps
HERE = Path(__file__).parent


class Report:
    """A JSON file that is whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path, self.parts = path, {}  # type: Path, dict[str, dict[str, Any]]

    def write(self, name: str, **news: Any) -> None:
        """What is known of a part now."""
        self.parts.setdefault(name, {}).update(news)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"made_by": " ".join(sys.argv), "parts": self.parts}, indent=1), encoding="utf-8")
        partial.replace(self._path)


def begin(words: list[str], output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A script of this folder, or what `python -...` takes, from the root of the repository."""
    command = words if words[0].startswith("-") else [str(HERE / words[0]), *words[1:]]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=make_environment(HF_HUB_OFFLINE="1"),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_hears_interrupts,
    )


def _hears_interrupts() -> None:
    """Also where this command was begun in the background, by a shell that has such commands ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(part: Part, seconds: float, report: Report) -> None:
    """One part, for so long at most."""
    since, lines, rest = time.monotonic(), [], deque(maxlen=300)  # type: float, list[Any], deque[str]
    process, said = begin(part.words), queue.Queue()  # type: subprocess.Popen[str], queue.Queue[str | None]

    def read() -> None:
        for line in process.stdout or ():
            said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    report.write(part.name, command=part.words, lines=lines, status="was running")
    stopped, line = 0, ""  # type: int, str | None
    while line is not None:
        try:
            line = said.get(timeout=max(since + seconds + stopped * PATIENCE - time.monotonic(), 0.01))
        except queue.Empty:  # asked to stop it may say what it has
            process.send_signal(signal.SIGINT) if not stopped else kill_tree(process)
            stopped += 1
            line = "" if stopped < 3 else None  # something that it left behind still holds its output
        if line:
            found = parsed(line)
            (lines if found else rest).append(found or line.rstrip())
            report.write(part.name, seconds=round(time.monotonic() - since, 1))
    status = f"stopped after {seconds:.0f} s" if stopped else process.wait()
    report.write(part.name, seconds=round(time.monotonic() - since, 1), status=status, said=list(rest))


def parsed(line: str) -> dict[str, Any] | None:
    """What a line of JSON says; None of another."""
    try:
        return json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None


def ceilings() -> None:
    """One line: what this machine is, and the most it does."""
    import torch

    on_gpu = torch.cuda.is_available()
    n, dtype, device = (8192, torch.bfloat16, "cuda") if on_gpu else (256, torch.float32, "cpu")
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    large = torch.empty(2**32 if on_gpu else 2**24, dtype=torch.uint8, device=device)
    target, found = torch.empty_like(large), {}
    for what, work in {"product": lambda: a @ b, "copy": lambda: target.copy_(large)}.items():
        times = []
        for _ in range(23):
            begun = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        found[what] = sorted(times[3:])[10]
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "deepspeed", "numpy")}
    line = {
        "device": properties.name if properties else "cpu",
        "multiprocessors": properties.multi_processor_count if properties else None,
        "memory_gb": round(properties.total_memory / 1e9, 1) if properties else None,
        "product_tflops": round(2 * n**3 / found["product"] / 1e12, 3),
        "copy_gb_per_second": round(2 * large.numel() / found["copy"] / 1e9, 1),
        "python": sys.version.split()[0],
        **versions,
    }
    print(json.dumps(line), flush=True)


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("report.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", default=[], help="names of parts")
    parser.add_argument("--skip", nargs="+", default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ceilings", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ceilings:
        ceilings()
        return
    until, report = time.monotonic() + 60 * given.minutes, Report(given.out)
    with tempfile.TemporaryDirectory() as name:
        all_parts = (tiny_parts if given.tiny else parts)(Path(name))
        if unknown := {*given.only, *given.skip} - {part.name for part in all_parts}:
            raise SystemExit(
                f"no such part: {', '.join(unknown)}; there are {', '.join(part.name for part in all_parts)}"
            )
        wanted = [
            part for part in all_parts if part.name not in given.skip and (not given.only or part.name in given.only)
        ]
        pretraining = [part.words for part in wanted if part.name == "pretraining" and not part.left_out]
        preparing = (
            begin([*pretraining[0], "--prepare"], subprocess.DEVNULL) if pretraining else None
        )  # on the CPU, meanwhile
        for part in wanted:
            left = until - time.monotonic()
            if part.left_out or left < min(part.seconds, 30):
                report.write(part.name, left_out=part.left_out or f"{max(left, 0):.0f} s of --minutes were left")
                continue
            print(f"{time.strftime('%H:%M:%S')} {part.name} ...", flush=True)
            if part.name == "pretraining" and preparing:
                preparing.wait()
            run(part, min(part.seconds, left), report)
        if preparing:
            kill_tree(preparing)
    print("\n".join(summary(report.parts)), flush=True)
    sys.exit(any(part.get("status", 0) != 0 for part in report.parts.values()))


if __name__ == "__main__":
    main()
