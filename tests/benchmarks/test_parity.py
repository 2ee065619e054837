"""benchmarks/parity.py: how far the strategies agree."""

import parity
import pytest

from lockstep.launch.exits import exit_code


@pytest.mark.full
def test_the_table_of_agreement(cache, forked, monkeypatch, capsys):
    """With some of the setups; docs/measurements/agreement.md has them all."""
    some = [parity.Setup("single", accumulate=2), parity.Setup("fsdp", 2), parity.Setup("ddp", 2, resumed=True)]
    monkeypatch.setattr(parity, "SETUPS", some)
    monkeypatch.setattr("sys.argv", ["parity.py", f"data.cache_dir={cache}"])
    code = exit_code(parity.main)
    out = capsys.readouterr().out
    assert code == 0, out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [r.name for r in parity.RECIPES for _ in parity.setups(r)]
    assert all(float(row[6]) <= recipe.limit for recipe in parity.RECIPES for row in rows if row[0] == recipe.name)
