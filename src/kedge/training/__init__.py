"""Training: encoder and anchors as one module, in a run that can be stopped and resumed."""

from kedge.training.run import Interrupted, kept_epochs, resume_run, start_run
from kedge.training.source import overrides_for
from kedge.training.train import train

__all__ = ["Interrupted", "kept_epochs", "overrides_for", "resume_run", "start_run", "train"]
