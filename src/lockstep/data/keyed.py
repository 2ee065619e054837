"""Reproducible random numbers for code that draws them itself, such as a transform: seeds them for each sample."""

import ctypes
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.compat.torch import tell_initial_seed
from lockstep.data.sampler import GOLDEN, mix

MEMBERS, SEARCHED = 64, 10_000  # most objects that are searched for generators: in one container, in total
PLAIN = (str, bytes, int, float, type, ModuleType, np.ndarray, torch.Tensor)
NUMPY: np.random.RandomState = np.random.rand.__self__  # type: ignore[attr-defined]
DEFAULTS = (torch.default_generator, NUMPY, random.random.__self__)  # type: ignore[attr-defined]
TORCH = 0  # the index of torch's default generator
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generator(NamedTuple):
    """A source of random numbers. If `tells` is false, its state cannot be read, so it is seeded for every sample."""

    seed: Callable[[int], Any]
    state: Callable[[], Any] = lambda: None
    restore: Callable[[Any], Any] = lambda _: None
    tells: bool = True
    is_numpy: bool = False  # NumPy's default generator

    def has_drawn(self, old: Any, memory: bytes) -> bool:
        """Whether it has drawn since its state was `old`. `memory`: that of NumPy's default generator at that time."""
        if self.is_numpy and memory and not old["has_gauss"]:
            return memory_of_numpy() != memory
        state = self.state()
        if isinstance(state, torch.Tensor):
            return not torch.equal(state, old)
        # a mapping holds arrays, whose comparison is not one bool
        return pickle.dumps(state) != pickle.dumps(old) if isinstance(state, Mapping) else bool(state != old)


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
    if not isinstance(value, PLAIN) and callable(set_seed := getattr(value, "set_random_seed", None)):
        return Generator(lambda seed: set_seed(seed % 2**32), tells=False)  # albumentations
    return None


def memory_of_numpy() -> bytes:
    """The memory that changes when NumPy's default generator draws. Reading it takes 0.4 us, reading its state 33 us.

    Every draw changes it, unless a normal number is pending.
    """
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(bits.ctypes.state_address, 624 * 4 + 4) if isinstance(bits, np.random.MT19937) else b""


def contents_of(value: Any) -> Iterable[Any]:
    """An object's items, attributes, arguments and closure, and the generators of its class and module."""
    items = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set | deque) else ()
    )
    yield from islice(items, MEMBERS)
    yield from getattr(value, "__dict__", {}).values()
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    yield from (getattr(value, name, None) for name in ("__self__", "__func__", "__defaults__", "__kwdefaults__"))
    yield from (cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != type(cell)())
    module = sys.modules.get(getattr(value if callable(value) else type(value), "__module__", None) or "")
    for names in (*map(vars, type(value).__mro__), getattr(value, "__globals__", {}), vars(module) if module else {}):
        yield from [member for member in names.values() if isinstance(member, KINDS)]


def generators_in(*values: Any) -> list[Generator]:
    """All generators among these objects and, recursively, their contents."""
    generators, seen, queue = [], dict[int, Any](), [*values]
    while queue and len(seen) < SEARCHED:
        value = queue.pop(0)
        if id(value) in seen or value is None or isinstance(value, PLAIN):
            continue
        seen[id(value)] = value
        if generator := generator_of(value):
            generators.append(generator)
        if not isinstance(value, KINDS):
            queue += contents_of(value)
    return generators


class Generators:
    """The default generators of torch, NumPy and Python, and the generators that `holder` contains.

    A generator is seeded for each sample once something has drawn from it or called `torch.initial_seed`; the batch in
    which this happens is reread. Seeding all generators would take 12 us per sample.
    """

    def __init__(self, holder: Any) -> None:
        self.holder, self.used, self.is_first = holder, set[int](), True

    @cached_property
    def all(self) -> list[Generator]:
        """Searched lazily, in the process that reads."""
        generators = generators_in(*DEFAULTS, self.holder)
        self.used = {index for index, generator in enumerate(generators) if not generator.tells}
        return generators

    def __getstate__(self) -> dict[str, Any]:
        return {"holder": self.holder, "used": set(), "is_first": True}

    def each(self, count: int, states: Callable[[], NDArray[np.uint64]], make: Callable[[int], Any]) -> list[Any]:
        """Calls `make` for each index below `count`, with random numbers derived from its entry of `states`.

        Restores the generators of the process afterwards.
        """
        result = self.tried(count, states, make)
        if self.is_first and len(generators_in(*DEFAULTS, self.holder)) > len(self.all):
            del self.all  # the first batch has created a generator, as many datasets do in each worker
            result = self.tried(count, states, make)
        self.is_first = False
        return result

    def tried(self, count: int, states: Callable[[], NDArray[np.uint64]], make: Callable[[int], Any]) -> list[Any]:
        previous_states, memory = [generator.state() for generator in self.all], memory_of_numpy()
        asked = set[int]()
        try:
            while True:
                with tell_initial_seed(lambda: asked.add(TORCH)):
                    result = self.seeded(states(), make) if self.used else [make(index) for index in range(count)]
                unused = {*range(len(self.all))} - self.used
                drawn = {index for index in unused if self.all[index].has_drawn(previous_states[index], memory)}
                drawn |= asked & unused
                if not drawn:
                    return result
                self.used |= drawn
        except BaseException:
            self.used = {*range(len(self.all))}  # any of them may have drawn
            raise
        finally:
            for index in self.used:
                self.all[index].restore(previous_states[index])

    def seeded(self, state_B: NDArray[np.uint64], make: Callable[[int], Any]) -> list[Any]:
        used, result = sorted(self.used), []
        seeds = mix(state_B[:, None] + np.array(used, np.uint64) * GOLDEN).tolist()
        for index, sample_seeds in enumerate(seeds):
            for generator_index, seed in zip(used, sample_seeds, strict=True):
                self.all[generator_index].seed(seed)
            result.append(make(index))
        return result


class IsolatedRandomState:
    """A separate random state for code that draws from time to time, such as a sampler.

    It covers the default generators and those that `holder` contains. Entering the context continues from the state at
    the last exit; leaving it restores the process's own state.
    """

    def __init__(self, seed: int, holder: Any = None) -> None:
        self.all, self.inside = generators_in(*DEFAULTS, holder), list[Any]()
        self.seeds: list[int] = mix(np.arange(len(self.all), dtype=np.uint64) * GOLDEN + np.uint64(seed)).tolist()

    def __enter__(self) -> Self:
        self.outside = [generator.state() for generator in self.all]
        for index, generator in enumerate(self.all):
            generator.restore(self.inside[index]) if self.inside else generator.seed(self.seeds[index])
        return self

    def reader(self, begin: Callable[[], Any]) -> Callable[[int], list[Any]]:
        """A function that returns the next elements of what `begin` returns, up to a number, drawn in this state."""
        with self:
            elements = (element for element in begin())  # calls iter() once: that of a stream may start it again

        def take(count: int) -> list[Any]:
            with self:
                return [*islice(elements, count)]

        return take

    def __exit__(self, *_: object) -> None:
        self.inside = [generator.state() for generator in self.all]
        for generator, state in zip(self.all, self.outside, strict=True):
            generator.restore(state)
