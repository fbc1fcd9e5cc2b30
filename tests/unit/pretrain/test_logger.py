from pretrain.trainer.logger import progress

LINE = {
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


def test_a_line_of_progress_says_loss_speed_use_time_and_memory():
    assert progress(LINE) == (
        "loss 4.213, lr 1.0e-04, 31,204 tokens/s (5,201 targets/s), MFU 41.2 %, 2 h 13 min left, 38.1 GB"
    )


def test_skipped_updates_are_said_where_there_are_any():
    assert progress({**LINE, "skipped_steps": 1}).endswith(" GB, 1 update skipped")
    assert progress({**LINE, "skipped_steps": 3}).endswith(" GB, 3 updates skipped")


def test_the_loss_of_an_auxiliary_head_is_said_where_there_is_one():
    assert progress({**LINE, "next_sentence_loss": 0.6931}).startswith(
        "loss 4.213, next sentence loss 0.693, lr 1.0e-04, "
    )


def test_operations_are_said_where_the_peak_is_not_known():
    assert "(5,201 targets/s), 12.3 GFLOP/s, " in progress({**LINE, "mfu": None, "flops_per_second": 1.234e10})


def test_a_loss_that_is_no_number_can_be_said():
    assert progress({**LINE, "loss": float("nan")}).startswith("loss nan, ")


def test_a_line_of_a_large_run_fits_120_columns():
    large = {"tokens_per_second": 4e6, "targets_per_second": 6.7e5, "peak_memory_bytes": 1.391e11, "eta_seconds": 1e6}
    assert len("step 400,000: " + progress({**LINE, **large, "loss": 10.4})) <= 120
