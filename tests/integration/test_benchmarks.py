"""The benchmarks work; how fast things are is no test."""

import importlib
import json

import pytest
import torch
import yaml

from tests.conftest import REPOSITORY, write_folder
from tests.integration.conftest import run
from xlpre.conversion.model_folder import load_folder

TINY = {"n_layer": 2, "d_model": 32, "d_inner": 64, "vocab_size": 100}
TINY |= {"window": 32, "mem_len": 16, "reuse_len": 16, "rows": 2}


def test_hugging_faces_steps_in_bf16_too():
    shape = {**TINY, "dtype": "bf16", "optimizer": True}
    done = run("benchmarks/speed/step.py", "--config", json.dumps(shape), "--vs", "hf", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    ours, theirs = map(json.loads, done.stdout.splitlines())
    assert abs(ours["loss"] - theirs["loss"]) < 0.05


def test_a_step_is_timed_against_hugging_faces_once_losses_and_gradients_agree():
    # a smaller step fits into what the allocator holds already
    shape = {**TINY, "rows": 16, "window": 128, "reuse_len": 64}
    done = run("benchmarks/speed/step.py", "--config", json.dumps(shape), "--vs", "hf", "--rounds", 2, "--rss")
    assert done.returncode == 0, done.stderr
    ours, theirs = map(json.loads, done.stdout.splitlines())
    assert abs(ours["loss"] - theirs["loss"]) < 1e-4
    assert ours["times_as_fast_as"].keys() == {"hf"} and ours["tokens_per_second"] > 0
    assert ours["step_mb"] > 0 and theirs["step_mb"] > 0


def test_every_backend_agrees_with_the_reference_with_the_dropout_that_it_draws():
    shape = {"rows": 1, "heads": 2, "width": 16, "window": 32, "memory": 16, "targets": 5}
    args = [word for name, value in shape.items() for word in (f"--{name}", value)]
    done = run("benchmarks/speed/attention.py", *args, "--dropout", 0.1, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    lines = list(map(json.loads, done.stdout.splitlines()))
    agreeing = {line["backend"] for line in lines if line.get("reproducible") and line["agrees"]}
    assert agreeing == {"reference", "sdpa", "cpu"}
    assert {line["backend"] for line in lines if "forward_ms" in line} == agreeing | {"bare"}


def test_opening_a_model_folder_is_timed():
    done = run(
        "benchmarks/speed/model_loading.py", "--config", '{"n_layer": 1, "d_model": 16, "n_head": 2}', "--rounds", 2
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert all(len(line[way][clock]) == 2 for way in ("model", "reader") for clock in ("cpu_s", "wall_s"))
    assert line["n_parameters"] > 32000 * 16


@pytest.fixture
def benchmark(monkeypatch):
    """A script of `benchmarks/` as a module."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module


def test_a_part_of_the_report_that_fails_or_hangs_is_recorded_and_takes_nothing_with_it(benchmark, tmp_path):
    gpu = benchmark("gpu")
    report = gpu.Report(tmp_path / "report.json")
    said = 'print(\'{"what is": "known"}\', flush=True); '
    codes = {"good": "1", "bad": "raise ValueError('why')", "hanging": "import time; time.sleep(60)"}
    for name, code in codes.items():
        part = gpu.Part(name, 5, ["-c", said + code])
        gpu.run(part, 1.5 if name == "hanging" else 20, report)
    found = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [found[name]["status"] for name in codes] == [0, 1, "stopped after 2 s"]
    assert all(part["lines"] == [{"what is": "known"}] for part in found.values())
    assert "ValueError: why" in found["bad"]["said"][-1]
    assert "bad: status 1" in "\n".join(gpu.summary(found))


def test_the_report_of_a_gpu_is_made_on_a_processor(tmp_path):
    done = run(
        "benchmarks/gpu/report.py",
        "--tiny",
        "--only",
        "attention",
        "windows",
        "step",
        "--out",
        tmp_path / "report.json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert {line["impl"] for line in parts["step"]["lines"]} == {"xlpre:cpu", "xlpre:sdpa", "hf"}
    assert [line["window"] for line in parts["windows"]["lines"] if line["backward_ms"]] == [16, 32]
    assert "agrees" in done.stdout and "DOES NOT AGREE" not in done.stdout and " x hf" in done.stdout


@pytest.mark.long
def test_the_report_of_a_gpu_goes_all_its_ways_on_a_processor(tmp_path):
    done = run("benchmarks/gpu/report.py", "--tiny", "--out", tmp_path / "report.json", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert all(part.get("status") == 0 or "triton" in part["left_out"] for part in parts.values())
    assert parts["pretraining"]["lines"][-1]["passed"]


def test_reading_with_a_cache_is_timed_against_a_sliding_window_once_losses_and_gradients_agree():
    sizes = ("--lengths", 8, 20, "--window", 8, "--layers", 2, "--width", 32, "--rounds", 3)
    done = run("benchmarks/speed/kv_cache.py", *sizes)
    assert done.returncode == 0, done.stderr
    short, long = map(json.loads, done.stdout.splitlines())
    assert max(long["losses_differ_by"].values()) < 1e-4
    assert long["flop_ratio"] > short["flop_ratio"] > 1


def test_the_cost_of_a_step_is_measured_as_one_size_grows_and_drawn(tmp_path):
    base = {"window": 32, "mem_len": 16, "d_model": 64, "n_layer": 1, "vocab_size": 50}
    done = run("benchmarks/speed/scaling.py", "--base", json.dumps(base), "--values", '{"rows": [8]}', "--rounds", 2)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert 3 < line["gflop_of_base"] < 4  # keys of distances are the same for all rows
    assert min(line[name] for name in ("cpu_ms", "times_base", "step_mb", "planned_mb")) > 0
    assert run("benchmarks/speed/scaling.py", "--plot", tmp_path / "scale.png", stdin=done.stdout).returncode == 0
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_long_windows_are_measured_with_any_attention():
    values = json.dumps({"window": [64]})
    done = run(
        "benchmarks/speed/scaling.py", "--sweep", "window", "--attention", "cpu", "--values", values, "--rounds", 1
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention"] == "cpu"


@pytest.mark.parametrize("task", ["glue/mrpc", "squad/1.1"])
def test_a_fine_tuning_is_timed_against_hugging_faces_once_losses_and_gradients_agree(task):
    shape = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 100}
    args = ["--task", task, "--config", json.dumps(shape), "--rows", 4, "--rounds", 1, "--stage", 1]
    done = run("benchmarks/speed/finetuning.py", *args)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["impl"] for line in lines] == ["xlpre", "xlpre-stage-1", "hf", "hf-max"]
    assert max(line["loss"] for line in lines) - min(line["loss"] for line in lines) < 1e-4
    assert all(line["tokens_per_second"] > 0 for line in lines)


def test_a_pretraining_can_begin_from_starting_values_that_no_setting_has(benchmark, make_args, tmp_path):
    benchmark("starts").main([*make_args(), "--out", str(tmp_path / "starts")])
    weights = {path.name: load_folder(path).weights for path in (tmp_path / "starts").iterdir()}
    key = "backbone.layers.0.attention.terms.position.key.weight"
    plain = weights["output_bias"]
    assert torch.equal(weights["position_x8"][key], 8 * plain[key])
    half = plain[key].size(0) // 2  # of two heads
    assert torch.equal(weights["one_local"][key][half:], plain[key][half:])
    assert not torch.equal(weights["one_local"][key][:half], plain[key][:half])


def test_the_gradients_of_a_pretraining_are_watched_and_position_scores_told_flat_from_not(
    benchmark, make_args, tmp_path
):
    def flatness(*more):
        out = tmp_path / "gradients.jsonl"
        benchmark("gradients").main([*make_args(), *more, "--steps", "1", "2", "--out", str(out)])
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
        assert lines[0]["gradient"]["position key, layer 0"] > 0 and lines[0]["update"]["query, layer 1"] > 0
        return max(lines[0]["position_scores"][0])

    assert flatness("model.init_scheme=local") > 10 * flatness()


def test_a_pretrained_model_is_compared_with_new_weights_and_what_is_done_is_not_done_again(tokenizer, tmp_path):
    model = write_folder(tmp_path / "model", tokenizer)
    (tmp_path / "SST-2").mkdir()
    for name in ("train", "dev"):
        rows = "".join(f"the {'good' if k % 2 else 'bad'} one\t{k % 2}\n" for k in range(12))
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + rows)
    args = [
        "benchmarks/quality/downstream.py",
        "--models",
        f"ours={model}",
        "--glue",
        tmp_path,
        "--tasks",
        "glue/sst-2",
    ]
    args += ["--rates", "1e-3,1e-2", "--examples", 6, "--seeds", 2, "--jobs", 2, "--out", "compared"]
    args += ["train.steps=2", "eval.every=2", "train.global_batch_size=4"]
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "compared/results.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 + 2 and {line["seed"] for line in lines} == {1, 2}
    assert {line["arm"] for line in lines} == {"ours", "random"}
    settings = (tmp_path / "runs/downstream/compared").glob("*/config.yaml")
    assert [yaml.safe_load(path.read_text())["data"]["limit"] for path in settings] == 6 * [6]
    assert "| glue/sst-2 | 6 | dev/accuracy |" in done.stdout
    assert (tmp_path / "compared/scores.png").read_bytes().startswith(b"\x89PNG")
    assert "4 runs, 4 of them finished already" in run(*args, cwd=tmp_path).stdout
    other = run(*args, "optim.weight_decay=0.5", cwd=tmp_path)
    assert other.returncode == 2 and "optim.weight_decay" in other.stderr


@pytest.mark.long
def test_ways_to_read_long_texts_are_compared_on_articles_whose_length_tells_nothing(tokenizer, tmp_path):
    model = write_folder(tmp_path / "model", tokenizer)
    for split, level, lengths in (
        ("train", "middle", (5, 5, 5, 60, 110)),
        ("train", "high", (5, 5, 60, 60, 160)),
        ("dev", "middle", (5, 60)),
        ("dev", "high", (5, 60)),
    ):
        folder = tmp_path / "RACE" / split / level
        folder.mkdir(parents=True)
        for k, n in enumerate(lengths):
            (folder / f"{k}.txt").write_text(json.dumps({"article": f"{level} school " * (n // 2)}))
    done = run(
        "benchmarks/quality/long_documents.py", model, "--race", tmp_path / "RACE", "--seeds", 1, "--max-len", 40,
        "--updates", 2, "--out", "compared", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "compared/results.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == ["cut", "memory", "windows, mean", "windows, max"]
    assert all(2 * line["accuracy"] == pytest.approx(line["fitting"] + line["longer"]) for line in lines)
    train = [json.loads(line) for line in (tmp_path / "runs/long/compared/train.jsonl").read_text().splitlines()]
    sizes = {
        label: sorted(len(one["text"]) // 250 for one in train if one["label"] == label) for label in ("middle", "high")
    }
    assert len(train) == 6 and sizes["middle"] == sizes["high"]


@pytest.mark.long
def test_one_command_goes_from_text_to_what_pretraining_is_worth(text_file, make_args, tmp_path):
    changed = {"data.store_dir", "tokenizer.path", "name", "run_dir"}
    tiny = [word for word in make_args() if word.partition("=")[0] not in changed]
    tiny += [
        "name=tiny",
        "tokenizer.vocab_size=300",
        "text.val_fraction=0.1",
        "train.hours=null",
        "train.steps=4",
        "eval.every=4",
    ]
    command = [
        "benchmarks/quality/end_to_end.py",
        "--config",
        REPOSITORY / "configs/pretrain/small_1gpu.yaml",
        "--text",
        text_file,
    ]
    done = run(*command, "--out", "out", *tiny, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "report.html",
        "loss.png",
    }
    assert load_folder(tmp_path / "runs/tiny/model").provenance["step"] == 4
