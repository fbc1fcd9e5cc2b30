import json

import numpy as np
from matplotlib import image
from matplotlib.colors import to_rgb

from finetune.trainer.plots import draw_confusion, draw_curves
from xlpre.common.plots import COLOURS


def test_a_label_is_drawn_as_it_is_written(tmp_path):
    labels = ["$", "$$", r"$\nothing$", "50 % of a_b^c"]
    draw_confusion(tmp_path / "confusion.png", np.arange(4), np.arange(4), labels)
    assert (tmp_path / "confusion.png").read_bytes()[:4] == b"\x89PNG"


def test_letters_that_no_font_has_are_told_once(tmp_path, capfd, recwarn):
    draw_confusion(tmp_path / "confusion.png", np.arange(2), np.arange(2), ["\U0010fffd", "\U0010fffc"])
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("warning: no installed font has \U0010fffc\U0010fffd; install one")
    assert not [one for one in recwarn if "Glyph" in str(one.message)]


def test_a_run_too_short_for_a_second_line_of_metrics_has_its_loss_in_the_picture(tmp_path):
    lines = [{"step": 0, "dev/accuracy": 0.5}, {"step": 6, "dev/accuracy": 0.6}, {"step": 6, "loss": 0.7, "lr": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(tmp_path / "curves.png", [tmp_path], "dev/accuracy")
    drawn = np.isclose(image.imread(tmp_path / "curves.png")[..., :3], to_rgb(COLOURS[0]), atol=0.02).all(-1)
    assert np.hsplit(drawn, [drawn.shape[1] // 2])[0].any()
