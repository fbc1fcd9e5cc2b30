"""xlpre: permutation language modeling with a Transformer-XL backbone (XLNet, arXiv:1906.08237).

`xlpre.conversion.model_folder.load_folder` loads a model folder. docs/python.md shows how to fill blanks, compute hidden states, score
sentences, read long texts, and train in a custom loop.

Packages, from text to trained model: `text`, `data`, `objectives`, `model`, `training`, `conversion`.
"""

import os

# Number of times that a waiting OpenMP thread polls before it sleeps. GNU's default of 300,000 slows down processes that share cores by a
# large factor (docs/performance.md). OpenMP reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
