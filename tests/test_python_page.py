"""The examples of docs/python.md run as they are written there, one after the other, and its signatures are right."""

import inspect
import re

import conftest
import pytest

import lockstep
from lockstep import ROOT

PAGE = (ROOT / "docs/python.md").read_text()
NAMES = re.findall(r"^## (\w+)\n\n`", PAGE, re.MULTILINE)


def test_every_function_has_its_signature_and_an_example():
    public = {n for n, v in vars(lockstep).items() if inspect.isfunction(v) and v.__module__ == "lockstep"}
    assert set(NAMES) == public
    for name in NAMES:
        written = re.search(rf"^`{name}\((.*?)\) -> ", PAGE, re.MULTILINE)[1]
        given = [str(p).replace("pathlib.", "") for p in inspect.signature(getattr(lockstep, name)).parameters.values()]
        assert [re.sub(r"[\w.]*\bPath\b", "Path", p) for p in given] == [written]
        assert "```python" in PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, cache, forked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    conftest.write_mnist(tmp_path / "data", 640, 103)
    known: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example, known)
    assert known["report"]["status"] == "done"
    assert known["metrics"]["world_size"] == 2
    assert len(known["jobs"]) == 2
    assert known["accuracy"][-1] == known["report"]["val/acc"]
