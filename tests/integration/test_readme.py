"""The commands of the documentation work, in their order, on a small text."""

import re
import shlex
import subprocess

from tests.conftest import REPOSITORY
from tests.integration.conftest import launch, run
from xlpre.training.distributed import free_port

TINY = shlex.split(
    "text.max_chars=300000 text.val_fraction=0.1 tokenizer.vocab_size=500 data.seq_len=32 data.reuse_len=16 data.windows_per_run=4 "
    "model.n_layer=2 model.d_model=16 model.n_head=2 model.d_inner=32 model.mem_len=16 train.steps=2 train.hours=null "
    "train.global_batch_size=4 train.log_every=1 eval.every=2 eval.batch_size=2 eval.num_windows=2"
)
QUICKSTART = "pretrain/quickstart.py --config configs/pretrain/quickstart.yaml"


def commands(page: str) -> list[str]:
    """Return the lines of the ```bash blocks of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_readme_works(tmp_path, text_file):
    for name in ("configs", "pretrain"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "words.txt").write_bytes(text_file.read_bytes())
    n_commands = 0
    for line in commands("README.md"):
        if line == "make test":
            continue
        # the command behind `make quickstart`, which would install into the environment that runs this test
        program, *args = shlex.split(line.replace("make quickstart", f"python {QUICKSTART}"))
        if "--config" in args and "pretrain/explain.py" not in args:
            args += TINY
        if program == "deepspeed":
            launcher = ("deepspeed", "--master_port", str(free_port()), *args[:3])
            result = launch(*args[3:], launcher=launcher, cwd=tmp_path)
        else:
            result = run(*args, cwd=tmp_path)
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        n_commands += 1
    assert n_commands >= 10
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"quickstart", "mine", "no_memory", "more"}
    for name in ("quickstart", "mine"):
        page = (tmp_path / "runs" / name / "report.html").read_text()
        assert page.count("<svg") == 3 and "unigram baseline" in page


def test_make_quickstart_runs_the_command_that_these_tests_run():
    # called by `make test`, the inner make would also print the folder that it enters and leaves
    command = ["make", "--no-print-directory", "-n", "quickstart", "ARGS=name=mine"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1].endswith(f" {QUICKSTART} name=mine")


def test_every_command_of_the_planning_page_works():
    for line in commands("docs/plan.md"):
        result = run(*shlex.split(line)[1:], "model.n_layer=2")
        assert result.returncode == 0, f"{line}\n{result.stderr}"
        assert "prediction" in result.stdout
