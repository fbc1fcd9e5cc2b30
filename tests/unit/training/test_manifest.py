import pytest

from xlpre.training import checkpoint

MANIFEST = {"step": 7, "format": 3, "seed": 1, "optim": {"eps": 1e-6, "beta1": 0.9}}
EXPECTED = {"format": 3, "optim": {"eps": 1e-6, "beta1": 0.9}}


@pytest.fixture
def saved(tmp_path):
    (tmp_path / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(MANIFEST))
    return tmp_path


def check(saved, expected):
    checkpoint.check_compatible(saved, checkpoint.read_manifest(saved), expected)


def test_a_manifest_with_the_expected_settings_is_accepted(saved):
    check(saved, EXPECTED)
    assert checkpoint.read_manifest(saved) == MANIFEST


def test_a_setting_that_is_newer_than_the_checkpoint_may_be_off(saved):
    newer = {**EXPECTED, "optim": {**EXPECTED["optim"], "nesterov": False}}
    check(saved, newer)


@pytest.mark.parametrize(
    ("change", "key", "present", "written"),
    [
        ({"optim": {**EXPECTED["optim"], "nesterov": True}}, "optim.nesterov", "true", "false"),
        ({"optim": {"eps": 1e-6, "beta1": 0.8}}, "optim.beta1", "0.8", "0.9"),
        ({"optim": {"eps": 1e-6}}, "optim.beta1", "null", "0.9"),
        ({"seed": 2}, "seed", "2", "1"),
        ({"task": "race"}, "task", "race", "null"),
        ({"train.precision": "bf16"}, "train.precision", "bf16", "null"),
    ],
)
def test_a_changed_setting_is_refused_with_its_key_and_both_values(saved, change, key, present, written):
    message = f"{key}={present} is invalid: .* written with {key}={written}, .* Set {key}={written}, or .* another name"
    with pytest.raises(ValueError, match=message):
        check(saved, {**EXPECTED, **change})


def test_a_checkpoint_of_another_format_is_refused_before_its_settings_are_compared(saved):
    with pytest.raises(ValueError, match=r"another version of xlpre \(in format 3; this version reads format 4\)"):
        check(saved, {"format": 4, "seed": 2})
