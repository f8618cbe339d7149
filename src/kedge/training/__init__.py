"""Training: encoder and anchors as one module, in a run that can be stopped and resumed."""

from kedge.training.auto import overrides_for, train
from kedge.training.checkpoint import Interrupted
from kedge.training.run import check_new_folder, kept_epochs, resume_run, start_run

__all__ = ["Interrupted", "check_new_folder", "kept_epochs", "overrides_for", "resume_run", "start_run", "train"]
