from types import SimpleNamespace

from finetune.data.examples import Example, Split
from finetune.trainer.trainer import _describe_labels, _describe_overlap


def test_labels_are_printed_with_their_counts_and_those_that_differ_only_in_case_with_a_warning():
    examples = [Example("", (), label, "") for label in (0, 1, 1, 1, 2, 2)]
    counts, warning = _describe_labels(["POS", "neg", "pos", "none"], examples).splitlines()
    assert counts == "labels: neg 3, pos 2, POS 1, none 0"
    assert warning.startswith("warning: ") and warning.endswith("POS and pos.")
    many = _describe_labels([f"l{number}" for number in range(12)], examples)
    assert many.startswith("labels: l1 3, l2 2, l0 1, l3 0, ") and many.endswith(", l9 0, and 2 others\n")


def test_dev_examples_with_the_text_of_a_training_example_are_counted():
    examples = {text: Example("", (text,), 0, "") for text in "abc"}
    train, clean, dirty = (
        Split(name, [examples[x] for x in texts], [])
        for name, texts in (("train", "ab"), ("dev", "c"), ("dev2", "cba"))
    )
    assert _describe_overlap(SimpleNamespace(train=train, dev=[clean])) == ""
    warning = _describe_overlap(SimpleNamespace(train=train, dev=[clean, dirty]))
    assert warning == "warning: 2 of 3 dev2 examples have the text of a training example\n"
