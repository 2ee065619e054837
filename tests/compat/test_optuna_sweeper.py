"""The private steps of Hydra's Optuna sweeper still do what the names in compat/ say, and are still private."""

import inspect

import optuna
from hydra_plugins.hydra_optuna_sweeper._impl import OptunaSweeperImpl
from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper
from optuna.distributions import CategoricalDistribution, IntDistribution

from lockstep.compat.optuna_sweeper import SweeperSteps


def test_the_steps_are_not_public_and_a_sweep_always_begins_anew():
    """When this fails, see whether compat/optuna_sweeper.py can go."""
    assert {name for name in vars(OptunaSweeper) if not name.startswith("_")} == {"setup", "sweep"}
    assert "n_trials_to_go = self.n_trials" in inspect.getsource(OptunaSweeperImpl.sweep)


def test_the_steps_do_what_they_are_called():
    sweeper = SweeperSteps(None, "maximize", None, None, 1, 1, 1.0, None, {"b": "range(1,4)"})
    space, fixed, removed = sweeper.search_space(["a=choice(x,y)", "c=3", "~d"])
    assert (space, fixed, removed) == (
        {"a": CategoricalDistribution(["x", "y"]), "b": IntDistribution(1, 3)},
        {"c": "3"},
        ["~d"],
    )
    assert sweeper.grid(space) == {"a": ["x", "y"], "b": [1, 2, 3]}
    trial = optuna.create_study().ask()
    ((a, b, *rest),) = sweeper.overrides_of([trial], space, fixed, removed)
    assert {f"b={trial.params['b']}", f"a={trial.params['a']}"} == {a, b}
    assert (rest, trial.user_attrs) == (["c=3", "~d"], {"c": "3"})
