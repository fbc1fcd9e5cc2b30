import pytest
from matplotlib.text import Text

from xlpre.common.plots import legend_label, new_figure, set_log_scale


def test_a_name_that_starts_with_an_underscore_is_in_the_legend():
    figure = new_figure(3, 3)
    axes = figure.subplots()
    for name in ("_no_memory", "base"):
        axes.plot([1, 2], label=legend_label(name))
    assert [text.get_text().strip() for text in axes.legend().get_texts()] == ["_no_memory", "base"]


@pytest.mark.parametrize("axis", ["x", "y"])
def test_the_labels_of_a_logarithmic_axis_are_plain_numbers(axis):
    figure = new_figure(3, 3)
    axes = figure.subplots()
    axes.plot([1, 2_000], [1, 2_000])
    set_log_scale(axes, axis)
    figure.draw_without_rendering()
    texts = {text.get_text() for text in getattr(axes, f"{axis}axis").findobj(Text)}
    assert {"1", "1,000"} <= texts and not any("$" in text for text in texts)
