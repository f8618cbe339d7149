"""One training run: a folder with its configuration, checkpoints, history and, at the end, the model."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from kedge.config.compose import CONFIG, DATASET, build, build_dataset, build_loss, load_config, loss_heads, rename_keys
from kedge.console import stderr
from kedge.datasets import Dataset, leave_classes_out, train_val_split
from kedge.distributed import broadcast_object, init_process_group, is_rank_zero, is_torchrun, rank_zero_first
from kedge.encoders import Encoder, pretrained_cfg
from kedge.encoders.pretrained import stored_preprocessing
from kedge.errors import ConfigError, DataError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from kedge.losses import RetrievalLoss
from kedge.model import Model, embed_split
from kedge.model.features import file_features
from kedge.training.checkpoint import BEST, KEPT, LAST, wrap_os_errors
from kedge.training.config import Settings
from kedge.training.data import DeviceDataset, Examples, TrainingData, fits_on
from kedge.training.frozen import calibrate, frozen_features, measure_gain
from kedge.training.loggers import check_loggers, open_loggers
from kedge.training.loop import TrainingLoop
from kedge.training.parallel import SINGLE_PROCESS, Accelerator, Layout, device_of, launch, layout_of, precision_on
from kedge.training.quality import chance_level, summary
from kedge.training.step import Step, compile_step

__all__ = ["check_new_folder", "kept_epochs", "resume_run", "run_here", "start_run"]

_RESUME_KEYS = ("trainer.devices", "trainer.num_nodes", "trainer.accumulate")
"""What may differ in a resumed run: the hardware, which leaves the outcome as it is."""


def start_run(config: DictConfig, folder: Path) -> Model:
    """Train as `config` says, leave everything in `folder`, return the model."""
    run_config = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    return _run(rename_keys(run_config), folder, resume=False)


def resume_run(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Model:
    """Go on from the last checkpoint in `folder`; a finished run only returns its model.

    `overrides` may name another number of processes: `["trainer.devices=2"]`. `trust` has classes instantiated that
    are not Kedge's: say it of your own runs only.
    """
    for override in overrides:
        if override.partition("=")[0] not in _RESUME_KEYS:
            allowed = ", ".join(_RESUME_KEYS)
            raise ConfigError(f"--resume keeps the run's own settings except {allowed}; leave out {override}.")
    config = load_config(folder / CONFIG, trust=trust)
    return _run(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))), folder, resume=True)


def kept_epochs(folder: Path, *, trust: bool = False) -> Iterator[tuple[int, Model]]:
    """The models of those epochs that `trainer.keep_every` kept, with their numbers; `trust` as in `resume_run`.

    In their order; each is gone when the next is asked for.
    """
    config = load_config(folder / CONFIG, trust=trust)
    with wrap_os_errors(folder):
        run = _Run(config, folder, SINGLE_PROCESS, resume=True)
        step = run.make_step()
        for path in sorted(folder.glob(KEPT.format(0).replace("0000", "*"))):
            yield int(path.stem.partition("-")[2]), run.make_model(path, step).to(run.device)


def _run(config: Any, folder: Path, *, resume: bool) -> Model:
    """Train in this process, or in as many as the configuration asks for."""
    settings = Settings.from_config(config)
    check_loggers(settings.logger)
    layout = layout_of(settings, resumed=resume)
    if layout.processes == 1 or is_torchrun():
        return run_here(config, folder, layout, resume=resume)[1]
    _check_folder(folder, resume)
    run_folder = launch(config, folder, layout, resume=resume)
    return Model.load(run_folder / "model").to(device_of(settings.trainer.accelerator))


def run_here(config: DictConfig, folder: Path, layout: Layout, *, resume: bool) -> tuple[Path, Model]:
    """Train in this process, alone or as one rank of several; returns the run's folder (rank 0's) and the model."""
    init_process_group(device_of(config.trainer.accelerator).type)
    stderr().quiet = not is_rank_zero()
    # Under torchrun, a name with the time in it may differ from process to process.
    shared = Path(broadcast_object(str(folder.resolve())))
    if shared != folder.resolve():
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty, as Hydra made it
        folder = shared
    _check_folder(folder, resume)
    with wrap_os_errors(folder):
        with rank_zero_first():
            run = _Run(config, folder, layout, resume=resume)
        if not resume and is_rank_zero():
            # Only now: what cannot be started leaves no folder behind.
            folder.mkdir(parents=True, exist_ok=True)
            dataset = {"name": run.dataset.name, "fingerprint": run.whole_dataset.fingerprint()}
            (folder / DATASET).write_text(json.dumps(dataset) + "\n")
            OmegaConf.save(config, folder / CONFIG, resolve=True)
        return folder, run.train(resume=resume)


def _check_folder(folder: Path, resume: bool) -> None:
    if not resume and broadcast_object((folder / CONFIG).exists()):
        raise _holds_a_run(folder)


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds a run, before anything is fetched or decoded."""
    if is_rank_zero() and (folder / CONFIG).exists():  # the others may look when rank 0 has begun to write
        raise _holds_a_run(folder)


def _holds_a_run(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} already holds a run; resume it with kedge train --resume {folder}, or choose another folder."
    )


class _Run:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, folder: Path, layout: Layout, *, resume: bool) -> None:
        self.config, self.folder, self.layout = config, folder, layout
        self._known_features: dict[str, DeviceDataset] = {}
        self.settings = Settings.from_config(config)
        self.recipe, split = self.settings.recipe, self.settings.split
        self.device = device_of(self.settings.trainer.accelerator)
        precision = precision_on(self.device, self.settings.trainer.precision)
        self.dtype = torch.float64 if precision == "64-true" else torch.float32
        random.seed(self.settings.seed)
        np.random.seed(self.settings.seed)
        torch.manual_seed(self.settings.seed)
        # Files go straight through a frozen encoder; several processes share them out, and must know them before.
        scan = self._scan if self.recipe.freeze and self.layout.processes == 1 else None
        # Warnings of its loader are for rank 0 to print.
        with contextlib.nullcontext() if is_rank_zero() else contextlib.redirect_stderr(None):
            self.whole_dataset: Dataset = build_dataset(config.dataset, scan)
        self.dataset = leave_classes_out(self.whole_dataset, split.unseen, split.seed)
        self.images, self.held_out = train_val_split(self.dataset.train, split.holdout, split.shots, split.seed)
        decoding = self.dataset.crop_pct, self.dataset.interpolation
        self._build_encoder(min(self.dataset.train.size), self.dataset.flip, *decoding)
        self.loss = self._loss()
        # Convolutions on a GPU are faster with channels last.
        self.memory_format = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.encoder.to(memory_format=self.memory_format)
        if resume:
            started = json.loads((folder / DATASET).read_text())
            if not self.whole_dataset.matches(started["fingerprint"]):
                raise DataError(f"{started['name']} has changed since {folder} was started; train again.")

    def train(self, *, resume: bool = False) -> Model:
        """Fit, then save the best epoch as a model."""
        if is_rank_zero():
            self._report()
        data = self._data()
        step = self.make_step()
        if not any(parameter.requires_grad for parameter in step.parameters()):
            raise ConfigError("Nothing is left to train; with a frozen encoder this loss needs encoder.head=linear.")
        accelerator = Accelerator(self.settings, self.layout, self.device)
        if self.settings.trainer.sync_batchnorm and self.layout.processes > 1 and self.device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(step)  # type: ignore[no-untyped-call]
        self._compile(step, accelerator, data)
        loop = TrainingLoop(
            step,
            data,
            self.settings,
            accelerator=accelerator,
            folder=self.folder,
            head=self.encoder.head,
            bounded=self.encoder.head_kind == "bounded",
            loggers=open_loggers(self.settings.logger, self.folder) if is_rank_zero() else [],
        )
        if resume and (self.folder / LAST).exists():
            loop.resume(self.folder / LAST)
        loop.fit()
        with rank_zero_first():
            if is_rank_zero():
                model = self.make_model(self.folder / BEST, step).to(self.device)
                if self.recipe.freeze and self.held_out is not None:
                    train, held_out = self._features("train"), self._features("held_out")
                    model.calibration = calibrate(model, train, held_out)
                    gain = measure_gain(model, train, held_out)
                    gain.save(self.folder / "gain.json")
                    stderr().print(str(gain))
                elif self.held_out is not None:
                    chance = chance_level(self.held_out.labels, self.images.labels)
                    stderr().print(summary(loop.history.rows, len(self.held_out), chance))
                model.save(self.folder / "model")
                if self.layout.processes == 1:
                    return model
            # Not the model in memory, whose batch normalisation may be synchronised.
            return Model.load(self.folder / "model").to(self.device)

    def _scan(self, files: Sequence[str]) -> dict[int, str]:
        """Compute the features of a folder's files; those that cannot be read, and why."""
        dataset = self.config.dataset
        decoding = dataset.get("crop_pct", 1.0), dataset.get("interpolation", "bilinear")
        self._build_encoder(dataset.get("size", 224), True, *decoding)
        _, unreadable = file_features(self._feature_model(), files)
        self.encoder.train()
        return unreadable

    def _build_encoder(self, image_size: int, flip: bool, crop_pct: float, interpolation: str) -> None:
        """Encoder and preprocessing, once: features may be needed before the dataset is known."""
        if hasattr(self, "encoder"):
            return
        recipe, name, weights = self.recipe, self.config.encoder.name, self.config.encoder.weights
        stored = stored_preprocessing(weights)
        # What other pretrained weights were trained with, where they say so: timm's and Hugging Face's do.
        cfg = pretrained_cfg(name) if weights and stored is None else {}
        size = recipe.size or (cfg["input_size"][-1] if recipe.freeze and cfg.get("input_size") else image_size)
        head, heads = self.config.encoder.head, loss_heads(self.config.loss)
        if head == "auto":
            # The outputs of a frozen encoder have whatever scale it was left with.
            head = "batchnorm" if recipe.freeze and "batchnorm" in heads else heads[0]
        encoder: Encoder = build(self.config.encoder, head=head, image_size=size)
        self.encoder = encoder.freeze() if recipe.freeze else encoder
        if not recipe.freeze:
            encoder.text_source = None  # training moves the features out of the space that they share with texts
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if recipe.normalize else (None, None)
        if "mean" in cfg:
            # They divide pixels by 255, we by 256.
            mean, std = (tuple(value * 255 / 256 for value in cfg[name]) for name in ("mean", "std"))
        self.preprocessing = replace(
            stored or Preprocessing(mean=mean, std=std),
            size=size,
            # Flip TTA only for what was trained with flips, as a frozen encoder was elsewhere.
            flip_tta=recipe.flip_tta and flip and (recipe.freeze or recipe.augmentation.flip),
            # Cropped as the images that are trained on are when they are decoded.
            crop_pct=crop_pct,
            interpolation=interpolation,
        )

    def _loss(self) -> RetrievalLoss:
        # The encoder's dimension is needed to build it.
        loss: RetrievalLoss = build_loss(self.config.loss, num_classes=len(self.dataset.classes), dim=self.encoder.dim)
        if (head := self.encoder.head_kind) not in loss.heads:
            raise ConfigError(f"encoder.head={head} does not suit the loss {loss.name}; use {' or '.join(loss.heads)}.")
        if self.layout.accumulate > 1 and loss.uses_other_samples:
            raise ConfigError(
                f"The loss {loss.name} compares the images of a batch and would miss pairs of them; "
                "use trainer.accumulate=1."
            )
        return loss

    def _report(self) -> None:
        """Print what the user should know before the run starts."""
        console, skipped = stderr(), self.dataset.skipped
        if skipped:
            path = self.folder / "skipped.txt"
            lines = "".join(f"{name}: {reason}\n" for name, reason in skipped)
            path.write_text(lines, encoding="utf-8", errors="backslashreplace")
            console.print(f"{len(skipped)} file{'s' * (len(skipped) > 1)} skipped; see {path}")
        if self.recipe.freeze and self.config.encoder.weights is None:
            console.print("The frozen encoder has random weights; choose some with encoder.weights=default.")
        held_out = f", {len(self.held_out)} held out" if self.held_out is not None else ""
        kind = "images through a frozen encoder" if self.recipe.freeze else "images"
        hardware = ("" if self.layout.processes == 1 else f"{self.layout.processes} × ") + self.device.type
        console.print(
            f"{self.encoder.name} with {self.loss.name} on {self.dataset.name}: {len(self.images):,} {kind}{held_out}"
            f", {len(self.dataset.classes)} classes, {self.recipe.epochs} epochs, {hardware}"
        )

    def _data(self) -> TrainingData:
        if self.device.type == "cuda":
            # In a sweep, the last run's compiled step holds its memory until it is collected.
            gc.collect()
            torch.cuda.empty_cache()
        splits: dict[str, Examples] = {"train": self.images}
        if self.held_out is not None:
            splits["held_out"] = self.held_out
        if self.recipe.freeze:
            splits = {name: self._features(name) for name in splits}
        mode = self.settings.trainer.data
        # On a CPU, a loader reads from the same memory.
        if mode != "auto" or self.device.type != "cpu":
            fits, why = mode == "device", f"trainer.data={mode}"
            if mode == "auto":
                fits, why = fits_on(self.device, list(splits.values()))
            place = "are on the GPU" if fits else "are prefetched from the host"
            stderr().print(f"The training images {place} ({why}).")
            if fits:
                splits = {name: DeviceDataset.copy_of(split, self.device) for name, split in splits.items()}
        return TrainingData(
            splits["train"],
            splits.get("held_out"),
            batch_size=self.recipe.batch_size,
            seed=self.settings.seed,
            classes=len(self.dataset.classes) if self.loss.predicts_classes else None,
            for_gpu=self.device.type == "cuda",
            layout=self.layout,
            labels=self.images.labels,
            per_class=self.recipe.per_class,
            # A frozen encoder's features are not augmented.
            views=1 if self.recipe.freeze else self.recipe.views,
        )

    def _features(self, name: str) -> DeviceDataset:
        """What a frozen encoder makes of the images that are trained on (`train`) or held out (`held_out`)."""
        if name not in self._known_features:
            images = self.images if name == "train" else self.held_out
            assert images is not None
            path = self.folder / f"features/{name}.safetensors"
            self._known_features[name] = frozen_features(path, images, self._feature_model())
            self.encoder.train()
        return self._known_features[name]

    def _feature_model(self) -> Model:
        """The frozen encoder as a model that computes features."""
        encoder = self.encoder.to(self.device).eval()
        return Model(encoder, anchors=None, classes=(), preprocessing=self.preprocessing)

    def _compile(self, step: Step, accelerator: Accelerator, data: TrainingData) -> None:
        mode: str = self.settings.trainer.compile
        if mode == "auto":
            mode = "reduce-overhead" if self.device.type == "cuda" else "off"
        if self.recipe.freeze or mode == "off":
            return
        # A CUDA graph owns its gradients, which cannot be accumulated or exchanged with other ranks.
        if self.layout.parts > 1:
            mode = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
        step.to(self.device)
        inputs, labels = accelerator.to_device(data.train.__getitems__(range(data.batch_size)))
        draws = step.draw(inputs, torch.Generator(self.device))
        stderr().print("Compiling the training step …")
        seconds = compile_step(step, (inputs, labels, draws), mode, accelerator.autocast())
        if seconds is not None:
            stderr().print(f"Compiled the training step in {seconds:.0f} s.")

    def make_step(self) -> Step:
        """Network (or only its head) and loss."""
        options: Any = {"dtype": self.dtype, "distributed": self.layout.processes > 1}
        if self.recipe.freeze:
            return Step(self.encoder.head, self.loss, self.recipe.mixing, **options).to(self.dtype)
        augmentation = replace(self.recipe.augmentation, flip=self.recipe.augmentation.flip and self.dataset.flip)
        options |= {"preprocessing": self.preprocessing, "memory_format": self.memory_format}
        return Step(self.encoder, self.loss, self.recipe.mixing, augmentation, **options).to(self.dtype)

    def make_model(self, checkpoint: Path, step: Step) -> Model:
        """The model of a checkpoint's weights."""
        step.float().load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"])
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
            model = make(anchors=None).to(self.device)
            if self.recipe.freeze:
                embeddings = model.embed_features(self._features("train").values)
            else:
                title = "images for the class means"
                embeddings = embed_split(model.embed_pixels, self.images, batch_size=64, title=title)
            # The class means; zero for a class without images.
            labels, classes = torch.from_numpy(self.images.labels), len(self.dataset.classes)
            sums = torch.zeros(classes, embeddings.shape[1]).index_add_(0, labels, embeddings.cpu())
            anchors = sums / torch.bincount(labels, minlength=classes).clamp(min=1)[:, None]
            if self.loss.normalize or self.encoder.head_kind == "unit":
                anchors = nn.functional.normalize(anchors, dim=1)  # then the nearest is the one of the largest cosine
        return make(anchors=anchors)
