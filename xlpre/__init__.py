"""xlpre: permutation language modelling on a Transformer-XL backbone (XLNet, arXiv:1906.08237).

Read the packages in the order of a model's life: `text`, `data`, `objectives`, `model`, `training`, `exchange`.
"""
