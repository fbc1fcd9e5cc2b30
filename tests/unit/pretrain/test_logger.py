from pretrain.trainer.logger import format_metrics

METRICS = {
    "loss": 4.2131,
    "lr": 1e-4,
    "tokens_per_second": 31_204.3,
    "targets_per_second": 5_200.7,
    "flops_per_second": 4.07e14,
    "mfu": 0.4116,
    "peak_memory_bytes": 38_120_000_000,
    "skipped_steps": 0,
    "eta_seconds": 7_980.0,
}


def test_a_progress_line_has_loss_speed_utilization_time_and_memory():
    assert format_metrics(METRICS, "cuda") == (
        "loss 4.213, lr 1.0e-04, 31,204 tokens/s (5,201 targets/s), MFU 41.2 %, 2 h 13 min left, 38.1 GB VRAM"
    )


def test_skipped_steps_are_shown_if_there_are_any():
    assert format_metrics({**METRICS, "skipped_steps": 1}, "cuda").endswith(" GB VRAM, 1 step skipped")
    assert format_metrics({**METRICS, "skipped_steps": 3}, "cuda").endswith(" GB VRAM, 3 steps skipped")


def test_the_loss_of_an_auxiliary_head_is_shown():
    assert "loss 4.213, next sentence loss 0.693, " in format_metrics({**METRICS, "next_sentence_loss": 0.6931}, "cuda")


def test_operations_are_shown_if_the_peak_of_the_device_is_unknown():
    line = format_metrics({**METRICS, "mfu": None, "flops_per_second": 1.234e10}, "cuda")
    assert "(5,201 targets/s), 12.3 GFLOP/s, " in line


def test_a_loss_that_is_not_a_number_is_shown():
    assert format_metrics({**METRICS, "loss": float("nan")}, "cuda").startswith("loss nan, ")


def test_a_line_of_a_large_run_fits_120_columns():
    large = {"tokens_per_second": 4e6, "targets_per_second": 6.7e5, "peak_memory_bytes": 1.391e11, "eta_seconds": 1e6}
    assert len("step 400,000: " + format_metrics({**METRICS, **large, "loss": 10.4}, "cuda")) <= 120


def test_memory_of_a_cpu_is_ram():
    assert format_metrics(METRICS, "cpu").endswith("38.1 GB RAM")
