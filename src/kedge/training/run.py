"""One training run: a folder with its configuration, checkpoints, history and, at the end, the model."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from kedge.config.compose import CONFIG, DATASET, build, build_dataset, build_loss, load_config, loss_heads
from kedge.datasets import Dataset, train_val_split
from kedge.distributed import broadcast_object, init_process_group, is_rank_zero, is_torchrun, rank_zero_first
from kedge.encoders import Encoder, pretrained_cfg
from kedge.errors import ConfigError, DataError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from kedge.losses import RetrievalLoss
from kedge.model import Model
from kedge.model.io import described
from kedge.training.callbacks import BEST, KEPT, LAST
from kedge.training.compiling import AUTO, compiled
from kedge.training.data import Examples, Resident, TrainingData, fits_on
from kedge.training.ending import Interrupted, heard, stopped, told
from kedge.training.features import cached_features, class_means
from kedge.training.launching import launch
from kedge.training.layout import ALONE, Layout, device_of, layout_of
from kedge.training.loggers import check_loggers
from kedge.training.module import RetrievalTraining
from kedge.training.settings import Settings
from kedge.training.step import Prepare, Step
from kedge.training.trainer import make_trainer, precision_on, quiet

__all__ = ["Interrupted", "kept_epochs", "resume_run", "run_here", "start_run"]

_console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

_MAY_CHANGE = ("trainer.devices", "trainer.num_nodes", "trainer.accumulate")
"""What a resumed run may be told: on what it goes on, which leaves the outcome as it is."""


def start_run(config: DictConfig, folder: Path) -> Model:
    """Train as `config` says, leave everything in `folder`, return the model."""
    own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    return _run(own, folder, resume=False)


def resume_run(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Model:
    """Go on from the last checkpoint in `folder`; a finished run only returns its model.

    `overrides` may name another number of processes: `["trainer.devices=2"]`. `trust` has classes instantiated that
    are not Kedge's: say it of your own runs only.
    """
    for override in overrides:
        if override.partition("=")[0] not in _MAY_CHANGE:
            known = ", ".join(_MAY_CHANGE)
            raise ConfigError(f"--resume takes the run's own settings, but for {known}: leave out {override}.")
    config = load_config(folder / CONFIG, trust=trust)
    return _run(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))), folder, resume=True)


def kept_epochs(folder: Path, *, trust: bool = False) -> Iterator[tuple[int, Model]]:
    """The models of those epochs that `trainer.keep_every` kept, with their numbers; `trust` as in `resume_run`."""
    config = load_config(folder / CONFIG, trust=trust)
    with told(folder):
        yield from _reopened(config, folder, ALONE).kept()


def _run(config: Any, folder: Path, *, resume: bool) -> Model:
    """Train in this process, or in as many as the configuration asks for."""
    settings = Settings.from_config(config)
    check_loggers(settings.logger)
    layout = layout_of(settings, resumed=resume)
    if layout.processes == 1 or is_torchrun():
        return run_here(config, folder, layout, resume=resume)[1]
    _refuse_to_write_over(folder, resume)
    found = launch(config, folder, layout, resume=resume)
    return Model.load(found / "model").to(device_of(settings.trainer.accelerator))


def run_here(config: DictConfig, folder: Path, layout: Layout, *, resume: bool) -> tuple[Path, Model]:
    """Train in this process, alone or as one of several; returns the run's folder, which is the leader's, and model."""
    init_process_group(device_of(config.trainer.accelerator).type)
    _console.quiet = not is_rank_zero()
    folder = _shared(folder)
    _refuse_to_write_over(folder, resume)
    with told(folder):
        with rank_zero_first():
            run = _reopened(config, folder, layout) if resume else _Run(config, folder, layout)
        if not resume and is_rank_zero():
            # Only now: what cannot be started leaves no folder behind.
            folder.mkdir(parents=True, exist_ok=True)
            known = {"name": run.dataset.name, "fingerprint": run.dataset.fingerprint()}
            (folder / DATASET).write_text(json.dumps(known) + "\n")
            OmegaConf.save(config, folder / CONFIG, resolve=True)
        return folder, run.train(resume=resume)


def _shared(folder: Path) -> Path:
    """The leader's folder: under torchrun, a name with the time in it may differ from process to process."""
    found = Path(broadcast_object(str(folder.resolve())))
    if found != folder.resolve():
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty, as Hydra made it
        return found
    return folder


def _refuse_to_write_over(folder: Path, resume: bool) -> None:
    if not resume and broadcast_object((folder / CONFIG).exists()):
        raise ConfigError(f"{folder} already holds a run: resume it with kedge train --resume {folder}.")


def _reopened(config: DictConfig, folder: Path, layout: Layout) -> _Run:
    run = _Run(config, folder, layout)
    known = json.loads((folder / DATASET).read_text())
    if run.dataset.fingerprint() != known["fingerprint"]:
        raise DataError(f"{known['name']} has changed since {folder} was started: train anew.")
    return run


class _Run:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, folder: Path, layout: Layout) -> None:
        self.config, self.folder, self.layout = config, folder, layout
        self.settings = Settings.from_config(config)
        self.recipe, self.split = self.settings.recipe, self.settings.split
        self.device = device_of(self.settings.trainer.accelerator)
        self.precision = precision_on(self.device, self.settings.trainer.precision)
        L.seed_everything(self.settings.seed, verbose=False)
        # What its loader warns of, the leader tells.
        with contextlib.nullcontext() if is_rank_zero() else contextlib.redirect_stderr(None):
            self.dataset: Dataset = build_dataset(config.dataset)
        self.pictures, self.held_out = train_val_split(
            self.dataset.train, self.split.holdout, self.split.shots, self.split.seed
        )
        published = self._published.get("input_size") if self.recipe.freeze else None
        size = self.recipe.size or (published[-1] if published else min(self.dataset.train.size))
        self.encoder, self.loss = self._network(size)
        self.preprocessing = self._preprocessing(size)
        # A GPU's convolutions want the channels last.
        self.order = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.encoder.to(memory_format=self.order)

    def train(self, *, resume: bool = False) -> Model:
        """Fit, then save the best epoch as a model."""
        self._report()
        data = self._data()
        step = self._step()
        module = self._module(step)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("Nothing is left to train: with a frozen encoder this loss needs encoder.head=linear.")
        last = self.folder / LAST
        with quiet():
            # Before anything is compiled: it says which kernels may be used.
            where = self.folder, self.device, _console
            # What a batch without a pair leaves out, such as proxies.
            may_rest = self.loss.uses_other_samples and any(True for _ in self.loss.parameters())
            trainer = make_trainer(self.settings, self.layout, *where, may_rest=may_rest)
            if self._synchronises:
                TorchSyncBatchNorm().apply(module)
            if self._compiles:
                self._compile(step, module, data)
            self._fit(trainer, module, data, last if resume and last.exists() else None)
        if self._synchronises:
            TorchSyncBatchNorm().revert(module)
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
            layout=self.layout,
        )

    def _network(self, size: int) -> tuple[Encoder, RetrievalLoss]:
        # The loss says which heads suit it, and the encoder's dimension is needed to build the loss.
        heads = loss_heads(self.config.loss)
        head = self.config.encoder.head
        if head == "auto":
            # What a classifier is to read of a frozen encoder has whatever scale it was left with.
            head = "batchnorm" if self.recipe.freeze and "batchnorm" in heads else heads[0]
        encoder: Encoder = build(self.config.encoder, head=head, image_size=size)
        loss: RetrievalLoss = build_loss(self.config.loss, num_classes=len(self.dataset.classes), dim=encoder.dim)
        if encoder.head_kind not in heads:
            raise ConfigError(f"encoder.head={head} does not suit the loss {loss.name}: use {' or '.join(heads)}.")
        if self.layout.accumulate > 1 and loss.uses_other_samples:
            raise ConfigError(
                f"The loss {loss.name} compares the pictures of a batch and would miss pairs of them: "
                "use trainer.accumulate=1."
            )
        return (encoder.freeze() if self.recipe.freeze else encoder), loss

    def _preprocessing(self, size: int) -> Preprocessing:
        # Only what it was trained with: a frozen encoder was, elsewhere.
        seen = self.recipe.freeze or self.recipe.augmentation.flip
        mirror = self.recipe.mirror and self.dataset.flip and seen
        weights = self.config.encoder.weights
        model = described(weights) if weights else None
        if model is not None:
            return replace(Preprocessing.from_json(model["preprocessing"]), size=size, flip_tta=mirror)
        if "mean" in self._published:
            # They divide pixels by 255, we by 256.
            mean, std = ([value * 255 / 256 for value in self._published[name]] for name in ("mean", "std"))
            return Preprocessing(size=size, mean=tuple(mean), std=tuple(std), flip_tta=mirror)
        if not self.recipe.standardise:
            return Preprocessing(size=size, flip_tta=mirror)
        return Preprocessing(size=size, mean=IMAGENET_MEAN, std=IMAGENET_STD, flip_tta=mirror)

    @cached_property
    def _published(self) -> dict[str, Any]:
        """What published weights were trained with, where they say so: timm's and Hugging Face's do."""
        name, weights = self.config.encoder.name, self.config.encoder.weights
        return pretrained_cfg(name) if weights and described(weights) is None else {}

    def _report(self) -> None:
        """What the user should know before the run starts."""
        if not is_rank_zero():
            return
        if self.dataset.skipped:
            path = self.folder / "skipped.txt"
            lines = "".join(f"{name}: {reason}\n" for name, reason in self.dataset.skipped)
            path.write_text(lines, encoding="utf-8", errors="backslashreplace")
            count = len(self.dataset.skipped)
            _console.print(f"{count} file{'s' * (count > 1)} skipped; which and why: {path}")
        if self.recipe.freeze and self.config.encoder.weights is None:
            _console.print("The frozen encoder has random weights: name some with encoder.weights=…")
        asked = self.settings.logger.tensorboard
        if asked is not None and not asked.needed and find_spec("tensorboard") is None:
            _console.print("No TensorBoard log: pip install 'kedge[tensorboard]' for one.")
        kept = f", {len(self.held_out)} held out" if self.held_out is not None else ""
        how = "pictures through a frozen encoder" if self.recipe.freeze else "pictures"
        _console.print(
            f"{self.encoder.name} with {self.loss.name} on {self.dataset.name}: {len(self.pictures):,} {how}{kept}, "
            f"{len(self.dataset.classes)} classes, {self.recipe.epochs} epochs, {self._where}"
        )

    @property
    def _where(self) -> str:
        return self.device.type if self.layout.processes == 1 else f"{self.layout.processes} × {self.device.type}"

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
            classes=None if type(self.loss).predict is RetrievalLoss.predict else len(self.dataset.classes),
            for_gpu=self.device.type == "cuda",
            layout=self.layout,
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

    @property
    def _synchronises(self) -> bool:
        wanted = self.settings.trainer.sync_batchnorm
        return wanted and self.layout.processes > 1 and self.device.type == "cuda"

    def _compile(self, step: Step, module: RetrievalTraining, data: TrainingData) -> None:
        wanted = self.settings.trainer.compile
        step.to(self.device)
        inputs, labels = (part.to(self.device) for part in data.train.__getitems__(range(data.batch_size)))
        draws = step.draw(inputs, torch.Generator(self.device))
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision)
        _console.print("Compiling the step …")
        mode = AUTO if wanted == "auto" else wanted
        fast = compiled(
            step,
            (inputs, labels, draws),
            mode,
            scale=module.loss_scale,
            autocast=autocast,
            record=self.layout.parts == 1,
        )
        module.use(fast)
        if fast.forward is not step:
            how = "and recorded as one launch " if fast.with_gradients else ""
            _console.print(f"The step was compiled {how}in {fast.seconds:.0f} s.")

    def _step(self) -> Step:
        step = self._step_of_features() if self.recipe.freeze else self._step_of_pictures()
        return step.double() if self.precision == "64-true" else step

    def _step_of_features(self) -> Step:
        prepare = Prepare(_nothing, _as_they_are, _as_they_are)
        together = self.layout.processes > 1
        return Step(self.encoder.head, self.loss, prepare, self.recipe.mixing, together=together)

    def _step_of_pictures(self) -> Step:
        wanted = self.recipe.augmentation
        augmentation = wanted if self.dataset.flip else replace(wanted, flip=False)
        dtype = torch.float64 if self.precision == "64-true" else torch.float32

        def change(pixels: Tensor, draws: Tensor) -> Tensor:
            images = augmentation.apply(pixels, draws)
            images = self.preprocessing.normalize(self.preprocessing.resize(images))
            return images.to(dtype).contiguous(memory_format=self.order)

        def plain(pixels: Tensor) -> Tensor:
            return self.preprocessing.to_input(pixels).to(dtype)

        return Step(
            self.encoder,
            self.loss,
            Prepare(augmentation.draw, change, plain),
            self.recipe.mixing,
            mirror=self.preprocessing.flip_tta,
            together=self.layout.processes > 1,
        )

    def _fit(self, trainer: L.Trainer, module: RetrievalTraining, data: TrainingData, checkpoint: Path | None) -> None:
        try:
            with heard(module):
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except (KeyboardInterrupt, SystemExit):
            # The trainer turns Ctrl-C into an exit of its own.
            raise stopped(self.folder, module.saved_epochs, self.recipe.epochs) from None
        except RuntimeError:
            # Another process heard of it first, and is gone.
            if module.stopped:
                raise stopped(self.folder, module.saved_epochs, self.recipe.epochs) from None
            raise

    def _finish(self, module: RetrievalTraining) -> Model:
        with rank_zero_first():
            if not is_rank_zero():
                return Model.load(self.folder / "model").to(self.device)
            model = self._model(self.folder / BEST, module)
            model.save(self.folder / "model")
        return model.to(self.device)

    def _model(self, checkpoint: Path, module: RetrievalTraining) -> Model:
        module.float().load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"])
        make = partial(
            Model,
            self.encoder.eval(),
            classes=self.dataset.classes,
            preprocessing=self.preprocessing,
            classifier=getattr(self.loss, "classifier", None),
            loss=self.loss.name,
            posterior=bool(getattr(self.loss, "discriminate", 0)),
            normalize=self.loss.normalize,
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
