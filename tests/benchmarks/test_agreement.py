"""benchmarks/agreement.py: how far the strategies agree."""

import agreement
import pytest

from lockstep.launch.exits import exit_code


@pytest.mark.full
def test_the_table_of_agreement(cache, forked, monkeypatch, capsys):
    """With some of the setups; docs/measurements/agreement.md has them all."""
    monkeypatch.setattr(agreement, "SETUPS", [("single", 1, 2), ("fsdp", 2, 1)])
    monkeypatch.setattr("sys.argv", ["agreement.py", "strategies", f"data.cache_dir={cache}"])
    assert exit_code(agreement.main) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    basic, default, norm = agreement.RECIPES
    assert [row[0] for row in rows[2:]] == [basic, basic, default, default, default, norm]
    assert all(float(row[6]) <= agreement.RECIPES[row[0]][2] for row in rows[2:])
