import json

import numpy as np
from matplotlib import image
from matplotlib.colors import to_rgb

from finetune.trainer.plots import plot_confusion, plot_learning_curves
from xlpre.common.plots import COLORS


def test_special_characters_in_a_label_are_not_read_as_markup(tmp_path):
    labels = ["$", "$$", r"$\nothing$", "50 % of a_b^c"]
    plot_confusion(tmp_path / "confusion.png", np.arange(4), np.arange(4), labels)
    assert (tmp_path / "confusion.png").read_bytes()[:4] == b"\x89PNG"


def test_characters_without_a_font_give_one_warning(tmp_path, capfd, recwarn):
    plot_confusion(tmp_path / "confusion.png", np.arange(2), np.arange(2), ["\U0010fffd", "\U0010fffc"])
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "warning" in lines[0] and "\U0010fffc\U0010fffd" in lines[0]
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_the_loss_of_a_run_with_a_single_metrics_line_is_plotted(tmp_path):
    lines = [{"step": 0, "dev/accuracy": 0.5}, {"step": 6, "dev/accuracy": 0.6}, {"step": 6, "loss": 0.7, "lr": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot_learning_curves(tmp_path / "curves.png", [tmp_path], "dev/accuracy")
    is_line = np.isclose(image.imread(tmp_path / "curves.png")[..., :3], to_rgb(COLORS[0]), atol=0.02).all(-1)
    left, _ = np.hsplit(is_line, [is_line.shape[1] // 2])
    assert left.any()
