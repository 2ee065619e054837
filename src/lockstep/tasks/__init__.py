"""The training tasks: each file defines one task's loss and metrics."""

from lockstep.tasks.classification import Classification
from lockstep.tasks.language_model import LanguageModel
from lockstep.tasks.multilabel import Multilabel
from lockstep.tasks.regression import Regression
from lockstep.tasks.segmentation import Segmentation
from lockstep.training.losses import Targets
from lockstep.training.task import Task

__all__ = ["Classification", "LanguageModel", "Multilabel", "Regression", "Segmentation", "Targets", "Task"]
