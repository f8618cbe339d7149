"""The Lightning trainer of a run, for one process or several."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

from kedge.distributed import is_rank_zero
from kedge.training.averaging import Averaging
from kedge.training.callbacks import BestAndLast, History, TrainingProgress, WholeCheckpoints
from kedge.training.compiling import use_repeatable_kernels
from kedge.training.ending import StopsTogether
from kedge.training.layout import Layout
from kedge.training.loggers import open_loggers
from kedge.training.settings import Settings

__all__ = ["make_trainer", "precision_on", "quiet"]

_BESIDE_THE_POINT = (
    ".*does not have many workers.*",  # batches come from memory
    ".*Total length of `list` across ranks is zero.*",  # nothing held out
    ".*LeafSpec.*is deprecated.*",
    ".*smaller than the logging interval.*",
    ".*recommended to use `self.log.*sync_dist=True.*",  # all processes log the same value
    ".*`broadcast_buffers` is deprecated.*",  # its successor came later than our oldest torch
)


def make_trainer(
    settings: Settings,
    layout: Layout,
    folder: Path,
    device: torch.device,
    console: Console,
    *,
    may_rest: bool,
) -> L.Trainer:
    """A trainer that leaves checkpoints and history in `folder`, written by the leader alone.

    `may_rest` says that some steps may leave some weights out.
    """
    wanted = settings.trainer
    use_repeatable_kernels()
    averaging = Averaging(settings.recipe.averaging) if settings.recipe.averaging else None
    callbacks: list[Callback] = [averaging] if averaging else []
    if is_rank_zero():
        callbacks += [TrainingProgress(console), History(folder / "history.csv")]
    callbacks.append(BestAndLast(folder, averaging, keep_every=wanted.keep_every))
    plugins: list[Any] = [WholeCheckpoints()]
    strategy: Any = "auto"
    if layout.processes > 1:
        callbacks.append(StopsTogether())
        plugins.append(TorchElasticEnvironment())
        # Statistics are averaged, not sent around from one process.
        strategy = DDPStrategy(find_unused_parameters=may_rest, broadcast_buffers=False)
    precision: Any = precision_on(device, wanted.precision)
    return L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=layout.devices,
        num_nodes=layout.nodes,
        strategy=strategy,
        precision=precision,
        deterministic=wanted.deterministic,
        benchmark=False,
        max_epochs=settings.recipe.epochs,
        check_val_every_n_epoch=settings.validate_every,
        accumulate_grad_batches=wanted.accumulate,
        callbacks=callbacks,
        plugins=plugins,
        logger=open_loggers(settings.logger, folder) if is_rank_zero() else [],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10**9,
        use_distributed_sampler=False,
    )


def precision_on(device: torch.device, wanted: str) -> str:
    """What the trainer calls the precision."""
    if wanted == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    return wanted


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the trainer's advice to itself where it does not apply here; of several processes, one speaks."""
    names = ("utilities.rank_zero", "accelerators.cuda")
    logs = [logging.getLogger(f"lightning.pytorch.{name}") for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in _BESIDE_THE_POINT:
            warnings.filterwarnings("ignore", message=message)
        if not is_rank_zero():
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
