"""Print every setting as a Markdown page.

python pretrain/settings.py > docs/configuration.md
"""

from __future__ import annotations

from pretrain.config import PretrainConfig
from xlpre.config import settings_of

HEAD = """# Settings

Every command of `pretrain/` takes `--config FILE key=value ...`. A file may open with `extends: other.yaml` and changes what that
says; words on the command line win over files. The resolved settings of a run are in its folder, `config.yaml`; `model` is also stored
with the weights.

`deepspeed` is handed to DeepSpeed as it is (`deepspeed.zero_optimization.stage=2`), except for what other keys decide: batch sizes,
accumulation, clipping, precision, optimizer, schedule.

This page is made by `python pretrain/settings.py`; the defaults are XLNet-Base.

| key | default | |
| --- | --- | --- |
"""


def page() -> str:
    """The page, from the docstrings of the schema."""
    rows = [f"| `{one.key}` | `{one.default}` | {one.about.replace('|', '/')} |" for one in settings_of(PretrainConfig)]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
