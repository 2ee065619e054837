"""The steps of Hydra's Optuna sweeper, from which to build a sweep that can be resumed.

hydra-optuna-sweeper 1.4.0rc3 offers only `OptunaSweeper`, which runs a whole sweep from its first trial. Its functions
to parse a search space and to convert a trial into overrides are private. Remove this file when the sweeper resumes a
study's interrupted trials, or makes these steps public: tests/compat/test_optuna_sweeper.py fails then.
"""

from typing import Any

from hydra_plugins.hydra_optuna_sweeper._impl import OptunaSweeperImpl, create_params_from_overrides
from optuna.distributions import BaseDistribution


class SweeperSteps(OptunaSweeperImpl):
    """Hydra's sweeper with public names for its steps."""

    def search_space(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], dict[str, Any], list[str]]:
        """The search space, the values that all trials share, and the keys that are removed."""
        space, fixed, removed = create_params_from_overrides([*self._parse_sweeper_params_config(), *arguments])
        return space, fixed, removed

    overrides_of = OptunaSweeperImpl._configure_trials  # each trial's overrides; the sampler chooses its values here

    def grid(self, space: dict[str, BaseDistribution]) -> dict[str, list[Any]]:
        return {name: list(self._to_grid_sampler_choices(distribution)) for name, distribution in space.items()}
