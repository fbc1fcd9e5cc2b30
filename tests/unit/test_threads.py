"""How threads wait is said before torch, which reads it once, is loaded."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

WATCH = """
import os, sys
class Watch:
    def find_spec(name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Watch)
"""


def said(module, **environment):
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", f"{WATCH}import {module}"],
        env=kept | environment, cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["pretrain.run", "finetune.run", "finetune.predict", "xlpre.training.engine"])
def test_commands_say_how_often_a_thread_looks_before_it_sleeps(module):
    assert said(module) == "10000"


def test_the_users_word_wins():
    assert said("pretrain.run", GOMP_SPINCOUNT="5") == "5"
    assert said("pretrain.run", OMP_WAIT_POLICY="ACTIVE") == "None"
