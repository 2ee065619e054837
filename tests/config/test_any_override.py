"""Whatever value a key of the schema is given: it is accepted, or refused with a message that names the key; nothing else happens."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config.checks import check, explain
from lockstep.config.compose import CONFIG_ERRORS, compose_config, fixed_keys
from lockstep.config.draft import Draft
from lockstep.config.schema import KEYS
from lockstep.errors import UserError

NUMBERS = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([2**63, 2**64, 1e308, -0.0])
WORDS = st.sampled_from(
    ["abc", "auto", "null", "", "nan", "inf", "true", "a/b", "../x", "é", "x" * 300, "???", "${a}", "${"]
)
PLAIN = st.none() | st.booleans() | NUMBERS | WORDS
ANY = st.recursive(
    PLAIN, lambda e: st.lists(e, max_size=3) | st.dictionaries(st.sampled_from("ab"), e, max_size=2), max_leaves=4
)


OVERRIDES = st.sampled_from(sorted(KEYS)).flatmap(lambda key: st.tuples(st.just(key), st.just(KEYS[key].example) | ANY))


def typed(value: object) -> str:
    """As Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {typed(item)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) and value.isalnum() and value.isascii() else json.dumps(value)


def is_told(override: tuple[str, object], sign: str) -> None:
    key, value = override
    line = ["trainer.accelerator=cpu", f"{sign}{key}={typed(value)}"]
    problems = [*fixed_keys(line)]
    try:
        tree = compose_config("train", line)
    except CONFIG_ERRORS as e:
        problems = explain(e, "train", line)
        assert problems
    else:
        try:
            check(Draft(tree))
        except UserError as e:
            problems += e.problems
    assert all(problem and "\n" not in problem.strip() for problem in problems), problems
    named = any(part in " ".join(problems) for part in (key, *key.rpartition(".")[::2]) if part)
    assert named or not problems, (line, problems)


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_a_key_of_any_value(count):
    few = count == 6  # the same ones each time
    limits = settings(
        max_examples=count, deadline=None, database=None, derandomize=few, suppress_health_check=[HealthCheck.too_slow]
    )
    limits(given(override=OVERRIDES, sign=st.just("++") if few else st.sampled_from(["", "+", "++"]))(is_told))()
