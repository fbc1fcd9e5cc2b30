import pytest

from pretrain.config import PretrainConfig
from pretrain.report import _loss_plot, write_report
from xlpre.config import dump
from xlpre.training.metrics import MetricsLog


def test_a_page_can_be_made_of_a_run_whose_losses_were_not_all_finite(tmp_path):
    dump(PretrainConfig(), tmp_path / "config.yaml")
    log = MetricsLog(tmp_path, 0)
    for step, loss in enumerate((7.0, float("nan"), float("inf"))):
        log.write(step, loss=loss, lr=0.1, tokens_per_second=10.0, tokens=step, seconds=1.0)
        log.write(step, held_out_loss=loss, held_out_unigram=6.0, held_out_accuracy=0.0, tokens=step, seconds=1.0)
    log.close()
    assert "held-out loss<b>nan nats" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("n_points", [1, 2])
def test_a_single_point_of_training_is_seen(n_points):
    trained = [{"tokens": k, "loss": 7.0} for k in range(n_points)]
    measured = [{"tokens": 0, "held_out_loss": 7.0, "held_out_unigram": 6.0}]
    line = _loss_plot("mine", trained, measured, {}).axes[0].lines[0]
    assert line.get_label() == "training" and line.get_marker() == ("o" if n_points == 1 else "None")
