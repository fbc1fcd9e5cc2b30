"""The commands of the README work, in their order, on a little text."""

import re
import shlex

from tests.conftest import REPOSITORY
from tests.integration.conftest import launch, run, run_with_forks
from xlpre.training.distributed import free_port

TINY = shlex.split(
    "text.max_chars=300000 text.val_fraction=0.1 tokenizer.vocab_size=500 data.seq_len=32 data.reuse_len=16 data.windows_per_run=4 model.n_layer=2 "
    "model.d_model=16 model.n_head=2 model.d_inner=32 model.mem_len=16 train.steps=4 train.hours=null train.global_batch_size=4 "
    "train.log_every=2 eval.every=4 eval.batch_size=2 eval.num_windows=2"
)


def commands(page="README.md"):
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_readme_works(tmp_path, text_file):
    for name in ("configs", "pretrain"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "words.txt").write_bytes(text_file.read_bytes())
    done = []
    for line in commands():
        if line == "make test":
            continue
        # what the Makefile runs, without its installing into the place that this test runs from
        words = shlex.split(
            line.replace("make quickstart", "python pretrain/quickstart.py --config configs/pretrain/quickstart.yaml")
        )
        if "--config" in words:
            words += TINY if "pretrain/explain.py" not in words else []
        if words[0] == "deepspeed":
            launcher = ("deepspeed", "--master_port", str(free_port()), *words[1:4])
            result = launch(*words[4:], launcher=launcher, cwd=tmp_path)
        else:
            result = run_with_forks(*words[1:], cwd=tmp_path)  # quickstart.py calls the launcher too
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        done.append(line)
    assert len(done) >= 8
    page = (tmp_path / "runs/quickstart/report.html").read_text()
    assert page.count("<svg") == 3 and "word frequencies alone" in page
    assert (tmp_path / "runs/mine/report.html").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "quickstart",
        "mine",
        "no_memory",
        "no_spans",
        "more",
    }


def test_the_makefile_runs_the_command_that_stands_in_for_it():
    recipe = (REPOSITORY / "Makefile").read_text()
    assert "pretrain/quickstart.py --config configs/pretrain/quickstart.yaml $(ARGS)" in recipe


def test_every_plan_of_the_page_about_plans_can_be_made():
    for line in commands("docs/plan.md"):
        done = run(*shlex.split(line)[1:])
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "Nothing was measured" in done.stdout
