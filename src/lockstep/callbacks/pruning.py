"""Lets an Optuna study give up a trial whose validations are bad."""

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

from lockstep.errors import Pruned
from lockstep.training.steps import steps_done

STORAGE = "LOCKSTEP_STORAGE"  # of the environment: a URL may hold a password, which no config.yaml should


class Pruning(pl.Callback):
    """Reports each validation to the study, by optimizer steps, and ends the run where its pruner says so.

    Rank 0 talks to the storage, and the others hear what it says. A resumed run reports from its checkpoint on; Optuna keeps
    what it was told first.
    """

    def __init__(self, study: str, trial: int, monitor: str, pruner: Any) -> None:
        self.study_name = study
        self.number, self.monitor, self.pruner = trial, monitor, pruner
        self.trial: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and STORAGE in os.environ:  # else it is resumed by hand, outside of its sweep
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            study = optuna.load_study(study_name=self.study_name, storage=os.environ[STORAGE], pruner=self.pruner)
            (frozen,) = [t for t in study.get_trials(deepcopy=False) if t.number == self.number]
            self.trial = None if frozen.state.is_finished() else optuna.trial.Trial(study, frozen._trial_id)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.stage is not RunningStage.VALIDATING or trainer.state.fn != "fit":
            return
        give_up = False
        if self.trial is not None:
            told = self.trial.storage.get_trial(self.trial._trial_id).intermediate_values
            if steps_done(trainer) not in told:
                self.trial.report(float(trainer.callback_metrics[self.monitor]), steps_done(trainer))
            give_up = self.trial.should_prune()
        if trainer.strategy.broadcast(give_up):
            raise Pruned(f"given up after {steps_done(trainer)} steps: other trials were better by then.")
