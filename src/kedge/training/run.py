"""One training run: a folder with its configuration, checkpoints, history and, at the end, the model."""

from __future__ import annotations

import errno
import gc
import json
import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from kedge.config.compose import CONFIG, DATASET, build, build_dataset, build_loss, load_config, loss_heads
from kedge.datasets import Dataset, divide
from kedge.encoders import Encoder
from kedge.errors import ConfigError, DataError, TrainingError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from kedge.losses import RetrievalLoss
from kedge.model import Model
from kedge.training.averaging import Averaging
from kedge.training.callbacks import BEST, KEPT, LAST, BestAndLast, History, TrainingProgress, WholeCheckpoints
from kedge.training.compiling import AUTO, compiled, use_repeatable_kernels
from kedge.training.data import Examples, Resident, TrainingData, fits_on
from kedge.training.features import cached_features, class_means
from kedge.training.module import RetrievalTraining
from kedge.training.settings import Settings
from kedge.training.step import Prepare, Step

__all__ = ["Interrupted", "kept_epochs", "resume_run", "start_run"]

_BESIDE_THE_POINT = (
    ".*does not have many workers.*",  # batches come from memory
    ".*Total length of `list` across ranks is zero.*",  # nothing held out
    ".*LeafSpec.*is deprecated.*",
    ".*smaller than the logging interval.*",
)

_console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


class Interrupted(TrainingError):
    """The user stopped the run; its last checkpoint can be resumed."""


def start_run(config: DictConfig, folder: Path) -> Model:
    """Train as `config` says, leave everything in `folder`, return the model."""
    if (folder / CONFIG).exists():
        raise ConfigError(f"{folder} already holds a run: resume it with kedge train --resume {folder}.")
    with _told(folder):
        own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        run = _Run(own, folder)
        # Only now: what cannot be started leaves no folder behind.
        folder.mkdir(parents=True, exist_ok=True)
        known = {"name": run.dataset.name, "fingerprint": run.dataset.fingerprint()}
        (folder / DATASET).write_text(json.dumps(known) + "\n")
        OmegaConf.save(own, folder / CONFIG, resolve=True)
        return run.train()


def resume_run(folder: Path) -> Model:
    """Go on from the last checkpoint in `folder`; a finished run only returns its model."""
    config = load_config(folder / CONFIG)
    with _told(folder):
        return _reopened(config, folder).train(resume=True)


def kept_epochs(folder: Path) -> Iterator[tuple[int, Model]]:
    """The models of those epochs that `trainer.keep_every` kept, with their numbers."""
    config = load_config(folder / CONFIG)
    with _told(folder):
        yield from _reopened(config, folder).kept()


def _reopened(config: DictConfig, folder: Path) -> _Run:
    run = _Run(config, folder)
    known = json.loads((folder / DATASET).read_text())
    if run.dataset.fingerprint() != known["fingerprint"]:
        raise DataError(f"{known['name']} has changed since {folder} was started: train anew.")
    return run


class _Run:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.settings = Settings.from_config(config)
        self.recipe, self.split = self.settings.recipe, self.settings.split
        self.device = _device(self.settings.trainer.accelerator)
        L.seed_everything(self.settings.seed, verbose=False)
        self.dataset: Dataset = build_dataset(config.dataset)
        self.pictures, self.held_out = divide(self.dataset.train, self.split.holdout, self.split.shots, self.split.seed)
        size = self.recipe.size or min(self.dataset.train.size)
        self.encoder, self.loss = self._network(size)
        self.preprocessing = self._preprocessing(size)
        # A GPU's convolutions want the channels last.
        self.layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.encoder.to(memory_format=self.layout)

    def train(self, *, resume: bool = False) -> Model:
        """Fit, then save the best epoch as a model."""
        self._report()
        data = self._data()
        step = self._step()
        module = self._module(step)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("Nothing is left to train: with a frozen encoder this loss needs encoder.head=linear.")
        last = self.folder / LAST
        with _quiet():
            trainer = self._trainer()  # before anything is compiled: it says which kernels may be used
            if self._compiles:
                self._compile(step, module, data)
            self._fit(trainer, module, data, last if resume and last.exists() else None)
        return self._finish(module)

    def kept(self) -> Iterator[tuple[int, Model]]:
        """The model of each kept epoch, in their order; each is gone when the next is asked for."""
        module = self._module(self._step())
        pattern = KEPT.format(0).replace("0000", "*")
        for path in sorted(self.folder.glob(pattern)):
            yield int(path.stem.partition("-")[2]), self._model(path, module).to(self.device)

    def _module(self, step: Step) -> RetrievalTraining:
        return RetrievalTraining(
            step,
            self.recipe,
            head=self.encoder.head,
            bounded=self.encoder.head_kind == "bounded",
            held_out=self.held_out is not None,
            few_shot=self.split.shots is not None,
            seed=self.settings.seed,
        )

    def _network(self, size: int) -> tuple[Encoder, RetrievalLoss]:
        # The loss says which heads suit it, and the encoder's dimension is needed to build the loss.
        heads = loss_heads(self.config.loss)
        head = self.config.encoder.head
        head = heads[0] if head == "auto" else head
        encoder: Encoder = build(self.config.encoder, head=head, image_size=size)
        loss: RetrievalLoss = build_loss(self.config.loss, num_classes=len(self.dataset.classes), dim=encoder.dim)
        if encoder.head_kind not in heads:
            raise ConfigError(f"encoder.head={head} does not suit the loss {loss.name}: use {' or '.join(heads)}.")
        return (encoder.freeze() if self.recipe.freeze else encoder), loss

    def _preprocessing(self, size: int) -> Preprocessing:
        # Only what it was trained with: a frozen encoder was, elsewhere.
        seen = self.recipe.freeze or self.recipe.augmentation.flip
        mirror = self.recipe.mirror and self.dataset.flip and seen
        if not self.recipe.standardise:
            return Preprocessing(size=size, mirror=mirror)
        # timm's models say what they were trained with; torchvision's all had ILSVRC's.
        known: Any = getattr(self.encoder.backbone, "pretrained_cfg", None) or {}
        mean, std = known.get("mean", IMAGENET_MEAN), known.get("std", IMAGENET_STD)
        return Preprocessing(size=size, mean=tuple(mean), std=tuple(std), mirror=mirror)

    def _report(self) -> None:
        """What the user should know before the run starts."""
        if self.dataset.skipped:
            path = self.folder / "skipped.txt"
            lines = "".join(f"{name}: {reason}\n" for name, reason in self.dataset.skipped)
            path.write_text(lines, encoding="utf-8", errors="backslashreplace")
            count = len(self.dataset.skipped)
            _console.print(f"{count} file{'s' * (count > 1)} skipped; which and why: {path}")
        if self.recipe.freeze and self.config.encoder.weights is None:
            _console.print("The frozen encoder has random weights: name some with encoder.weights=…")
        if find_spec("tensorboard") is None:
            _console.print("No TensorBoard log: pip install 'kedge[tensorboard]' for one.")
        kept = f", {len(self.held_out)} held out" if self.held_out is not None else ""
        how = "pictures through a frozen encoder" if self.recipe.freeze else "pictures"
        _console.print(
            f"{self.encoder.name} with {self.loss.name} on {self.dataset.name}: {len(self.pictures):,} {how}{kept}, "
            f"{len(self.dataset.classes)} classes, {self.recipe.epochs} epochs, {self.device.type}"
        )

    def _data(self) -> TrainingData:
        if self.device.type == "cuda":
            # In a sweep, the last run's recorded step holds its memory until it is collected.
            gc.collect()
            torch.cuda.empty_cache()
        train: Examples = self.pictures
        held_out: Examples | None = self.held_out
        if self.recipe.freeze:
            parts = self.encoder, self.preprocessing, self.device
            train = cached_features(self.folder / "features/train.safetensors", self.pictures, *parts)
            if self.held_out is not None:
                held_out = cached_features(self.folder / "features/held_out.safetensors", self.held_out, *parts)
        if self._goes_to_the_device([train] if held_out is None else [train, held_out]):
            train = Resident.of(train, self.device)
            held_out = None if held_out is None else Resident.of(held_out, self.device)
        return TrainingData(
            train,
            held_out,
            batch_size=self.recipe.batch_size,
            seed=self.settings.seed,
            with_reference=type(self.loss).predict is RetrievalLoss.predict,
            for_gpu=self.device.type == "cuda",
        )

    def _goes_to_the_device(self, examples: list[Examples]) -> bool:
        """Whether the pictures live on the device; says so, and why."""
        wanted = self.settings.trainer.data
        if wanted == "auto" and self.device.type == "cpu":
            return False  # a loader would read from the same memory
        fits, why = (wanted == "device", f"trainer.data={wanted}")
        if wanted == "auto":
            fits, why = fits_on(self.device, examples)
        where = "live on the device" if fits else "are read ahead from the host"
        _console.print(f"The training pictures {where} ({why}).")
        return fits

    @property
    def _compiles(self) -> bool:
        wanted = self.settings.trainer.compile
        if self.recipe.freeze or wanted == "off":
            return False
        return wanted != "auto" or self.device.type == "cuda"

    def _compile(self, step: Step, module: RetrievalTraining, data: TrainingData) -> None:
        wanted = self.settings.trainer.compile
        step.to(self.device)
        inputs, labels = (part.to(self.device) for part in data.train.__getitems__(range(data.batch_size)))
        draws = step.draw(inputs, torch.Generator(self.device))
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self._precision)
        _console.print("Compiling the step …")
        mode = AUTO if wanted == "auto" else wanted
        fast = compiled(step, (inputs, labels, draws), mode, scale=module.loss_scale, autocast=autocast)
        module.use(fast)
        if fast.forward is not step:
            how = "and recorded as one launch " if fast.with_gradients else ""
            _console.print(f"The step was compiled {how}in {fast.seconds:.0f} s.")

    @property
    def _precision(self) -> str:
        wanted = self.settings.trainer.precision
        if wanted == "auto":
            return "bf16-mixed" if self.device.type == "cuda" else "32-true"
        return wanted

    def _step(self) -> Step:
        if self.recipe.freeze:
            return Step(self.encoder.head, self.loss, Prepare(_nothing, _as_they_are, _as_they_are), self.recipe.mixing)
        wanted = self.recipe.augmentation
        augmentation = wanted if self.dataset.flip else replace(wanted, flip=False)

        def change(pixels: Tensor, draws: Tensor) -> Tensor:
            images = augmentation.apply(pixels, draws)
            images = self.preprocessing.standardise(self.preprocessing.fit(images))
            return images.contiguous(memory_format=self.layout)

        prepare = Prepare(augmentation.draw, change, self.preprocessing.normalise)
        return Step(self.encoder, self.loss, prepare, self.recipe.mixing, mirror=self.preprocessing.mirror)

    def _fit(self, trainer: L.Trainer, module: RetrievalTraining, data: TrainingData, checkpoint: Path | None) -> None:
        try:
            with _heard(module):
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except (KeyboardInterrupt, SystemExit):
            # The trainer turns Ctrl-C into an exit of its own.
            if not (self.folder / LAST).exists():
                raise Interrupted("Stopped before the first epoch ended: there is nothing to resume.") from None
            done = f"{module.saved_epochs} of {trainer.max_epochs} epochs"
            raise Interrupted(f"Stopped after {done}. Go on with: kedge train --resume {self.folder}") from None

    def _trainer(self) -> L.Trainer:
        wanted = self.settings.trainer
        on_gpu = self.device.type == "cuda"
        precision: Any = self._precision
        use_repeatable_kernels()
        averaging = Averaging(self.recipe.averaging) if self.recipe.averaging else None
        loggers: list[Logger] = []
        if find_spec("tensorboard") is not None:
            loggers.append(TensorBoardLogger(self.folder, name="", version="tensorboard"))
        return L.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            precision=precision,
            deterministic=wanted.deterministic,
            benchmark=False,
            max_epochs=self.recipe.epochs,
            check_val_every_n_epoch=self.settings.validate_every,
            callbacks=[
                *([averaging] if averaging else []),
                TrainingProgress(_console),
                History(self.folder / "history.csv"),
                BestAndLast(self.folder, averaging, keep_every=wanted.keep_every),
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
        model = self._model(self.folder / BEST, module)
        model.save(self.folder / "model")
        return model.to(self.device)

    def _model(self, checkpoint: Path, module: RetrievalTraining) -> Model:
        module.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"])
        make = partial(
            Model,
            self.encoder.eval(),
            classes=self.dataset.classes,
            preprocessing=self.preprocessing,
            classifier=getattr(self.loss, "classifier", None),
            loss=self.loss.name,
        )
        anchors = getattr(self.loss, "anchors", None)
        if not isinstance(anchors, Tensor):
            embed = make(anchors=None).to(self.device).embed_pixels
            anchors = class_means(embed, self.pictures, len(self.dataset.classes))
        return make(anchors=anchors)


def _as_they_are(features: Tensor, draws: Tensor | None = None) -> Tensor:
    del draws
    return features


def _nothing(count: int, chance: torch.Generator, device: torch.device) -> Tensor:
    del chance
    return torch.empty(0, count, device=device)


def _device(accelerator: str) -> torch.device:
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=gpu, but no CUDA GPU is there: use auto or cpu.")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the trainer's advice to itself where it does not apply here."""
    logs = [logging.getLogger(f"lightning.pytorch.{name}") for name in ("utilities.rank_zero", "accelerators.cuda")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in _BESIDE_THE_POINT:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)


@contextmanager
def _heard(module: RetrievalTraining) -> Iterator[None]:
    """Ctrl-C raises wherever Python happens to be, also where that is ignored: then the next step raises again."""
    alone = threading.current_thread() is threading.main_thread()  # no other may ask for signals
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        module.stopped = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the system refuses, in one sentence."""
    try:
        yield
    except OSError as error:
        resume = f" The last checkpoint is intact: then kedge train --resume {folder}"
        kept = resume if (folder / LAST).exists() else ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise TrainingError(f"The disk is full: make room for {folder}.{kept}") from error
        raise TrainingError(f"{error.filename or folder}: {error.strerror or error}.{kept}") from error
