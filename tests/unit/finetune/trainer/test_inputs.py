import dataclasses

import pytest
import torch

from finetune.config import (
    FinetuneConfig,
    TaskModelConfig,
    TaskOptimConfig,
    TaskTrainConfig,
    apply_precedence,
    task_overrides,
)
from finetune.trainer.inputs import RunInputs
from tests.conftest import REPOSITORY, write_folder
from xlpre.config.loader import load_config
from xlpre.text.special_tokens import CLS, SEP


@pytest.fixture
def make_inputs(tokenizer, tmp_path):
    """A function from settings to RunInputs with 20 training examples."""
    write_folder(tmp_path / "model", tokenizer)
    rows = [f"ba {'be ' * number}\t{number % 2}\n" for number in range(20)]
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "".join(rows))
    (tmp_path / "dev.tsv").write_text("text\tlabel\nba\t1\n")
    defaults = ["task=classify", f"init_from={tmp_path / 'model'}", f"data.dir={tmp_path}", "data.train=[train.tsv]"]
    defaults += ["data.dev=[dev.tsv]", "data.text=[text]", "train.global_batch_size=8"]
    return lambda *settings: RunInputs(load_config(FinetuneConfig, None, [*defaults, *settings]))


@pytest.mark.parametrize("missing", ["task", "init_from"])
def test_a_run_without_a_task_or_a_pretrained_model_is_refused_with_an_example(missing):
    config = dataclasses.replace(FinetuneConfig(task="glue/mrpc", init_from="model"), **{missing: None})
    with pytest.raises(ValueError, match=rf"{missing}=null is invalid.*Set {missing}=.*such as"):
        RunInputs(config)


def test_the_folder_of_a_pretraining_run_is_refused(make_inputs, tmp_path):
    (tmp_path / "pretrained/checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="run_dir=.*pretrained is invalid: it is the folder of a pretraining run"):
        make_inputs(f"run_dir={tmp_path / 'pretrained'}")


def test_the_fingerprint_of_the_weights_depends_on_no_number_of_threads(make_inputs):
    inputs, fingerprints, n_threads = make_inputs(), set(), torch.get_num_threads()
    inputs.pretrained.weights["large"] = torch.randn(1 << 20)
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        fingerprints.add(inputs._weights_fingerprint)
        del inputs._weights_fingerprint
    torch.set_num_threads(n_threads)
    inputs.pretrained.weights["large"][5] += 1e-3
    assert len(fingerprints) == 1 and inputs._weights_fingerprint not in fingerprints


def test_epochs_and_the_warmup_ratio_become_numbers_of_steps(make_inputs):
    config = make_inputs("epochs=3", "warmup_ratio=0.25").config
    assert (config.train.steps, config.schedule.warmup_steps) == (8, 2)  # 60 examples in batches of 8
    assert (config.epochs, config.warmup_ratio) == (None, None)


def test_a_number_on_the_command_line_overrides_a_ratio_in_the_file():
    config = FinetuneConfig(epochs=3, warmup_ratio=0.1)
    assert apply_precedence(config, {"train.steps"}) == dataclasses.replace(config, epochs=None)
    assert apply_precedence(config, {"epochs", "optim.lr"}) == config
    file = FinetuneConfig(optim=TaskOptimConfig(lr=3e-4, base_lr=1e-5))
    assert apply_precedence(file, {"optim.base_lr"}).optim.lr is None
    assert apply_precedence(file, {"optim.lr"}) == file
    assert apply_precedence(config, {"train.steps"}, {"epochs"}).epochs is None
    assert apply_precedence(config, {"epochs"}, {"train.steps"}).epochs == 3
    assert apply_precedence(config, (), {"train.steps"}).epochs is None
    with pytest.raises(ValueError, match=r"optim.lr=0.0003 .*optim.base_lr"):
        apply_precedence(file, {"optim.lr", "optim.base_lr"})
    with pytest.raises(ValueError, match=r"warmup_ratio=0.1 .*schedule.warmup_steps.* one of them"):
        apply_precedence(config, {"warmup_ratio", "schedule.warmup_steps"})


def test_the_learning_rate_is_derived_from_the_width_unless_it_is_set(make_inputs):
    assert make_inputs("optim.base_lr=5e-5").config.optim.lr == 3e-4  # d_model=16
    assert make_inputs("optim.lr=3e-5", "optim.base_lr=5e-5").config.optim.lr == 3e-5


@pytest.mark.parametrize("preset", ["classify", "glue", "race", "rank", "squad", "text"])
def test_presets_have_the_published_learning_rate_for_published_widths_and_a_higher_one_for_narrow_models(preset):
    config = load_config(FinetuneConfig, REPOSITORY / f"configs/finetune/{preset}.yaml", [], task_overrides)
    published = {"glue": 5e-5, "squad": 3e-5}.get(preset, 2e-5)
    lrs = [config.optim.derive_lr(width) for width in (1024, 768, 512, 256, 192, 128, 64)]
    assert lrs[:2] == [published, published]
    assert lrs == sorted(lrs) and lrs[2] > published and lrs[4] == lrs[-1] == 3e-4


def test_resolved_settings_resolve_to_themselves(make_inputs):
    config = make_inputs("epochs=3", "warmup_ratio=0.25").config
    assert config.data.labels == ["0", "1"]
    assert RunInputs(config).config == config


def test_max_train_examples_samples_with_the_seed(make_inputs):
    samples = [
        [example.texts for example in make_inputs("data.max_train_examples=5", f"seed={seed}").train.examples]
        for seed in (1, 1, 2)
    ]
    assert len(samples[0]) == 5 and samples[0] == samples[1] != samples[2]


def test_a_test_example_may_be_empty_unless_it_has_a_label(make_inputs, tmp_path):
    (tmp_path / "test.tsv").write_text("index\ttext\n0\t\u200b\n1\t\n2\tba\n")
    (test,) = make_inputs("data.test=[test.tsv]").test
    empty = [feature.rows[0].input_ids.tolist() for feature in test.features[:2]]
    assert empty == [[SEP, CLS]] * 2 and len(test.features) == 3
    (tmp_path / "test.tsv").write_text("label\ttext\n1\t\u200b\n")
    with pytest.raises(ValueError, match=r"test.tsv, line 2"):
        make_inputs("data.test=[test.tsv]")


def test_a_manifest_differs_for_other_examples_weights_and_settings_but_not_for_speed(make_inputs, tmp_path):
    manifest = make_inputs().manifest(1)
    speed = ("train.micro_batch_size=2", "model.attention_backend=reference", "data.forward_overhead_tokens=3")
    assert make_inputs(*speed).manifest(1) == manifest
    assert make_inputs("data.max_train_examples=19").manifest(1)["train_examples"] != manifest["train_examples"]
    (tmp_path / "dev.tsv").write_text("text\tlabel\nba\t0\n")
    assert make_inputs().manifest(1)["dev_examples"] != manifest["dev_examples"]
    assert make_inputs("data.labels=[1, 0]").manifest(1)["labels"] != manifest["labels"]
    assert make_inputs("from_scratch=true").manifest(1)["weights"] == "from_scratch" != manifest["weights"]
    assert make_inputs("model.dropout=0.3").manifest(1)["model"] != manifest["model"]
    assert make_inputs("model.pooling=attn").manifest(1)["model"] != manifest["model"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"weights": "other"}, r"^init_from=.*model is invalid: its weights .* another name, or remove runs/"),
        ({"weights": "from_scratch"}, r"^from_scratch=false is invalid: .* written with from_scratch=true"),
        ({"train_examples": "other"}, r"^run_dir=runs/.* other training examples\. Restore them, .* another name"),
        ({"dev_examples": {}}, r"^run_dir=runs/.* other dev examples\. Restore them, .* another name"),
        ({"seed": 2, "train_examples": "other"}, r"^seed=1 is invalid: .* written with seed=2"),
    ],
)
def test_a_run_with_another_manifest_is_refused_with_a_setting_that_exists(make_inputs, tmp_path, entries, message):
    inputs = make_inputs()
    inputs.check_resumable(tmp_path, inputs.manifest(1), inputs.manifest(1))
    with pytest.raises(ValueError, match=message):
        inputs.check_resumable(tmp_path, {**inputs.manifest(1), **entries}, inputs.manifest(1))


def test_dropout_is_that_of_the_model_folder_unless_it_is_set(make_inputs):
    assert make_inputs().model_config.dropout == 0.0 and make_inputs("model.dropout=0.2").model_config.dropout == 0.2


def test_the_cpu_backend_is_not_compiled():
    with pytest.raises(
        ValueError, match=r"train\.compile=true .*model\.attention_backend=cpu.*model\.attention_backend=auto"
    ):
        FinetuneConfig(model=TaskModelConfig(attention_backend="cpu"), train=TaskTrainConfig(compile=True))
