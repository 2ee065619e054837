"""Lets an Optuna study prune a trial."""

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage

from lockstep.config.formatting import pluralize
from lockstep.errors import TrainingFailed
from lockstep.training.arithmetic import steps_done

STORAGE = "LOCKSTEP_STORAGE"  # an environment variable: a URL may hold a password, which must not be in config.yaml


def trial_id(storage: Any, study_name: str, number: int) -> int:
    """The storage's id of a trial, from its number in the study."""
    return storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(study_name), number)


class Pruned(TrainingFailed):
    """The study's pruner ended this trial."""

    status = "pruned"
    alike = True


class Pruning(Callback):
    """Reports each validation and its optimizer step to the study, and ends the run if the study's pruner decides so.

    Only rank 0 uses the storage. A resumed run reports again from its checkpoint; Optuna keeps the first report of a step.
    """

    def __init__(self, study: str, trial: int, monitor: str, pruner: Any) -> None:
        self.study_name, self.number, self.monitor, self.pruner = study, trial, monitor, pruner
        self.trial: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and STORAGE in os.environ:  # unset when a trial is resumed by hand, outside its sweep
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self.storage = optuna.storages.RDBStorage(os.environ[STORAGE])
            study = optuna.load_study(study_name=self.study_name, storage=self.storage, pruner=self.pruner)
            self.id = trial_id(self.storage, self.study_name, self.number)
            if not self.storage.get_trial(self.id).state.is_finished():
                self.trial = optuna.trial.Trial(study, self.id)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.stage is not RunningStage.VALIDATING or trainer.state.fn != "fit":
            return
        prune = False
        if self.trial is not None:
            if steps_done(trainer) not in self.storage.get_trial(self.id).intermediate_values:
                self.trial.report(float(trainer.callback_metrics[self.monitor]), steps_done(trainer))
            prune = self.trial.should_prune()
        if trainer.strategy.broadcast(prune):
            raise Pruned(f"pruned after {pluralize(steps_done(trainer), 'step')}: other trials were better by then.")
