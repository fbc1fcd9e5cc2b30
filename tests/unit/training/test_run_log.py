from xlpre.training.run_logger import remaining_seconds


def test_what_is_left_is_the_steps_at_the_present_rate_or_less_if_the_hours_end_before():
    assert remaining_seconds(100, 4.0, None) == 25
    assert remaining_seconds(100, 4.0, budget=60.0) == 25
    assert remaining_seconds(100, 4.0, budget=10.0) == 10
    assert remaining_seconds(100, 4.0, budget=-1.0) == 0
    assert remaining_seconds(0, 4.0, None) == 0
