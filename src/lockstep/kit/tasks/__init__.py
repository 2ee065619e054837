"""The training tasks: each file defines one task's loss and metrics."""

from lockstep.kit.tasks.checks import Targets as Targets
from lockstep.kit.tasks.classification import Classification as Classification
from lockstep.kit.tasks.language_model import LanguageModel as LanguageModel
from lockstep.kit.tasks.multilabel import Multilabel as Multilabel
from lockstep.kit.tasks.regression import Regression as Regression
from lockstep.kit.tasks.segmentation import Segmentation as Segmentation
