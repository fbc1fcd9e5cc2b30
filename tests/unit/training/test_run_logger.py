from xlpre.training.run_logger import remaining_seconds


def test_the_remaining_time_is_limited_by_the_time_budget():
    assert remaining_seconds(100, 4.0, None) == 25
    assert remaining_seconds(100, 4.0, budget=60.0) == 25
    assert remaining_seconds(100, 4.0, budget=10.0) == 10
    assert remaining_seconds(100, 4.0, budget=-1.0) == 0
    assert remaining_seconds(0, 4.0, None) == 0
