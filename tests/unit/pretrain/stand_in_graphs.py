"""A stand-in for CUDA graphs on CPUs. As a script: `pretrain/run.py` with `train.cuda_graphs` as on a GPU, but with the stand-in."""

import torch

import pretrain.run
import pretrain.trainer.trainer
from pretrain.trainer import cuda_graphs
from xlpre.common.cli_main import run_main


class CalledAgain:
    """A stand-in for `cuda_graphs.Graph`, which calls the function again instead of replaying its kernels."""

    def __init__(self, function):
        self._function, self.outputs = function, function()

    def replay(self):
        with torch.enable_grad():
            self.outputs = self._function()


def use_stand_in(patch) -> None:
    """Replace CUDA graphs by the stand-in; `patch` is a function like setattr."""
    patch(cuda_graphs, "Graph", CalledAgain)
    patch(cuda_graphs, "warm_up", lambda function: function())


if __name__ == "__main__":
    use_stand_in(setattr)
    pretrain.trainer.trainer.reason_against_cuda_graphs = lambda *_: ""
    replay, n_replays = CalledAgain.replay, []
    CalledAgain.replay = lambda graph: (n_replays.append(1), replay(graph))
    run_main(pretrain.run.main)
    if n_replays:
        print("CUDA graphs were replayed")
