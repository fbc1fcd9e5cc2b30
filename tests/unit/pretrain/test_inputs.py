"""Inputs of a pretraining run."""

from pretrain.config import PretrainConfig, describe_changes
from pretrain.trainer.inputs import RunInputs
from tests.unit.model.conftest import make_model
from xlpre.data.window_layout import DataConfig
from xlpre.model.config import MemoryConfig, ModelConfig
from xlpre.model.memory import initial_memory
from xlpre.training.config import TrainConfig


def test_pretraining_sees_initial_zeros_until_a_lane_moves_to_another_position(store, tmp_path):
    """As the original does. Memory that a lane left behind at another position stays hidden."""
    n_runs, windows_per_run, losses = 3, 4, {}
    for initial in ("empty", "zeros"):
        config = PretrainConfig(
            name=initial,
            run_dir=str(tmp_path / initial),
            data=DataConfig(store_dir=str(store.path), seq_len=32, reuse_len=16, windows_per_run=windows_per_run),
            model=ModelConfig(n_layer=2, d_model=16, n_head=2, d_inner=24, mem_len=40, dropout=0.0, dropatt=0.0),
            memory=MemoryConfig(initial=initial),
            train=TrainConfig(steps=1, global_batch_size=4),
        )
        inputs = RunInputs(config)
        model = make_model(vocab_size=inputs.weight_init.model_config.vocab_size, mem_len=40)
        memory, losses[initial] = initial_memory(model.config, 4, initial=initial), []
        for step in range(n_runs * windows_per_run):
            loss, memory = model(inputs.loader.batch(step, range(4)), memory)
            losses[initial].append(loss.item())
    is_equal = [empty == zeros for empty, zeros in zip(*losses.values(), strict=True)]
    assert is_equal == [False] * windows_per_run + [True] * (n_runs - 1) * windows_per_run


def test_changed_settings_are_described_as_a_user_writes_them():
    changes = {"train.hours": [1.0, None], "data.pairs": [False, True], "deepspeed": [{}, {"zero_optimization": 1}]}
    assert describe_changes({"settings": changes}) == (
        "train.hours=null (before: 1.0), data.pairs=true (before: false), deepspeed={'zero_optimization': 1} (before: {})"
    )
