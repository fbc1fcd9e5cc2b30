"""The commands on a GPU, compared with the same commands on a CPU.

`make test-gpu` runs these tests. On a machine without a GPU, XLPRE_TEST_DEVICE=cpu compares the CPU with itself, which tests the tests.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPOSITORY, has_fp16
from tests.integration.conftest import call, environment, read_steps, tiny_args
from tests.integration.test_finetuning import write_examples
from tests.integration.test_training import assert_equal_weights
from xlpre.conversion.model_folder import load_folder
from xlpre.training.metrics_writer import read_metrics

DEVICE = os.environ.get("XLPRE_TEST_DEVICE", "")
pytestmark = [
    pytest.mark.skipif(not DEVICE, reason="set XLPRE_TEST_DEVICE=cuda, as `make test-gpu` does"),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPE = {
    "model__d_model": 64,
    "model__d_inner": 128,
    "train__steps": 6,
    "train__save_every": 3,
    "train__save_memory": "all",
}
DROPOUT = {"model__dropout": 0.1, "model__dropatt": 0.1}
OBJECTIVES = {
    "permutation": {},
    "denoising": {"objective__name": "denoising"},
    "causal": {"objective__name": "causal", "data__reuse_len": 32, "model__norm": "pre", "model__final_norm": True},
}
CASES = {
    **OBJECTIVES,
    "fp32": {"train__precision": "fp32", "model__attention_backend": "triton" if DEVICE == "cuda" else "auto"},
    "fp16": {"train__precision": "fp16"},
    "stage 2": {"deepspeed": "{zero_optimization: {stage: 2}}", "objective__next_sentence": True},
    "muon": {"optim__name": "muon", "train__micro_batch_size": 2},
    "offloading": {"deepspeed": "{zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}}"},
}


def run_on(device, script, args):
    """Run a command on a device in a fresh process, and return its output."""
    variables = environment()
    if device == "cuda":
        hidden = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
        variables = {name: x for name, x in variables.items() if name not in hidden}
        variables |= {name: os.environ[name] for name in hidden if name in os.environ}
    command = [sys.executable, str(REPOSITORY / script), *map(str, args)]
    result = subprocess.run(
        command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def pretrain(device, store, folder, name, **changes):
    """Pretrain on a device. Return the losses and gradient norms by step, and the output."""
    output = run_on(device, "pretrain/run.py", tiny_args(store, folder, name, **{**SHAPE, **changes}))
    return {step: values[:2] for step, values in read_steps(folder / name).items()}, output


@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_and_a_resume_do_not_change_a_bit(store, tmp_path, case):
    if case == "fp16" and DEVICE == "cpu" and not has_fp16():
        pytest.skip("this processor has no fp16")
    changes = {**DROPOUT, **CASES[case]}
    eager, _ = pretrain(DEVICE, store, tmp_path, "eager", **changes, train__cuda_graphs=False)
    recorded, output = pretrain(DEVICE, store, tmp_path, "recorded", **changes, train__cuda_graphs=True)
    weights = [load_folder(tmp_path / name / "model") for name in ("eager", "recorded")]
    shutil.rmtree(tmp_path / "recorded/checkpoints/step_00000006")
    resumed, resumed_output = pretrain(DEVICE, store, tmp_path, "recorded", **changes, train__cuda_graphs=True)
    weights.append(load_folder(tmp_path / "recorded/model"))
    assert recorded == eager == resumed and "at step 3" in resumed_output
    assert ("CUDA graphs are not used" in output) == (DEVICE == "cpu")
    for other in weights[1:]:
        assert_equal_weights(weights[0], other)


def test_a_run_with_torch_compile_has_about_the_same_losses(store, tmp_path):
    eager, _ = pretrain(DEVICE, store, tmp_path, "eager")
    compiled, _ = pretrain(DEVICE, store, tmp_path, "compiled", train__compile=True, train__cuda_graphs=True)
    for step, values in eager.items():
        assert compiled[step] == pytest.approx(values, rel=0.03)


@pytest.fixture(scope="module", params=OBJECTIVES)
def model(request, store, tmp_path_factory):
    """A model that was trained on the CPU in fp32."""
    folder = tmp_path_factory.mktemp(request.param)
    run = pretrain("cpu", store, folder, "cpu", train__precision="fp32", optim__lr=3e-3, **OBJECTIVES[request.param])
    return request.param, folder / "cpu", run[0]


def test_training_in_fp32_has_the_losses_of_a_cpu(model, store, tmp_path):
    objective, _, expected = model
    settings = {"train__precision": "fp32", "optim__lr": 3e-3, **OBJECTIVES[objective]}
    losses, _ = pretrain(DEVICE, store, tmp_path, "gpu", **settings)
    for step, values in expected.items():
        assert losses[step] == pytest.approx(values, rel=2e-3)


def on_both(script, *args):
    """Return what a command prints on the device and on the CPU."""
    results = [call(script, *args, "--device", device) for device in (DEVICE, "cpu")]
    assert all(result.returncode == 0 for result in results), results
    return [result.stdout for result in results]


def test_scores_and_losses_are_those_of_a_cpu(model, store, documents, tmp_path):
    objective, run, _ = model
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(line for document in documents[:5] for line in document))
    modes = {"permutation": ("pll", "any-order"), "denoising": ("pll",), "causal": ("causal",)}[objective]
    for mode in modes:
        for prefix in ([], ["--prefix", documents[6][0]]):
            actual, expected = on_both("pretrain/score.py", run, sentences, "--mode", mode, *prefix)
            for line, other in zip(actual.splitlines(), expected.splitlines(), strict=True):
                assert json.loads(line)["log_likelihood"] == pytest.approx(
                    json.loads(other)["log_likelihood"], rel=1e-3
                )
    for mode in {"permutation": ("objective", "any-order"), "denoising": ("objective",), "causal": ("causal",)}[
        objective
    ]:
        arguments = (run, store.path, "--mode", mode, "--max-tokens", "400", "--json")
        actual, expected = (json.loads(text.splitlines()[0]) for text in on_both("pretrain/evaluate.py", *arguments))
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_texts_are_those_of_a_cpu(model, documents):
    objective, run, _ = model
    if objective != "denoising":
        arguments = (run, documents[0][0], "--temperature", "0", "--max-new-tokens", "20")
        actual, expected = on_both("pretrain/generate.py", *arguments)
        assert actual == expected
    if objective != "causal":
        words = documents[0][0].split()
        actual, expected = on_both("pretrain/fill.py", run, " ".join([words[0], "____", *words[2:]]))
        assert [line.split()[0] for line in actual.splitlines()] == [line.split()[0] for line in expected.splitlines()]


def test_fine_tuning_has_the_losses_and_predictions_of_a_cpu(model, documents, tmp_path):
    _, run, _ = model
    write_examples(tmp_path, documents)
    settings = {
        "task": "classify",
        "init_from": run,
        "data.dir": tmp_path,
        "data.train": "[train.tsv]",
        "data.dev": "[dev.tsv]",
        "data.text": "[text]",
        "data.label": "kind",
        "model.dropout": 0.0,
        "model.dropatt": 0.0,
        "optim.lr": 3e-3,
        "train.steps": 6,
        "train.global_batch_size": 16,
        "train.log_every": 1,
        "eval.every": 3,
    }
    losses = {}
    for name, device, precision in (("cpu", "cpu", "fp32"), ("gpu", DEVICE, "fp32"), ("auto", DEVICE, "auto")):
        changed = {**settings, "name": name, "run_dir": tmp_path / name, "train.precision": precision}
        run_on(device, "finetune/run.py", [f"{key}={value}" for key, value in changed.items()])
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name / "seed_1") if "lr" in line]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=5e-3)
    assert losses["auto"] == pytest.approx(losses["cpu"], rel=0.1)
    folder = tmp_path / "gpu"
    texts = [line.split("\t")[0] for line in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    actual, expected = (
        run_on(device, "finetune/predict.py", [folder, tmp_path / "texts.txt"]) for device in (DEVICE, "cpu")
    )
    for line, other in zip(actual.splitlines(), expected.splitlines(), strict=True):
        assert json.loads(line)["prediction"] == json.loads(other)["prediction"]
