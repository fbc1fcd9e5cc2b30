"""Print every setting of a fine-tuning as a Markdown page.

python finetune/settings.py > docs/finetuning_settings.md
"""

from __future__ import annotations

from finetune.config import FinetuneConfig
from xlpre.config.schema_docs import settings_markdown

HEAD = """# Settings of fine-tuning

`finetune/run.py` takes `--config FILE key=value ...`. A file may open with `extends: other.yaml` and changes what that says; the recipe
that it has for the task wins over the rest of it, words on the command line win over both. The resolved settings of a run are in its
folder, `config.yaml`. What `deepspeed` takes and what it does not is said in [configuration.md](configuration.md).

This page is made by `python finetune/settings.py`.

"""


def page() -> str:
    """The page, from the docstrings of the schema."""
    return HEAD + settings_markdown(FinetuneConfig)


if __name__ == "__main__":
    print(page(), end="")
