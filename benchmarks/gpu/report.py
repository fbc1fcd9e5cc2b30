r"""Measure a GPU in a few minutes, and write one JSON file: correctness, speed and memory of kernels, training steps and a pretraining.

python benchmarks/gpu/report.py --out report.json [--minutes 8] [--only "attention bf16" "step large"] [--skip tiles]

Each part runs in its own process with a time limit, so that a part that fails, hangs or breaks the CUDA context does not affect the
others. Its JSON lines and the end of its output are written to the file as soon as they are printed. A part is skipped if too
little of --minutes is left; run it later with --only. The text is random or comes from docstrings of installed packages, so that no
data set is needed. A summary is printed at the end.

A part is also skipped if packages are missing. The parts `attention`, `fused ops` and `tiles` need torch, triton and psutil; the parts
`step` also need transformers, omegaconf, safetensors and sentencepiece; `pretraining` needs all packages of this project. If the GPU
machine has no network, download the missing packages as wheels on another machine, for the Python version of the GPU machine:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels \
        annotated-types google-crc32c hjson omegaconf pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection
    DS_BUILD_OPS=0 python -m pip wheel --no-deps --no-build-isolation -w wheels deepspeed==0.19.8

Add all other packages of pyproject.toml that `pip list` does not show on the GPU machine. Install them there:

    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

With --tiny, similar parts run on a CPU with tiny shapes, in one to five minutes. Parts that need a GPU are skipped.
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

from benchmarks.common.processes import REPOSITORY, kill_tree, make_environment
from benchmarks.gpu.report_parts import PRETRAINING, Part, parts, tiny_parts
from benchmarks.gpu.report_summary import summarize

PATIENCE = 40.0  # seconds that a part has to end after an interrupt before it is killed; it may be compiling


class Report:
    """The results of all parts, in a JSON file that is replaced atomically.

    Args:
        path: path of the JSON file.

    Attributes:
        parts: results of each part (status, seconds, JSON lines, output) by the name of the part.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, dict[str, Any]] = {}

    def update(self, name: str, **values: Any) -> None:
        """Add these values to the results of a part, and write the file."""
        self.parts.setdefault(name, {}).update(values)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"made_by": " ".join(sys.argv), "parts": self.parts}, indent=1), encoding="utf-8")
        partial.replace(self._path)


def start(args: list[str], stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start `python *args` in the repository. If `args` begins with a script, its path is relative to benchmarks/."""
    command = args if args[0].startswith("-") else [str(REPOSITORY / "benchmarks" / args[0]), *args[1:]]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=make_environment(HF_HUB_OFFLINE="1", XLPRE_TEST_DEVICE="cuda"),
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_enable_interrupts,
    )


def _enable_interrupts() -> None:
    """Restore the default action of SIGINT, which shells disable for commands in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(part: Part, seconds: float, report: Report) -> None:
    """Run a part for at most `seconds`, and write its results into the report."""
    start_time = time.monotonic()
    lines: list[Any] = []
    output: deque[str] = deque(maxlen=300)
    process = start(part.args)
    received: queue.Queue[str | None] = queue.Queue()

    def read_output() -> None:
        for line in process.stdout or ():
            received.put(line)
        received.put(None)

    threading.Thread(target=read_output, daemon=True).start()
    report.update(part.name, command=part.args, lines=lines, status="running")
    n_signals = 0
    line: str | None = ""
    while line is not None:
        deadline = start_time + seconds + n_signals * PATIENCE
        try:
            line = received.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            process.send_signal(signal.SIGINT) if not n_signals else kill_tree(process)
            n_signals += 1
            line = (
                "" if n_signals < 3 else None
            )  # after the kill: a process that the part left behind may keep the output open
        if line:
            result = _parse_json_line(line)
            (lines if result else output).append(result or line.rstrip())
            report.update(part.name, seconds=round(time.monotonic() - start_time, 1))
    status = f"stopped after {seconds:.0f} s" if n_signals else process.wait()
    report.update(part.name, seconds=round(time.monotonic() - start_time, 1), status=status, output=list(output))


def _parse_json_line(line: str) -> dict[str, Any] | None:
    """Return the object in `line`, or None if the line is not a JSON object."""
    try:
        return json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None


def measure_ceilings() -> None:
    """Print a JSON line: the name of the device, its TFLOP/s of matrix products, its GB/s of copies, and versions of packages."""
    import torch

    has_gpu = torch.cuda.is_available()
    n, dtype, device = (8192, torch.bfloat16, "cuda") if has_gpu else (256, torch.float32, "cpu")
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(2**32 if has_gpu else 2**24, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), {}
    for name, operation in {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}.items():
        times = []
        for _ in range(23):
            start_time = time.perf_counter()
            operation()
            if has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_time)
        seconds[name] = sorted(times[3:])[10]  # median without the warm-up
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "deepspeed", "numpy")}
    line = {
        "device": properties.name if properties else "cpu",
        "multiprocessors": properties.multi_processor_count if properties else None,
        "memory_gb": round(properties.total_memory / 1e9, 1) if properties else None,
        "product_tflops": round(2 * n**3 / seconds["product"] / 1e12, 3),
        "copy_gb_per_second": round(2 * source.numel() / seconds["copy"] / 1e9, 1),
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
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("report.json"), help="file for the report")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the report")
    parser.add_argument("--only", nargs="+", default=[], help="names of the parts to run; an unknown name lists all")
    parser.add_argument("--skip", nargs="+", default=[], help="names of the parts to skip")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--ceilings", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ceilings:
        measure_ceilings()
        return
    deadline, report = time.monotonic() + 60 * args.minutes, Report(args.out)
    with tempfile.TemporaryDirectory() as name:
        all_parts = (tiny_parts if args.tiny else parts)(Path(name))
        names = [part.name for part in all_parts]
        if unknown := {*args.only, *args.skip} - {*names}:
            raise SystemExit(
                f"--only or --skip is invalid: there is no part {', '.join(unknown)}. The parts are {', '.join(names)}."
            )
        selected = [
            part for part in all_parts if part.name not in args.skip and (not args.only or part.name in args.only)
        ]
        pretraining = [part for part in selected if part.args[0] == PRETRAINING and not part.skipped]
        # the stores are written on the CPU while other parts use the GPU
        preparations = {part.name: start([*part.args, "--prepare"], subprocess.DEVNULL) for part in pretraining}
        for part in selected:
            remaining = deadline - time.monotonic()
            if part.skipped or remaining < min(part.seconds, 30):
                reason = f"{max(remaining, 0):.0f} s of --minutes were left"
                report.update(part.name, skipped=part.skipped or reason)
                continue
            print(f"{time.strftime('%H:%M:%S')} {part.name} ...", flush=True)
            if part.name in preparations:
                preparations[part.name].wait()
            run(part, min(part.seconds, remaining), report)
        for preparation in preparations.values():
            kill_tree(preparation)
    print("\n".join(summarize(report.parts)), flush=True)
    sys.exit(any(part.get("status", 0) != 0 for part in report.parts.values()))


if __name__ == "__main__":
    main()
