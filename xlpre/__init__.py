"""xlpre: permutation language modelling on a Transformer-XL backbone (XLNet, arXiv:1906.08237).

A model folder is opened by `xlpre.conversion.model_folder.load_folder`; docs/python.md fills blanks with one, takes hidden
states, scores sentences, reads long texts, and trains in a loop of one's own.
Read the packages in the order of a model's life: `text`, `data`, `objectives`, `model`, `training`, `conversion`.
"""

import os

# How often a thread that waits for others looks before it sleeps. The 300,000 times of GNU's OpenMP slow processes that share cores many
# times (docs/performance.md). It is read once, when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
