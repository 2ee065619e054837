"""What benchmarks/costs.py measures: what the framework costs, and how long a command takes to start."""

import costs
import pytest

from lockstep.machine import process


# What Lightning says of a run of its own.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers", "ignore:GPU available"
)
def test_what_the_framework_costs_is_measured(cache, monkeypatch):
    """The clock of each way begins and ends; a run that is cut short has none."""
    monkeypatch.setattr(costs, "WARM", 2)
    monkeypatch.setattr(process, "is_command", False)  # which the script changes
    more = f"data.cache_dir={cache}"
    ways = {"bare loop": costs.bare_loop(3), "Lightning alone": costs.lightning_alone(3)}
    ways["Lockstep"] = costs.all_of_lockstep(3, more)
    assert all(ms > 0 for ms in ways.values())
    with pytest.raises(IndexError):
        costs.all_of_lockstep(3, more, "trainer.max_steps=4")
    *_, last = costs.overhead_table({name: [ms] for name, ms in ways.items()}).splitlines()
    above_ms = ways["Lockstep"] - ways["bare loop"]
    assert last.startswith("| Lockstep |") and float(last.split("|")[-2]) == pytest.approx(above_ms, abs=0.01)


def test_what_a_save_costs():
    """Of ten steps of a second; saves stop the fourth and seventh for two, and a write slows down the fifth by a half."""
    lengths_s = [1, 1, 1, 3, 1.5, 1, 3, 1, 1, 1]
    marks = [sum(lengths_s[:count], 0.0) for count in range(len(lengths_s) + 1)]
    times = {"steps": marks, "saves": [(3.5, 5.0), (9.0, 11.0)], "writes": [(5.0, 7.0), (11.0, 11.4)]}
    found = costs.save_costs(times, size_gb=2.0)
    assert (found["step"], found["stall"], found["write"]) == (1.0, 2.0, pytest.approx(1.2))
    assert found["cost of a save"] == pytest.approx((2 + 0.5 + 2) / 2)
