import numpy as np

from finetune.pictures import draw_confusion


def test_a_label_is_drawn_as_it_is_written(tmp_path):
    labels = ["$", "$$", r"$\nothing$", "50 % of a_b^c"]
    draw_confusion(tmp_path / "confusion.png", np.arange(4), np.arange(4), labels)
    assert (tmp_path / "confusion.png").read_bytes()[:4] == b"\x89PNG"
