"""The commands of the documentation work, in their order, on a small text."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pretrain.config import PretrainConfig
from tests.conftest import REPOSITORY
from tests.integration.conftest import call, launch, run
from xlpre.config.loader import load_config
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


def settings_file(page: str) -> str:
    """Return the first ```yaml block of a page."""
    return re.search(r"```yaml\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)[1]


def check_command(program: str, args: list[str], folder: Path) -> None:
    """Run a command with tiny settings in a folder, and check that it succeeds."""
    is_ablation = args[0] == "pretrain/ablate.py"
    if is_ablation or "--config" in args and args[0] not in ("pretrain/explain.py", "pretrain/plan.py"):
        args = [*args, *TINY]
    if program == "deepspeed":
        script = next(index for index, argument in enumerate(args) if argument.endswith(".py"))
        launcher = ("deepspeed", "--master_port", str(free_port()), *args[:script])
        result = launch(*args[script:], launcher=launcher, cwd=folder)
    else:
        result = run(*args, cwd=folder)
    assert result.returncode == 0, f"{program} {args}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"


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
        check_command(program, args, tmp_path)
        n_commands += 1
    assert n_commands >= 10
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"quickstart", "mine", "no_memory", "from_mine"}
    for name, n_plots in (("quickstart", 4), ("mine", 3)):
        page = (tmp_path / "runs" / name / "report.html").read_text()
        assert page.count("<svg") == n_plots and "unigram baseline" in page
        assert ("Minimal pairs" in page) == (name == "quickstart")


def check_fine_tuning(folder: Path) -> None:
    """Run the commands of the README's section on fine-tuning on a few examples."""
    (folder / "finetune").symlink_to(REPOSITORY / "finetune")
    lines = re.findall(r"^ {4}python (finetune/.*)$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 4
    for name in ("train", "dev", "test"):
        (folder / f"{name}.csv").write_text("title,topic\nthe list of names,lists\nreturns a file,files\n" * 8)
        table = folder / "glue_data" / "MRPC" / f"{name}.tsv"
        table.parent.mkdir(parents=True, exist_ok=True)
        label = "index" if name == "test" else "Quality"
        rows = "".join(
            f"{number if name == 'test' else number % 2}\t1\t2\tthe list\tthe file\n" for number in range(16)
        )
        table.write_text(f"{label}\t#1 ID\t#2 ID\t#1 String\t#2 String\n{rows}")
    for line in lines:
        args = shlex.split(line)
        overrides = ["data.max_seq_len=16", "train.steps=2", "eval.every=2"] if args[0] == "finetune/run.py" else []
        result = run(*args, *overrides, cwd=folder)
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    assert (folder / "runs/mrpc/table.md").exists() and (folder / "exported/topics/config.json").exists()


def test_every_override_in_the_table_of_the_readme_is_valid():
    table = re.search(r"\| change \| override \|\n(.*?)\n\n", (REPOSITORY / "README.md").read_text(), re.DOTALL)[1]
    overrides = [re.search(r"`(.*?)`", line.split("|")[2])[1] for line in table.splitlines()[1:]]
    assert len(overrides) >= 10
    for override in overrides:
        load_config(PretrainConfig, REPOSITORY / "configs/pretrain/quickstart.yaml", shlex.split(override))


def test_make_quickstart_runs_the_command_that_these_tests_run():
    # called by `make test`, the inner make would also print the folder that it enters and leaves
    command = ["make", "--no-print-directory", "-n", "quickstart", "ARGS=name=mine"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1].endswith(f" {QUICKSTART} name=mine")


def test_every_command_of_the_planning_page_works():
    for line in commands("docs/plan.md"):
        result = call(*shlex.split(line)[1:], "model.n_layer=2")
        assert result.returncode == 0, f"{line}\n{result.stderr}"
        assert "prediction" in result.stdout


@pytest.mark.long
def test_every_command_about_own_text_evaluation_and_fine_tuning_works(tmp_path, text_file):
    for name in ("configs", "pretrain"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "words.txt").write_bytes(text_file.read_bytes())
    (tmp_path / "mine.yaml").write_text(settings_file("docs/getting_started.md"))
    (tmp_path / "mine_memory.yaml").write_text(settings_file("docs/ablations.md"))
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "words.txt").write_text("The cats sleep, and the dog sees them.\n\n" * 20)
    (tmp_path / "sentences.txt").write_text("The cats sleep.\nIt is a list.\n")
    (tmp_path / "blimp").mkdir()
    (tmp_path / "blimp" / "agreement.jsonl").write_text(
        '{"sentence_good": "The cats sleep.", "sentence_bad": "The cats sleeps."}\n'
    )
    for page in ("docs/getting_started.md", "docs/evaluation.md", "docs/scoring.md", "docs/ablations.md"):
        for line in commands(page):
            program, *args = shlex.split(line)
            check_command(program, args, tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "longer", "mine_memory"}
    check_fine_tuning(tmp_path)


def test_the_predictions_of_the_page_about_distributed_training_are_those_of_the_plan(tmp_path):
    page = (REPOSITORY / "docs/distributed.md").read_text()
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "base16.yaml").write_text(settings_file("docs/distributed.md"))
    (line,) = commands("docs/distributed.md")
    result = call(*shlex.split(line.replace("base16.yaml", str(tmp_path / "base16.yaml")))[1:])
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^  (\S.*?)  +(.*)$", result.stdout, re.MULTILINE)
    plan = {name: values.split() for name, values in reversed(lines)}  # the first of several `total`
    counts = {name: int(plan[name][0].replace(",", "")) for name in ("window tokens in total", "text tokens in total")}
    memory, hours = float(plan["peak"][1]), float(plan["GPU-hours"][0]) / 16  # ZeRO stage 1
    shares = re.findall(r"^  \d .* ([\d.]+)%$", result.stdout, re.MULTILINE)  # of communication, by ZeRO stage
    for figure in (
        f"| parameters | {plan['total'][0]} ",
        f"micro-batch 128 | {memory:.0f} GB ",
        f"| window tokens | {counts['window tokens in total'] / 1e9:.0f} billion ",
        f"| text tokens | {counts['text tokens in total'] / 1e9:.0f} billion",
        f"at 12 % MFU | {plan['seconds per step'][0]} s ",
        f"nothing overlaps with it | {shares[1]} % ",
        f"at 12 % MFU | {hours:.1f} hours, {16 * hours:.0f} GPU-hours ",
    ):
        assert figure in page, figure
