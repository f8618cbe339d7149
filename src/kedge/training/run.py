"""One training run: a folder with its configuration, checkpoints, history and, at the end, the model."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from kedge.datasets import Dataset, Pictures, few_shot, hold_out
from kedge.encoders import Encoder
from kedge.errors import ConfigError, TrainingError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Augmentation, Preprocessing
from kedge.losses import RetrievalLoss
from kedge.model import Model
from kedge.training.callbacks import History, TrainingProgress, checkpoints
from kedge.training.checkpoint import WholeCheckpoints
from kedge.training.compose import CONFIG, build, build_loss, load_config
from kedge.training.data import Examples, TrainingData
from kedge.training.features import cached_features, class_means
from kedge.training.module import RetrievalTraining
from kedge.training.recipe import Recipe, Split

__all__ = ["Interrupted", "resume_run", "start_run"]

_LAST = "checkpoints/last.ckpt"
_BEST = "checkpoints/best.ckpt"

_BESIDE_THE_POINT = (
    ".*does not have many workers.*",  # batches come from memory
    ".*Checkpoint directory.*exists.*",  # a resumed run
    ".*LeafSpec.*is deprecated.*",
    ".*smaller than the logging interval.*",
)

_console = Console(stderr=True)


class Interrupted(TrainingError):
    """The user stopped the run; its last checkpoint can be resumed."""


def start_run(config: DictConfig, folder: Path) -> Model:
    """Train as `config` says, leave everything in `folder`, return the model."""
    if (folder / CONFIG).exists():
        raise ConfigError(f"{folder} already holds a run: resume it with kedge train --resume {folder}.")
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        OmegaConf.save(own, folder / CONFIG, resolve=True)
        return _Run(own, folder).train()


def resume_run(folder: Path) -> Model:
    """Go on from the last checkpoint in `folder`; a finished run only returns its model."""
    config = load_config(folder / CONFIG)
    with _told(folder):
        return _Run(config, folder).train(resume=True)


class _Run:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.recipe = Recipe.from_config(config.recipe)
        self.split = Split.from_config(config.split)
        L.seed_everything(config.seed, verbose=False)
        self.dataset: Dataset = build(config.dataset)
        self._report_skipped()
        self.pictures, self.held_out = self._divide()
        self.preprocessing = self._preprocessing()
        self.encoder, self.loss = self._network()
        self.device = _device(config.trainer.accelerator)
        # A GPU's convolutions want the channels last.
        on_gpu = self.device.type == "cuda"
        self.layout = torch.channels_last if on_gpu else torch.contiguous_format
        self.encoder.to(memory_format=self.layout)

    def train(self, *, resume: bool = False) -> Model:
        """Fit, then save the best epoch as a model."""
        bounded = self.encoder.head_kind == "bounded"
        data = self._data()
        module = RetrievalTraining(
            self.encoder.head if self.recipe.freeze else self.encoder,
            self.loss,
            self.recipe,
            _as_they_are if self.recipe.freeze else self._prepare,
            head=self.encoder.head,
            bounded=bounded,
            held_out=self.held_out is not None,
            few_shot=self.split.shots is not None,
            seed=self.config.seed,
        )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("Nothing is left to train: with recipe=head this loss needs encoder.head=linear.")
        last = self.folder / _LAST
        _console.print(self._headline(len(data.train)), highlight=False, soft_wrap=True)
        with _quiet():
            trainer = self._trainer(module)
        _fit(trainer, module, data, last if resume and last.exists() else None, self.folder)
        return self._finish(module)

    def _report_skipped(self) -> None:
        if self.dataset.skipped:
            path = self.folder / "skipped.txt"
            path.write_text("".join(f"{name}: {reason}\n" for name, reason in self.dataset.skipped))
            count = len(self.dataset.skipped)
            _console.print(f"{count} unreadable picture{'s' * (count > 1)} skipped, listed in {path}.")

    def _divide(self) -> tuple[Pictures, Pictures | None]:
        train = self.dataset.train
        rows, kept = np.arange(len(train)), np.array([], dtype=np.int64)
        if self.split.holdout > 0:
            rows, kept = hold_out(train.labels, self.split.holdout, self.split.seed)
        if self.split.shots is not None:
            rows = rows[few_shot(train.labels[rows], self.split.shots, self.split.seed)]
        return train.subset(rows), train.subset(kept) if len(kept) else None

    def _preprocessing(self) -> Preprocessing:
        size = self.recipe.size or self.dataset.train.size[0]
        if self.recipe.standardise:
            return Preprocessing(size=size, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        return Preprocessing(size=size)

    def _network(self) -> tuple[Encoder, RetrievalLoss]:
        wanted = self.config.loss
        # The loss names the head that suits it, and the encoder's size is needed to build the loss.
        head = self.config.encoder.head
        if head == "auto":
            head = _loss_class(wanted).head
        encoder: Encoder = build(self.config.encoder, head=head, image_size=self.preprocessing.size)
        loss: RetrievalLoss = build_loss(wanted, num_classes=len(self.dataset.classes), dim=encoder.dim)
        return (encoder.freeze() if self.recipe.freeze else encoder), loss

    def _data(self) -> TrainingData:
        train: Examples = self.pictures
        held_out: Examples | None = self.held_out
        if self.recipe.freeze:
            folder = self.folder / "features"
            folder.mkdir(exist_ok=True)
            parts = self.encoder.backbone, self.preprocessing, self.device
            train = cached_features(folder / "train.safetensors", parts[0], self.pictures, *parts[1:])
            if self.held_out is not None:
                held_out = cached_features(folder / "held_out.safetensors", parts[0], self.held_out, *parts[1:])
        return TrainingData(
            train,
            held_out,
            batch_size=self.recipe.batch_size,
            seed=self.config.seed,
            with_reference=type(self.loss).predict is RetrievalLoss.predict,
        )

    def _prepare(self, pixels: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return self.preprocessing.normalise(pixels)
        images = self._augmentation(pixels, generator)
        images = self.preprocessing.standardise(self.preprocessing.fit(images))
        return images.contiguous(memory_format=self.layout)

    @property
    def _augmentation(self) -> Augmentation:
        wanted = self.recipe.augmentation
        return wanted if self.dataset.flip else replace(wanted, flip=False)

    def _trainer(self, module: RetrievalTraining) -> L.Trainer:
        wanted = self.config.trainer
        on_gpu = self.device.type == "cuda"
        precision = wanted.precision
        if precision == "auto":
            precision = "bf16-mixed" if on_gpu else "32-true"
        loggers: list[Logger] = []
        if find_spec("tensorboard") is not None:
            loggers.append(TensorBoardLogger(self.folder, name="", version="tensorboard"))
        return L.Trainer(
            accelerator=wanted.accelerator,
            devices=wanted.devices,
            num_nodes=wanted.num_nodes,
            precision=precision,
            deterministic=wanted.deterministic,
            benchmark=on_gpu and not wanted.deterministic,
            max_epochs=self.recipe.epochs,
            callbacks=[
                TrainingProgress(_console),
                History(self.folder / "history.csv"),
                checkpoints(self.folder / "checkpoints", module),
            ],
            plugins=[WholeCheckpoints()],
            logger=loggers,
            default_root_dir=self.folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=10**9,
        )

    def _finish(self, module: RetrievalTraining) -> Model:
        best = self.folder / (_BEST if self.held_out is not None else _LAST)
        state = torch.load(best, map_location="cpu", weights_only=True)["state_dict"]
        module.load_state_dict(state)
        anchors = getattr(self.loss, "anchors", None)
        if not isinstance(anchors, Tensor):
            count = len(self.dataset.classes)
            anchors = class_means(self.encoder, self.pictures, count, self.preprocessing, self.device)
        model = Model(
            self.encoder.eval(),
            anchors=anchors,
            classes=self.dataset.classes,
            preprocessing=self.preprocessing,
            classifier=getattr(self.loss, "classifier", None),
            loss=self.loss.name,
        )
        model.save(self.folder / "model")
        return model.to(self.device)

    def _headline(self, count: int) -> str:
        kept = f", {len(self.held_out)} held out" if self.held_out is not None else ""
        how = "features of the frozen encoder" if self.recipe.freeze else "pictures"
        return (
            f"{self.encoder.name} with {self.loss.name} on {self.dataset.name}: {count:,} {how}{kept}, "
            f"{len(self.dataset.classes)} classes, {self.recipe.epochs} epochs, {self.device.type}"
        )


def _as_they_are(features: Tensor, generator: torch.Generator | None) -> Tensor:
    del generator
    return features


def _loss_class(node: Any) -> type[RetrievalLoss]:
    from hydra.utils import get_class

    return get_class(node["_target_"])


def _device(accelerator: str) -> torch.device:
    wants_gpu = accelerator in {"auto", "gpu", "cuda"} and torch.cuda.is_available()
    return torch.device("cuda" if wants_gpu else "cpu")


def _fit(
    trainer: L.Trainer, module: RetrievalTraining, data: TrainingData, checkpoint: Path | None, folder: Path
) -> None:
    with _quiet():
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except (KeyboardInterrupt, SystemExit):
            # The trainer turns Ctrl-C into an exit of its own.
            done = trainer.current_epoch
            if not (folder / _LAST).exists():
                raise Interrupted("Stopped before the first epoch ended: there is nothing to resume.") from None
            raise Interrupted(
                f"Stopped after {done} of {trainer.max_epochs} epochs. Go on with: kedge train --resume {folder}"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the trainer's advice to itself where it does not apply here."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in _BESIDE_THE_POINT:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            log.setLevel(level)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """A full disk in one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        kept = f" The last checkpoint is intact: make room, then kedge train --resume {folder}"
        raise TrainingError(
            f"The disk is full: {folder} could not be written.{kept if (folder / _LAST).exists() else ''}"
        ) from error
