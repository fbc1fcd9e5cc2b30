import pytest

from xlpre.training.lr_schedule import ScheduleConfig, learning_rate

DECAYS = ["linear", "cosine", "polynomial", "constant", "warmup_stable_decay"]


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_rises_to_its_peak_and_then_never_rises_again(decay):
    config = ScheduleConfig(warmup_steps=10, decay=decay, min_lr_ratio=0.1)
    rates = [learning_rate(config, 2.0, step, 100) for step in range(101)]
    assert rates[0] == 0 and rates[10] == 2.0 == max(rates)
    assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True))
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(2.0 if decay == "constant" else 0.2)


def test_warmup_stable_decay_stays_at_its_peak_until_the_decay_ratio():
    config = ScheduleConfig(decay="warmup_stable_decay", decay_ratio=0.2)
    rates = [learning_rate(config, 1.0, step, 100) for step in range(101)]
    assert set(rates[:80]) == {1.0} and rates[90] == pytest.approx(0.5)


def test_a_polynomial_of_power_one_is_linear():
    linear, polynomial = ScheduleConfig(), ScheduleConfig(decay="polynomial", power=1.0)
    for step in range(0, 101, 7):
        assert learning_rate(linear, 1.0, step, 100) == pytest.approx(learning_rate(polynomial, 1.0, step, 100))


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_follows_the_clock_where_it_is_ahead_of_the_steps(decay):
    config = ScheduleConfig(decay=decay)
    assert learning_rate(config, 1.0, 10, 100, time_fraction=0.7) == learning_rate(config, 1.0, 70, 100)
    assert learning_rate(config, 1.0, 70, 100, time_fraction=0.1) == learning_rate(config, 1.0, 70, 100)


@pytest.mark.parametrize("decay", DECAYS)
def test_with_a_time_budget_the_decay_starts_at_the_peak_after_the_warmup(decay):
    config = ScheduleConfig(warmup_steps=20, decay=decay)
    by_time = [learning_rate(config, 1.0, step, 10**6, time_fraction=step / 100) for step in range(101)]
    by_steps = [learning_rate(config, 1.0, step, 100) for step in range(101)]
    assert by_time == pytest.approx(by_steps, abs=1e-4)


@pytest.mark.parametrize(
    "setting", [{"warmup_steps": -1}, {"min_lr_ratio": 1.5}, {"power": 0.0}, {"decay_ratio": 0.0}], ids=str
)
def test_an_invalid_schedule_is_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"schedule.{name}={value} is invalid: .* Set schedule.{name}="):
        ScheduleConfig(**setting)
