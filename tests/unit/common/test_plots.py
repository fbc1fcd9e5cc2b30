from xlpre.common.plots import legend_label, new_figure


def test_a_name_that_starts_with_an_underscore_is_in_the_legend():
    figure = new_figure(3, 3)
    axes = figure.subplots()
    for name in ("_no_memory", "base"):
        axes.plot([1, 2], label=legend_label(name))
    assert [text.get_text().strip() for text in axes.legend().get_texts()] == ["_no_memory", "base"]
