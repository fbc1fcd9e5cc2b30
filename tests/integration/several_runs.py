"""Pretrain several times in one process. The last argument is a JSON list of lists of `key=value` overrides."""

import json
import sys

from pretrain.config import PretrainConfig
from pretrain.trainer.trainer import Trainer
from xlpre.config.loader import load_config

for args in json.loads(sys.argv[-1]):
    print(args, flush=True)
    Trainer(load_config(PretrainConfig, None, args)).train()
