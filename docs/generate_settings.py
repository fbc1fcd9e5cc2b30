"""Write the pages of settings, docs/configuration.md and docs/finetuning_settings.md, from the docstrings of the settings.

python docs/generate_settings.py
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from finetune.config import FinetuneConfig  # noqa: E402
from pretrain.config import PretrainConfig  # noqa: E402
from xlpre.config.schema_docs import settings_markdown  # noqa: E402

PRETRAINING = """# Settings of pretraining

After reading this page you can set any part of a pretraining run from a file or the command line.

Commands that prepare text, train, plan or explain take `--config FILE key=value ...`. A file may start with `extends: other.yaml`, with a
path relative to its own folder, and overrides the settings of that file. The command line overrides all files. Each run stores its
resolved settings in `config.yaml` in its folder.

Values are YAML: `key=null`, `key=true`, `key=[a,b]`, `key={a: 1}`. Put a value with brackets, braces, `*` or spaces into quotes, because
some shells interpret them: `'data.train=[train.csv]'`.

`deepspeed` is passed to DeepSpeed unchanged, for example `deepspeed.zero_optimization.stage=2`. Keys that xlpre sets itself are
rejected: batch sizes, accumulation, clipping, precision, optimizer and schedule. So are features that xlpre does not support, and
keys that DeepSpeed does not know. Inside some groups, such as `activation_checkpointing`, `data_types`, `flops_profiler` and
`torch_autocast`, DeepSpeed ignores unknown keys.

The default of `deepspeed.zero_optimization.stage` is 1. It is 0 for a single process in fp32, which has nothing to partition,
unless `zero_optimization`, `data_types`, `torch_autocast` or `compile` is set.
A run can resume with another stage. `--dry-run` prints the stage.

`python docs/generate_settings.py` writes this page.

## Presets

The head of each file in `configs/pretrain` says how to run it, how long it takes, which loss it has reached, and where its values come
from.

{presets}
## All settings

"""

FINETUNING = """# Settings of fine-tuning

After reading this page you can set any part of a fine-tuning run from a file or the command line.

`finetune/run.py` takes `--config FILE key=value ...`. A file may start with `extends: other.yaml`, with a path relative to its own folder,
and overrides the settings of that file. `task_overrides` of the selected task override the rest of the file, but not a file that extends
it. The command line overrides everything. Each run stores its resolved settings in `config.yaml` in its folder.
[configuration.md](configuration.md) explains how values are written, and `deepspeed`.

`python docs/generate_settings.py` writes this page.

"""


def presets_markdown() -> str:
    """Return a table of the presets of pretraining with the first line of each file."""
    rows = [
        f"| `{path.name}` | {path.read_text('utf-8').splitlines()[0].removeprefix('# ')} |\n"
        for path in sorted((DOCS.parent / "configs/pretrain").glob("*.yaml"))
    ]
    return "".join(["| preset | model |\n", "| --- | --- |\n", *rows])


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "configuration.md": PRETRAINING.replace("{presets}", presets_markdown()) + settings_markdown(PretrainConfig),
        "finetuning_settings.md": FINETUNING + settings_markdown(FinetuneConfig),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
