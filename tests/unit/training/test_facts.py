import pytest

from xlpre.training import checkpoint


def test_a_run_with_other_facts_is_told_which(tmp_path):
    facts = {"step": 7, "format": 3, "seed": 1, "optim": {"eps": 1e-6, "beta1": 0.9}}
    (tmp_path / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(facts))
    same = {"format": 3, "optim": {"eps": 1e-6, "beta1": 0.9}}
    assert checkpoint.read_manifest(tmp_path, same)["step"] == 7
    assert checkpoint.read_manifest(tmp_path, {**same, "optim": {**same["optim"], "nesterov": False}})["step"] == 7
    for other, message in [
        (
            {"optim": {**same["optim"], "nesterov": True}},
            "was made with optim.nesterov=False, now it is True; put it back",
        ),
        ({"optim": {"eps": 1e-6, "beta1": 0.8}}, "was made with optim.beta1=0.9, now it is 0.8; put it back"),
        ({"seed": 2}, "was made with seed=1, now it is 2; put it back"),
        ({"task": "race"}, "was made with task=None, now it is race"),
        ({"format": 4, "seed": 2}, "was written by another version of xlpre"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoint.read_manifest(tmp_path, {**same, **other})


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ({"precision": "torch.float32"}, {"precision": "torch.bfloat16"}, "train.precision=fp32, now it is bf16"),
        ({"optim": {}}, {"optim": {"muon": {"momentum": 0.9}}}, "optim.name=adamw, now it is muon"),
        ({"optim": {"muon": {"momentum": 0.9}}}, {"optim": {"muon": False}}, "optim.name=muon, now it is adamw"),
        (
            {"optim": {"muon": {"momentum": 0.9}}},
            {"optim": {"muon": {"momentum": 0.8}}},
            "optim.momentum=0.9, now it is 0.8",
        ),
    ],
)
def test_what_must_be_put_back_is_named_as_it_is_set(tmp_path, was, now, message):
    with pytest.raises(ValueError, match=f"was made with {message}; put it back"):
        checkpoint.check_compatible(tmp_path, {"format": 3, **was}, {"format": 3, **now})
