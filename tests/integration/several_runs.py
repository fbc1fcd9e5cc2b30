"""Pretrain several times in one process (or one job): a JSON list of lists of `key=value` words, the last argument."""

import json
import sys

from pretrain.config import PretrainConfig
from pretrain.trainer.loop import pretrain
from xlpre.config.loader import load_config

for words in json.loads(sys.argv[-1]):
    print(words, flush=True)
    pretrain(load_config(PretrainConfig, None, words))
