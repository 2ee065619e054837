"""benchmarks/overhead.py measures what it says."""

import overhead
import pytest

from lockstep.reporting import console


# What Lightning says of a run of its own.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers", "ignore:GPU available"
)
def test_what_the_framework_costs_is_measured(cache, monkeypatch):
    """The clock of each way begins and ends; a run that is cut short has none."""
    monkeypatch.setattr(overhead, "WARM", 2)
    monkeypatch.setattr(console.out, "_file", None)  # the script turns it elsewhere
    more = f"data.cache_dir={cache}"
    ways = {"bare loop": overhead.bare(3), "Lightning alone": overhead.lightning_alone(3)}
    ways["Lockstep"] = overhead.lockstep(3, more)
    assert all(seconds > 0 for seconds in ways.values())
    assert overhead.lockstep(3, more, "trainer.enable_checkpointing=false") > 0
    assert overhead.lockstep(3, more, "trainer.max_steps=4") == 0
    *_, last = overhead.table({name: [seconds] for name, seconds in ways.items()}).splitlines()
    above = (ways["Lockstep"] - ways["bare loop"]) * 1e3
    assert last.startswith("| Lockstep |") and float(last.split("|")[-2]) == pytest.approx(above, abs=0.01)
