"""Reproducible random numbers for code that draws them itself, such as a transform: seeds them for each sample."""

import ctypes
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
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
PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
WORDS = 625  # of 32 bits: the state of a Mersenne Twister and its position
DEFAULTS = (torch.default_generator, NUMPY, PYTHON)
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generator(NamedTuple):
    """A source of random numbers, whose `state` stays equal until it draws. If it `tells` none, it is seeded for every sample."""

    seed: Callable[[int], Any]
    state: Callable[[], Any] = lambda: None
    restore: Callable[[Any], Any] = lambda _: None
    tells: bool = True


def generator_of(value: Any) -> Generator | None:
    if isinstance(value, torch.Generator):
        return Generator(
            value.manual_seed,
            lambda: bytes(value.get_state().numpy()),  # torch.equal takes 6 us, bytes of this length 0.1 us
            lambda old: value.set_state(torch.frombuffer(bytearray(old), dtype=torch.uint8)),
        )
    if isinstance(value, np.random.Generator):
        bits, set_state = value.bit_generator, partial(setattr, value.bit_generator, "state")
        # pickled: it may hold arrays, whose comparison is not one bool
        get, put = lambda: pickle.dumps(bits.state), lambda old: set_state(pickle.loads(old))
        return Generator(lambda seed: set_state(type(bits)(seed).state), get, put)
    if isinstance(value, np.random.RandomState):
        return Generator(lambda seed: value.seed(seed % 2**32), partial(numpy_state, value), partial(set_numpy, value))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        own: Any = (python_state, set_python) if value is PYTHON else (value.getstate, value.setstate)
        return Generator(value.seed, *own)
    if not isinstance(value, PLAIN) and callable(set_seed := getattr(value, "set_random_seed", None)):
        return Generator(lambda seed: set_seed(seed % 2**32), tells=False)  # albumentations
    return None


# The default generators of NumPy and Python are read before and after each batch: their own methods take 66 us and 12 us,
# copying their memory 2.7 us and 1.6 us. A batch that draws nothing costs 18 us so, 107 to 149 us by their methods.


def memory_of(value: Any, kind: Any) -> bytes:
    """The fields of an object, as the C type `kind` lays them out."""
    return ctypes.string_at(id(value) + object.__basicsize__, kind.__basicsize__ - object.__basicsize__)


START = NUMPY.get_state(legacy=False)
# of NumPy's generator, if it is a Mersenne Twister and no second normal number of a pair is pending
PLAIN_MEMORY = memory_of(NUMPY, type(NUMPY)) if (START["bit_generator"], START["has_gauss"]) == ("MT19937", 0) else b""


def numpy_state(value: np.random.RandomState) -> bytes:
    if value is NUMPY and memory_of(NUMPY, type(NUMPY)) == PLAIN_MEMORY:
        return ctypes.string_at(np.random.get_bit_generator().ctypes.state_address, 4 * WORDS)  # type: ignore[attr-defined]
    return pickle.dumps(value.get_state(legacy=False))


def set_numpy(value: np.random.RandomState, old: bytes) -> None:
    words = np.frombuffer(old, np.uint32) if len(old) == 4 * WORDS else None
    value.set_state(pickle.loads(old) if words is None else ("MT19937", words[:-1], int(words[-1]), 0, 0.0))


def python_state() -> tuple[bytes, Any]:
    return memory_of(PYTHON, random.Random.__base__), PYTHON.gauss_next


def set_python(old: tuple[bytes, Any]) -> None:
    position, *words = np.frombuffer(old[0], np.uint32)[:WORDS].tolist()
    PYTHON.setstate((3, (*words, position), old[1]))


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
        return vars(Generators(self.holder))

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
        previous_states = [generator.state() for generator in self.all]
        asked = set[int]()
        try:
            while True:
                with tell_initial_seed(lambda: asked.add(0)):  # torch's default generator
                    result = self.seeded(states(), make) if self.used else [make(index) for index in range(count)]
                unused = {*range(len(self.all))} - self.used
                drawn = {index for index in unused if previous_states[index] != self.all[index].state()}
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
