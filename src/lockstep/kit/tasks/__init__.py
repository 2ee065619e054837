"""The training tasks: each file defines one task's loss and metrics."""

from lockstep.kit.task import Targets
from lockstep.kit.tasks.classification import Classification
from lockstep.kit.tasks.language_model import LanguageModel
from lockstep.kit.tasks.multilabel import Multilabel
from lockstep.kit.tasks.regression import Regression
from lockstep.kit.tasks.segmentation import Segmentation

__all__ = ["Classification", "LanguageModel", "Multilabel", "Regression", "Segmentation", "Targets"]
