"""Print every setting as a Markdown page.

python pretrain/settings.py > docs/configuration.md
"""

from __future__ import annotations

from pretrain.config import PretrainConfig
from xlpre.config.schema_docs import settings_markdown

HEAD = """# Settings

Every command of `pretrain/` takes `--config FILE key=value ...`. A file may open with `extends: other.yaml` and changes what that
says; words on the command line win over files. The resolved settings of a run are in its folder, `config.yaml`; `model` is also stored
with the weights.

`deepspeed` is handed to DeepSpeed as it is (`deepspeed.zero_optimization.stage=2`), except for what other keys decide: batch sizes,
accumulation, clipping, precision, optimizer, schedule. A key that DeepSpeed does not ask for is refused.

`deepspeed.zero_optimization.stage` is obeyed. If nothing of ZeRO is set, the stage is 1, or 0 for a process alone in fp32, which has
nothing to share out. A run may go on under another stage; `--dry-run` says which it would be.

This page is made by `python pretrain/settings.py`; the defaults are XLNet-Base.

"""


def page() -> str:
    """The page, from the docstrings of the schema."""
    return HEAD + settings_markdown(PretrainConfig)


if __name__ == "__main__":
    print(page(), end="")
