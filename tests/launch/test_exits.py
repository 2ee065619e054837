"""What a command answers to errors that are neither the user's bugs nor its own refusals."""

import pytest

from lockstep.launch.exits import exit_code


def refused_at_import(text: str, file: str) -> None:
    exec(compile(f"raise ValueError({text!r})", file, "exec"), {})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TORCH_LOGS", "nosuch", 'Invalid log settings: nosuch\nFor more info, try TORCH_LOGS="help"'),
        ("TORCH_DISTRIBUTED_DEBUG", "abc", "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."),
    ],
)
def test_a_variable_that_torch_refuses_is_one_message(name, value, text, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert exit_code(lambda: refused_at_import(text, "/x/torch/__init__.py")) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {name}={value} in the environment is refused by torch: ")
    assert line.count("\n") == 1
    assert exit_code(lambda: refused_at_import(text, "/x/mine.py")) == 1  # a bug of the user's
    assert "Traceback" in capsys.readouterr().err
