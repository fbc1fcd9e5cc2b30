import json

from tests.conftest import has_bf16
from tests.integration.conftest import run
from xlpre.conversion.model_folder import load_folder
from xlpre.training.metrics import read_metrics

ABLATIONS = [
    {"model__mem_len": 0},
    {"objective__max_span": 1},
    {"objective__span_ends": "as_released"},
    {"data__bidirectional": "false"},
    {"data__pairs": "false"},
    {"objective__name": "denoising"},
    {"objective__name": "causal", "data__reuse_len": 32},
    {"model__relative_segments": "false"},
    {"model__untie_r": "false"},
    {"model__positions": "shaw", "model__n_positions": 24},
    {"model__positions": "sinusoidal"},
    {"model__positions": "learned", "model__n_positions": 48},
    {"model__norm": "pre"},
    {"model__feed_forward": "swiglu"},
    {"model__attention_span": "same_length"},
    {"model__cutoffs": "[60,150]", "model__div_value": 2},
    {"model__cutoffs": "[60,150]", "model__div_value": 2, "deepspeed.zero_optimization.stage": 3},
    {"model__tie_embedding": "false", "deepspeed.zero_optimization.stage": 3},
    {"model__d_embed": 12, "deepspeed.zero_optimization.stage": 3},
    {"memory__initial": "zeros"},
    *([{"train__precision": "bf16"}] if has_bf16() else []),
    {"train__hours": 0.0001},
    {"objective__next_sentence": "true"},
    {"objective__next_sentence": "true", "deepspeed.zero_optimization.stage": 3},
    {"deepspeed.zero_optimization.stage": 2},
    {"deepspeed.zero_optimization.stage": 3},
]


def test_an_ablation_is_one_word(make_args, tmp_path):
    jobs = [make_args(f"run{i}", train__steps=3, **changes) for i, changes in enumerate(ABLATIONS)]
    done = run("tests/integration/several_runs.py", json.dumps(jobs))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    final = {}
    for number, changes in enumerate(ABLATIONS):
        load_folder(tmp_path / f"run{number}" / "model")
        final[str(changes)] = next(x["loss"] for x in reversed(read_metrics(tmp_path / f"run{number}")) if "loss" in x)
    # every word changes what is learned, except memory that starts as zeros or not, which changes one window, and the stages of ZeRO
    assert len(set(final.values())) >= len(ABLATIONS) - 5, final
    assert abs(final[str(ABLATIONS[-1])] - final[str(ABLATIONS[-2])]) < 1e-5
    for word in ("cutoffs", "next_sentence"):
        one, other = (loss for changes, loss in final.items() if word in changes)
        assert abs(one - other) < 1e-5
