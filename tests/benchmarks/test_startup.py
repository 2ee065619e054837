"""What a command imports: nothing that it has no use for, and how benchmarks/startup.py finds that out."""

from pathlib import Path

import pytest
import startup
from startup import Import

OF_TORCHVISION = {"PIL"}  # not ours to leave out: it has the types of its annotations
TRACE = """import time: self [us] | cumulative | imported package
import time:       100 |        100 |     deep.inside
import time:       200 |        300 |   deep
import time:        50 |         50 |   other
  a line of a warning
import time:      1000 |       1350 | ours.build
import time:         7 |          7 | late
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, mnist: Path, cache: Path) -> tuple[list[Import], list[Import]]:
    """The imports of a default run until its first step, and those after it."""
    options = [f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.max_steps=2", "trainer.limit_test_batches=1"]
    taken, before, after = startup.run(options, tmp_path_factory.mktemp("startup"), to_the_end=True, tracing=True)
    assert 0 < taken.elapsed_s < startup.TIME_LIMIT_S
    return startup.parse(before), startup.parse(after)


def packages(imports: list[Import]) -> set[str]:
    return {each.package for each in imports}


@pytest.mark.slow
def test_a_default_run_imports_nothing_heavy_that_it_does_not_use(traced):
    before, after = traced
    assert {"torch", "lightning", "hydra", "lockstep"} <= packages(before)
    assert not packages(before) & (set(startup.HEAVY) - OF_TORCHVISION)
    assert not packages(after) & (set(startup.HEAVY) - OF_TORCHVISION)


def test_a_trace_is_read_with_who_imported_what():
    imports = startup.parse(TRACE)
    assert [(i.name, i.depth) for i in imports] == [
        ("deep.inside", 2),
        ("deep", 1),
        ("other", 1),
        ("ours.build", 0),
        ("late", 0),
    ]
    assert imports[1].whole_s == 0.0003
    assert imports[1].own_s == 0.0002
    assert [startup.importer(imports, name) for name in ("deep", "other", "ours", "late", "absent")] == [
        "ours.build", "ours.build", None, None, None,
    ]  # fmt: skip


def test_the_tables_name_the_greatest_and_what_is_too_much():
    imports = startup.parse(TRACE)
    assert startup.imports_table(imports, top=1).splitlines()[2:] == ["| `ours.build` | 0.00 | 0.00 |"]
    assert startup.packages_table(imports, top=2).splitlines()[3] == "| deep | 0.00 | 2 | ours.build |"
    optuna = [Import("optuna", 1.0, 1.0, 1), Import("lightning.late", 1.0, 2.0, 0)]
    heavy = startup.heavy_table(imports, optuna)
    assert "| optuna | no | yes | lightning.late |" in heavy
    assert "| timm | no | no |  |" in heavy


def test_ratios_are_those_of_one_round():
    taken = {name: [startup.Taken(4.0, 2.0), startup.Taken(8.0, 3.0)] for name in (*startup.PROBES, startup.STEP)}
    taken[startup.BASE] = [startup.Taken(2.0, 1.0), startup.Taken(4.0, 1.5)]
    line = next(row for row in startup.times_table(taken).splitlines() if startup.STEP in row)
    assert line == f"| `{startup.STEP}` | 6.00 (4.00 to 8.00) | 2.00 | 2.50 | 2.00 |"
