"""benchmarks/parity.py: how far the strategies agree."""

import parity
import pytest

from lockstep.launch.exits import exit_code


@pytest.mark.full
def test_the_table_of_agreement(tmp_path, cache, forked, monkeypatch, capsys):
    """With some of the setups; docs/parity.md has them all."""
    monkeypatch.setattr(
        parity,
        "SETUPS",
        [
            parity.Setup("single", accumulate=2),
            parity.Setup("ddp", 2),
            parity.Setup("fsdp", 2, 2),
            parity.Setup("fsdp", 2),
        ],
    )
    monkeypatch.setattr(parity, "COMMON", [*parity.COMMON, f"data.cache_dir={cache}"])
    monkeypatch.setattr("sys.argv", ["parity.py", "--out", str(tmp_path / "page.md")])
    code = exit_code(parity.main)
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.strip() in (tmp_path / "page.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in out.splitlines()[2:]]
    assert [row[1:4] for row in rows if row[0] == "BasicNet"] == [
        [s.strategy, str(s.world), str(s.accumulate)] for s in parity.SETUPS
    ]
    # rounding: 1e-7, and 1e-6 once it moves a number across a ReLU's zero
    assert all(max(map(float, row[4:6])) <= 5e-6 for row in rows)
    assert max(float(row[6]) for row in rows if row[0] == "BasicNet") <= 5e-6
    assert len(rows) == len(parity.SETUPS) + 2
