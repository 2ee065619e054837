"""Names shared by a sweep and the pruning callback of its trials."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

STORAGE = "LOCKSTEP_STORAGE"  # an environment variable: a URL may hold a password, which must not be in config.yaml


def trial_id(storage: "BaseStorage", study_name: str, number: int) -> int:
    """The storage's id of a trial, from its number in the study."""
    return storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(study_name), number)
