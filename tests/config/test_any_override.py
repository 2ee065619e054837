"""Whatever value a key of the schema is given: it is accepted, or refused with a message that names the key; nothing else happens."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lockstep.config.checks import check
from lockstep.config.compose import CONFIG_ERRORS, compose_config, explain
from lockstep.config.schema import KEYS

NUMBERS = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([2**63, 2**64, 1e308, -0.0])
WORDS = st.sampled_from(
    ["abc", "auto", "null", "", "nan", "inf", "true", "a/b", "../x", "é", "x" * 300, "???", "${a}", "${"]
)
PLAIN = st.none() | st.booleans() | NUMBERS | WORDS
ANY = st.recursive(
    PLAIN, lambda e: st.lists(e, max_size=3) | st.dictionaries(st.sampled_from("ab"), e, max_size=2), max_leaves=4
)


def wished(key: str) -> SearchStrategy[object]:
    """The example of the key, or anything."""
    example = KEYS[key].example
    return st.just(example) | ANY


OVERRIDES = st.sampled_from(sorted(KEYS)).flatmap(lambda key: st.tuples(st.just(key), wished(key)))


def typed(value: object) -> str:
    """As Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {typed(item)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) and value.isalnum() and value.isascii() else json.dumps(value)


def is_told(key: str, value: object, sign: str) -> None:
    override = f"{sign}{key}={typed(value)}"
    try:
        cfg = compose_config("train", ["trainer.accelerator=cpu", override])
        problems = check(cfg)
    except CONFIG_ERRORS as e:
        problems = explain(e, "train", ["trainer.accelerator=cpu", override])
        assert problems
    for problem in problems:
        assert problem
        assert "\n" not in problem.strip(), problem
    assert not problems or any(part in " ".join(problems) for part in filter(None, (key, *key.rpartition(".")[::2]))), (
        override,
        problems,
    )


@settings(max_examples=6, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(override=OVERRIDES)
def test_a_key_of_any_value(override):
    is_told(*override, "++")


@pytest.mark.slow
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(override=OVERRIDES, sign=st.sampled_from(["", "+", "++"]))
def test_many_keys_of_any_value(override, sign):
    is_told(*override, sign)
