"""The benchmarks run and check what they compare. Their timings are not tested."""

import itertools
import json

import pytest
import torch

from benchmarks.gpu import report, report_summary
from benchmarks.quality import gradients, initial_weights
from benchmarks.speed import scaling
from tests.conftest import has_bf16, write_folder
from tests.integration.conftest import run
from xlpre.conversion.model_folder import load_folder

TINY = {"n_layer": 2, "d_model": 32, "d_inner": 64, "vocab_size": 100}
TINY |= {"window": 32, "mem_len": 16, "reuse_len": 16, "rows": 2}


def json_lines(result):
    """Check the exit status, and return the JSON lines of the output."""
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_a_step_is_compared_with_hugging_face_if_losses_and_gradients_agree():
    shape = {**TINY, "rows": 16, "window": 128, "reuse_len": 64}  # a smaller step needs no new memory
    ours, theirs = json_lines(
        run("benchmarks/speed/step.py", "--config", json.dumps(shape), "--vs", "hf", "--rounds", 2, "--rss")
    )
    assert abs(ours["loss"] - theirs["loss"]) < 1e-4
    assert ours["times_as_fast_as"].keys() == {"hf"} and ours["tokens_per_second"] > 0
    assert ours["step_mb"] > 0 and theirs["step_mb"] > 0
    assert {"impl", "cpu_ms", "wall_ms", "tflops", "mfu", "config", "torch"} <= ours.keys()


@pytest.mark.long
def test_preparing_a_store_is_measured(tmp_path, store):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Ba be bi {number}.\n\n" for number in range(2000)))
    args = ("--vocabulary", store.path / "vocabulary.model", "--text", text, "--times", 1)
    speed, memory = json_lines(run("benchmarks/data/encoding.py", *args))
    assert speed["sentencepiece_mb_per_cpu_second"] > 0 and memory["peak_mb"] > 0


@pytest.mark.long
def test_a_step_in_bf16_is_compared_with_hugging_face():
    shape = {**TINY, "dtype": "bf16", "optimizer": True}
    ours, theirs = json_lines(
        run("benchmarks/speed/step.py", "--config", json.dumps(shape), "--vs", "hf", "--rounds", 1)
    )
    assert abs(ours["loss"] - theirs["loss"]) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("memory", [16, 0])  # without memory, some rows see no key
def test_every_backend_agrees_with_the_reference_with_its_own_dropout_mask(memory):
    shape = {"rows": 1, "heads": 2, "width": 16, "window": 32, "memory": memory, "targets": 5}
    args = [argument for name, value in shape.items() for argument in (f"--{name}", value)]
    lines = json_lines(run("benchmarks/speed/attention.py", *args, "--dropout", 0.1, "--repeats", 1))
    agreeing = {line["backend"] for line in lines if line.get("reproducible") and line["agrees"]}
    assert agreeing == {"reference", "sdpa", "cpu"}
    assert {line["backend"] for line in lines if "forward_ms" in line} == agreeing | {"bare"}


@pytest.mark.long
def test_muon_is_exact_and_sends_the_predicted_bytes(tmp_path):
    out = tmp_path / "muon.jsonl"
    lines = json_lines(run("benchmarks/quality/muon.py", "--out", out))
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    refused = [line for line in lines if line["precision"] == "bf16" and not has_bf16()]
    assert all("no bf16 instructions" in line["failure"] for line in refused)
    ours = [line for line in lines if line["optimizer"] == "xlpre" and line not in refused]
    assert {(line["processes"], line["stage"]) for line in ours} == set(itertools.product((1, 2), (0, 1, 2)))
    for line in ours:
        assert line["sent_bytes"] == line["predicted_bytes"]
        assert max(line[f"{name}_error"] for name in ("update", "skip", "clip", "momentum")) < 1e-5


@pytest.mark.long
def test_building_a_model_from_weights_is_timed():
    config = '{"n_layer": 1, "d_model": 16, "n_head": 2}'
    (line,) = json_lines(run("benchmarks/speed/model_loading.py", "--config", config, "--rounds", 2))
    assert all(len(line[model][clock]) == 2 for model in ("model", "encoder") for clock in ("cpu_s", "wall_s"))
    assert line["n_parameters"] > 32000 * 16


@pytest.mark.long
def test_scores_are_timed_if_they_agree_with_hugging_face():
    lines = json_lines(run("benchmarks/speed/scoring.py", "--texts", 4, "--max-len", 9, "--rounds", 1))
    assert [line["mode"] for line in lines] == ["any-order", "pll", "causal"]
    for line in lines:
        assert line["difference_per_token"] < 1e-3 and line["times_as_fast"].keys() >= {"single", "hf"}


@pytest.mark.long
def test_generation_is_timed_if_cached_logits_agree_with_uncached_ones():
    sizes = ("--lengths", 40, "--mem-len", 16, "--free-len", 4, "--rounds", 1)
    lines = json_lines(run("benchmarks/speed/generation.py", *sizes))
    assert [line["objective"] for line in lines] == ["causal", "permutation"]
    for line in lines:
        assert line["difference"] < 1e-3 and line["tokens_per_second"].keys() == {"cached", "mem_len", "uncached"}


@pytest.mark.long
def test_batches_are_timed_for_each_objective():
    (line,) = json_lines(
        run("benchmarks/data/batches.py", "--tokens", 50_000, "--window", 64, "--rows", 2, "--batches", 1, "--turns", 2)
    )
    rates = line["tokens_per_cpu_second"]
    assert rates["permutation"] > 0 and "permutation with dense masks" in rates


@pytest.mark.long
def test_opening_a_store_is_timed():
    (line,) = json_lines(run("benchmarks/data/open_store.py", "--tokens", 50_000, "--batches", 1))
    assert line["tokens"] == 50_000 and line["seconds_to_open"] > 0


@pytest.mark.long
def test_the_cost_of_checkpoints_is_measured(tmp_path):
    args = ("--tiny", "--checkpoints", 2, "--out", tmp_path / "lines.jsonl")
    (line,) = json_lines(run("benchmarks/reliability/checkpointing.py", *args))
    assert min(line[name] for name in ("waits_s", "lasts_s", "step_s", "checkpoint_mb")) > 0
    assert json.loads((tmp_path / "lines.jsonl").read_text()) == line


@pytest.mark.long
def test_a_failing_or_hanging_part_of_the_gpu_report_is_recorded_and_the_others_run(tmp_path):
    parts = report.Report(tmp_path / "report.json")
    prints = "print('{\"known\": 1}', flush=True); "
    codes = {"good": "1", "bad": "raise ValueError('why')", "hanging": "import time; time.sleep(60)"}
    for name, code in codes.items():
        part = report.Part(name, 5, ["-c", prints + code])
        report.run(part, 1.5 if name == "hanging" else 20, parts)
    results = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [results[name]["status"] for name in codes] == [0, 1, "stopped after 2 s"]
    assert all(part["lines"] == [{"known": 1}] for part in results.values())
    assert "ValueError: why" in results["bad"]["output"][-1]
    assert "bad: status 1" in "\n".join(report_summary.summarize(results))


@pytest.mark.long
def test_some_parts_of_the_gpu_report_run_on_a_cpu(tmp_path):
    parts = ("attention", "windows", "step")
    result = run("benchmarks/gpu/report.py", "--tiny", "--only", *parts, "--out", tmp_path / "report.json")
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert {line["impl"] for line in results["step"]["lines"]} == {"xlpre:cpu", "xlpre:sdpa", "hf"}
    assert [line["window"] for line in results["windows"]["lines"] if line["backward_ms"]] == [16, 32]
    assert "agrees" in result.stdout and "DOES NOT AGREE" not in result.stdout and " x hf" in result.stdout


@pytest.mark.long
def test_all_parts_of_the_gpu_report_run_on_a_cpu(tmp_path):
    result = run("benchmarks/gpu/report.py", "--tiny", "--out", tmp_path / "report.json", timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert all(part.get("status") == 0 or "Triton" in part["skipped"] for part in results.values())
    assert results["pretraining"]["lines"][-1]["passed"]


@pytest.mark.long
def test_a_kv_cache_is_compared_with_a_sliding_window_if_losses_agree():
    sizes = ("--lengths", 8, 20, "--window", 8, "--layers", 2, "--width", 32, "--rounds", 3)
    short, long = json_lines(run("benchmarks/speed/kv_cache.py", *sizes))
    assert max(long["loss_differences"].values()) < 1e-4
    assert long["flop_ratio"] > short["flop_ratio"] > 1


@pytest.mark.long
def test_the_cost_of_a_step_is_measured_as_one_size_grows_and_plotted(tmp_path):
    base = {"window": 32, "mem_len": 16, "d_model": 64, "n_layer": 1, "vocab_size": 50}
    args = ("--base", json.dumps(base), "--values", '{"rows": [8]}', "--rounds", 2)
    result = run("benchmarks/speed/scaling.py", *args)
    (line,) = json_lines(result)
    assert 3 < line["gflop_of_base"] < 4  # position keys are computed once for all rows
    assert min(line[name] for name in ("cpu_ms", "times_base", "step_mb", "planned_mb")) > 0
    plotted = run("benchmarks/speed/scaling.py", "--plot", tmp_path / "scale.png", stdin=result.stdout)
    assert plotted.returncode == 0, plotted.stderr
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_causal_step_has_the_window_whose_cost_is_planned():
    sizes = {"window": 16, "mem_len": 0, "rows": 2, "n_layer": 1, "d_model": 64, "vocab_size": 64}
    batch = scaling.Step({**sizes, "causal": True, "attention": "auto"})._batch
    assert batch.input_ids.shape == batch.targets.shape == (2, 16) and batch.reuse_len == 16
    assert (batch.targets[:, :-1] == batch.input_ids[:, 1:]).all()


@pytest.mark.long
def test_long_windows_are_measured_with_another_backend():
    values = json.dumps({"window": [64]})
    args = ("--sweep", "window", "--attention", "cpu", "--values", values, "--rounds", 1)
    (line,) = json_lines(run("benchmarks/speed/scaling.py", *args))
    assert line["attention"] == "cpu"


@pytest.mark.long
@pytest.mark.parametrize("task", ["glue/mrpc", "squad/1.1"])
def test_a_fine_tuning_step_is_compared_with_hugging_face_if_losses_and_gradients_agree(task):
    shape = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 100}
    args = ["--task", task, "--config", json.dumps(shape), "--rows", 4, "--rounds", 1, "--stage", 1]
    lines = json_lines(run("benchmarks/speed/finetuning.py", *args))
    assert [line["impl"] for line in lines] == ["xlpre", "xlpre-stage-1", "hf", "hf-max"]
    assert max(line["loss"] for line in lines) - min(line["loss"] for line in lines) < 1e-4
    assert all(line["tokens_per_second"] > 0 for line in lines)


@pytest.mark.long
def test_initial_weights_differ_from_the_published_ones_as_described(make_args, tmp_path):
    initial_weights.main([*make_args(), "--out", str(tmp_path / "starts")])
    weights = {path.name: load_folder(path).weights for path in (tmp_path / "starts").iterdir()}
    key = "backbone.layers.0.attention.terms.position.key.weight"
    published = weights["output_bias"]  # which changes the output bias only
    assert torch.equal(weights["position_x8"][key], 8 * published[key])
    n_rows = published[key].size(0) // 2  # of one of two heads
    assert torch.equal(weights["one_local"][key][n_rows:], published[key][n_rows:])
    assert not torch.equal(weights["one_local"][key][:n_rows], published[key][:n_rows])


@pytest.mark.long
def test_gradients_are_measured_and_position_scores_are_flat_without_local_initial_weights(make_args, tmp_path):
    def largest_deviation(*settings):
        out = tmp_path / "gradients.jsonl"
        gradients.main([*make_args(), *settings, "--steps", "1", "2", "--out", str(out)])
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
        assert lines[0]["gradient"]["position key, layer 0"] > 0 and lines[0]["update"]["query, layer 1"] > 0
        return max(lines[0]["position_scores"][0])

    assert largest_deviation("model.init_scheme=local") > 10 * largest_deviation()


@pytest.mark.long
def test_ways_to_read_long_texts_are_compared_on_articles_whose_length_is_no_clue(tokenizer, tmp_path):
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
    result = run(
        "benchmarks/quality/long_documents.py", model, "--race", tmp_path / "RACE", "--seeds", 1, "--max-len", 40,
        "--steps", 2, "--out", "compared", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "compared/results.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == ["truncate", "memory", "windows, mean", "windows, max"]
    assert all(2 * line["accuracy"] == pytest.approx(line["fitting"] + line["longer"]) for line in lines)
    train = [json.loads(line) for line in (tmp_path / "runs/long/compared/train.jsonl").read_text().splitlines()]
    sizes = {
        label: sorted(len(example["text"]) // 250 for example in train if example["label"] == label)
        for label in ("middle", "high")
    }
    assert len(train) == 6 and sizes["middle"] == sizes["high"]
