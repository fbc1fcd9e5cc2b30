"""xlpre: permutation language modelling on a Transformer-XL backbone (XLNet, arXiv:1906.08237).

Read the packages in the order of a model's life: `text`, `data`, `objectives`, `model`, `training`, `exchange`.
"""

import os

# Read once, when torch is loaded. Threads that spin while they wait make a step of two threads 4.9 times as slow on cores that others use
# too (2026-11-22, reports/performance); asleep, they cost nothing that was measured on cores of their own.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
