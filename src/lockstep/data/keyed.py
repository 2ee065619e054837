"""The random numbers of code that draws them itself, such as a transform: every generator is seeded anew for each sample."""

import ctypes
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.data.sampler import GOLDEN, mix

MEMBERS, SEARCHED = 64, 10_000  # of objects that are searched for generators: of one container, in all
PLAIN = (str, bytes, int, float, type, ModuleType, np.ndarray, torch.Tensor)
NUMPY: np.random.RandomState = np.random.rand.__self__  # type: ignore[attr-defined]
DEFAULTS = (torch.default_generator, NUMPY, random.random.__self__)  # type: ignore[attr-defined]
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generator(NamedTuple):
    """A source of random numbers. One that `tells` nothing of its state is seeded for every sample."""

    seed: Callable[[int], Any]
    state: Callable[[], Any] = lambda: None
    restore: Callable[[Any], Any] = lambda _: None
    tells: bool = True
    is_numpy: bool = False  # NumPy's default one

    def has_drawn(self, before: Any, memory: bytes) -> bool:
        """Since its state was `before`, and `memory` that of NumPy's default one."""
        if self.is_numpy and memory and not before["has_gauss"]:
            return memory_of_numpy() != memory
        now = self.state()
        if isinstance(now, torch.Tensor):
            return not torch.equal(now, before)
        return pickle.dumps(now) != pickle.dumps(before) if isinstance(now, Mapping) else bool(now != before)  # arrays


def generator_of(value: Any) -> Generator | None:
    if isinstance(value, torch.Generator):
        return Generator(value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits, set_state = value.bit_generator, partial(setattr, value.bit_generator, "state")
        return Generator(lambda seed: set_state(type(bits)(seed).state), lambda: bits.state, set_state)
    if isinstance(value, np.random.RandomState):
        state = partial(value.get_state, legacy=False)
        return Generator(lambda seed: value.seed(seed % 2**32), state, value.set_state, is_numpy=value is NUMPY)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Generator(value.seed, value.getstate, value.setstate)
    if not isinstance(value, PLAIN) and callable(own := getattr(value, "set_random_seed", None)):
        return Generator(lambda seed: own(seed % 2**32), tells=False)  # albumentations
    return None


def memory_of_numpy() -> bytes:
    """What moves as NumPy's default generator draws, in 0.4 us: its state takes 33. Without a pending normal number, whatever it draws."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(bits.ctypes.state_address, 624 * 4 + 4) if isinstance(bits, np.random.MT19937) else b""


def inside(value: Any) -> Iterable[Any]:
    """What an object holds: its items, attributes, arguments and closure; and the generators of its class and of its module."""
    items = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set | deque) else ()
    )
    yield from [*items][:MEMBERS]
    yield from getattr(value, "__dict__", {}).values()
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    yield from (getattr(value, name, None) for name in ("__self__", "__func__", "__defaults__", "__kwdefaults__"))
    yield from (cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != type(cell)())
    module = sys.modules.get(getattr(value if callable(value) else type(value), "__module__", None) or "")
    for names in (*map(vars, type(value).__mro__), getattr(value, "__globals__", {}), vars(module) if module else {}):
        yield from [each for each in names.values() if isinstance(each, KINDS)]


def held(*values: Any) -> list[Generator]:
    """The generators among objects and within what they hold."""
    found, seen, left = [], dict[int, Any](), [*values]
    while left and len(seen) < SEARCHED:
        value = left.pop(0)
        if id(value) in seen or value is None or isinstance(value, PLAIN):
            continue
        seen[id(value)] = value
        if generator := generator_of(value):
            found.append(generator)
        if not isinstance(value, KINDS):
            left += inside(value)
    return found


class Generators:
    """Torch's, NumPy's and Python's default generators, and those that `holder` holds.

    A generator is seeded for each sample from the first time on that something is drawn from it: what was read before then is read
    again. Seeding them all would take 12 us for each sample.
    """

    def __init__(self, holder: Any) -> None:
        self.holder, self.used = holder, set[int]()

    @cached_property
    def all(self) -> list[Generator]:
        """Found in the process that reads."""
        found = held(*DEFAULTS, self.holder)
        self.used = {place for place, each in enumerate(found) if not each.tells}
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"holder": self.holder, "used": set()}

    def each(self, count: int, states: Callable[[], NDArray[np.uint64]], make: Callable[[int], Any]) -> list[Any]:
        """What `make` returns for each of `count` places, by random numbers that follow from `states`, one for each. The process's own are
        as before."""
        before, memory = [generator.state() for generator in self.all], memory_of_numpy()
        try:
            while True:
                result = self.seeded(states(), make) if self.used else [make(place) for place in range(count)]
                rest = {*range(len(self.all))} - self.used
                drawn = {place for place in rest if self.all[place].has_drawn(before[place], memory)}
                if not drawn:
                    return result
                self.used |= drawn
        except BaseException:
            self.used = {*range(len(self.all))}  # whichever moved
            raise
        finally:
            for place in self.used:
                self.all[place].restore(before[place])

    def seeded(self, state_B: NDArray[np.uint64], make: Callable[[int], Any]) -> list[Any]:
        used, result = sorted(self.used), []
        seeds = mix(state_B[:, None] + np.array(used, np.uint64) * GOLDEN).tolist()
        for place, of_sample in enumerate(seeds):
            for number, seed in zip(used, of_sample, strict=True):
                self.all[number].seed(seed)
            result.append(make(place))
        return result


class Apart:
    """A random state of its own for code that draws from time to time, such as a sampler: of the default generators and of those that
    `holder` holds. Entered, it continues where it was left; the process's own state is as before afterwards."""

    def __init__(self, seed: int, holder: Any = None) -> None:
        self.all, self.inside = held(*DEFAULTS, holder), list[Any]()
        self.seeds: list[int] = mix(np.arange(len(self.all), dtype=np.uint64) * GOLDEN + np.uint64(seed)).tolist()

    def __enter__(self) -> Self:
        self.outside = [generator.state() for generator in self.all]
        for place, generator in enumerate(self.all):
            generator.restore(self.inside[place]) if self.inside else generator.seed(self.seeds[place])
        return self

    def __exit__(self, *_: object) -> None:
        self.inside = [generator.state() for generator in self.all]
        for generator, state in zip(self.all, self.outside, strict=True):
            generator.restore(state)
