"""Print every setting as a Markdown page.

python pretrain/settings.py > docs/configuration.md
"""

from __future__ import annotations

from pretrain.config import PretrainConfig
from xlpre.config import settings_table

HEAD = """# Settings

Every command of `pretrain/` takes `--config FILE key=value ...`. A file may open with `extends: other.yaml` and changes what that
says; words on the command line win over files. The resolved settings of a run are in its folder, `config.yaml`; `model` is also stored
with the weights.

`deepspeed` is handed to DeepSpeed as it is (`deepspeed.zero_optimization.stage=2`), except for what other keys decide: batch sizes,
accumulation, clipping, precision, optimizer, schedule. A key that DeepSpeed does not ask for is refused.

This page is made by `python pretrain/settings.py`; the defaults are XLNet-Base.

"""


def page() -> str:
    """The page, from the docstrings of the schema."""
    return HEAD + settings_table(PretrainConfig)


if __name__ == "__main__":
    print(page(), end="")
