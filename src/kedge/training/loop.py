"""The training loop: steps, validation, history, loggers and checkpoints, in the order in which they happen."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from kedge.console import stderr
from kedge.distributed import all_gather_rows, all_reduce_mean_, is_rank_zero
from kedge.errors import TrainingError
from kedge.losses.base import in_full_precision
from kedge.metrics import rank_relevant
from kedge.training.checkpoint import ModelCheckpoint, handle_signals, interrupted, load_checkpoint
from kedge.training.config import Settings
from kedge.training.data import Batch, TrainingData, derive_seed
from kedge.training.loggers import History, MetricsLogger, TrainingProgress
from kedge.training.optimizer import EMA, SAM, build_optimizer, build_scheduler
from kedge.training.parallel import Accelerator, average_batch_statistics
from kedge.training.step import Draws, EpochMeans, Outcome, Step

__all__ = ["TrainingLoop"]

_SCORE = "val/mAP"
"""The metric that chooses the best epoch: brute-force mAP of held-out images among training images."""
_IDLE, _MAX_IDLE = 0.3, 0.15
"""A run is idle while its embeddings have come apart less than so much of its progress (`EpochMeans.separation`)."""
_MIN_STEPS = 100
"""A run that warms up in fewer steps than this, as a head on few photos does, is judged a tenth of its epochs later."""


class TrainingLoop:
    """Trains the network of a step (an encoder, or only its head) together with the parameters of its loss."""

    def __init__(
        self,
        step: Step,
        data: TrainingData,
        settings: Settings,
        *,
        accelerator: Accelerator,
        folder: Path,
        head: nn.Module,
        bounded: bool,
        loggers: list[MetricsLogger],
    ) -> None:
        self.step, self.data, self.settings, self.recipe = step, data, settings, settings.recipe
        self.accelerator, self.layout, self.folder, self.loggers = accelerator, accelerator.layout, folder, loggers
        self.scaler = accelerator.scaler
        self.predicts_classes = step.loss.predicts_classes
        self.target = "train/loss"
        """The metric that a plateau schedule watches."""
        if data.held_out is not None:
            self.target = "val/accuracy" if self.predicts_classes else "val/knn1"
        # The recipe's factor is for the bounded head, which makes the loss a quadratic of known curvature.
        sgd = self.recipe.optimizer.name == "sgd"
        factor = self.recipe.backbone_lr_mult if bounded else step.loss.encoder_scale if sgd else 1.0
        self.backbone_lr_mult = factor
        self.total_steps = self.recipe.epochs * data.steps_per_epoch
        self.optimizer = build_optimizer(
            step.to(accelerator.device).network, head, step.loss, self.recipe, bounded=bounded, backbone_lr_mult=factor
        )
        self.scheduler = build_scheduler(
            self.optimizer,
            self.recipe.schedule,
            total_steps=self.total_steps,
            maximize=data.held_out is not None,
            few_shot=settings.split.shots is not None,
        )
        # A batch without a pair leaves some parameters of the loss unused, such as proxies.
        unused = step.loss.uses_other_samples and any(True for _ in step.loss.parameters())
        self.model = accelerator.wrap(step, find_unused_parameters=unused)
        self.ema = EMA(step, self.recipe.ema * self.total_steps) if self.recipe.ema else None
        self.sam = SAM(step.network, self.recipe.sam.radius)
        self._sam_start = self.recipe.sam.start * self.total_steps if self.sam.radius else math.inf
        self.history = History(folder / "history.csv")
        self.progress = TrainingProgress(stderr(), epochs=self.recipe.epochs, total_steps=self.total_steps)
        self.checkpoint = ModelCheckpoint(folder, epochs=self.recipe.epochs, keep_every=settings.trainer.keep_every)
        self.epoch, self.global_step = 0, 0
        self.stop = threading.Event()
        self._losses = EpochMeans(step.loss.name)
        self._generator = torch.Generator(accelerator.device)
        self._warned_idle = False
        self._clock = 0.0

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = load_checkpoint(path)
        self.epoch, self.global_step = state["epoch"] + 1, state["global_step"]
        self.step.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer_states"][0])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["lr_schedulers"][0])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        if state.get("precision"):
            self.scaler.load_state_dict(state["precision"])
        self.history.rows = state["history"]
        self.checkpoint.best, self.checkpoint.epochs_saved = state["best"], self.epoch

    def _state(self) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "state_dict": self.step.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [] if self.scheduler is None else [self.scheduler.state_dict()],
            "ema": None if self.ema is None else self.ema.state_dict(),
            "precision": self.scaler.state_dict(),
            "history": self.history.rows,
        }

    # ------------------------------------------------------------------ epochs

    def fit(self) -> None:
        """Train the epochs that are left; SIGINT and SIGTERM raise `Interrupted`."""
        success = False
        try:
            self.progress.start(self.global_step)
            with handle_signals(self.stop):
                self._clock = time.monotonic()
                for epoch in range(self.epoch, self.recipe.epochs):
                    self.epoch = epoch
                    self.on_epoch_start()
                    self.train_epoch()
                    is_due = self.data.held_out is not None and (epoch + 1) % self.settings.validate_every == 0
                    self.on_epoch_end(self.validate() if is_due else {})
            success = True
        except (KeyboardInterrupt, RuntimeError) as error:
            # A RuntimeError where another rank received the signal first, and is gone.
            if self.stop.is_set() or isinstance(error, KeyboardInterrupt):
                raise interrupted(self.folder, self.checkpoint.epochs_saved, self.recipe.epochs) from None
            raise
        finally:
            self.progress.stop()
            for logger in self.loggers:
                logger.finalize(success=success)

    def on_epoch_start(self) -> None:
        """Seed every RNG from seed and epoch alone, so that a resumed run repeats the epoch."""
        seed, rank = derive_seed(self.settings.seed, self.epoch, 1), self.layout.rank
        if self.step.rank_rng is None:
            torch.manual_seed(derive_seed(seed, rank) if rank else seed)
        else:
            torch.manual_seed(seed)
            self.step.rank_rng.seed(derive_seed(seed, rank), self.accelerator.device)
        # On the device itself: numbers drawn elsewhere would have to be waited for.
        self._generator.manual_seed(derive_seed(self.settings.seed, self.epoch, 2))
        self._losses = EpochMeans(self.step.loss.name)

    def train_epoch(self) -> None:
        """Forward, backward and optimizer step for every batch."""
        self.model.train()
        accumulate = self.layout.accumulate
        for index, batch in enumerate(self.data.train_batches(self.epoch)):
            if self.stop.is_set():  # the KeyboardInterrupt may have fallen where exceptions are ignored
                raise KeyboardInterrupt
            inputs, labels = self.accelerator.to_device(batch)
            turn = index % accumulate
            if turn == 0:
                # For the global batch, the same on every rank.
                drawn = self.step.draw(inputs, self._generator, self.layout.parts)
            start = (self.layout.rank * accumulate + turn) * len(inputs)
            draws = drawn if self.layout.parts == 1 else drawn.rows(start, start + len(inputs))
            is_last = turn == accumulate - 1
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self.forward(inputs, labels, draws)
                torch.autograd.backward(self.scaler.scale(loss * self.backbone_lr_mult / accumulate))
            self.sam.restore()
            if is_last:
                self.optimizer_step()
        if self.layout.processes > 1:
            self._losses.all_reduce()

    def forward(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """The loss whose gradient the step follows."""
        is_plain = self.global_step < self._sam_start or not self.sam.weights
        with self.accelerator.autocast():
            # For SAM not through DDP: this gradient is averaged here, and backward comes after the second forward.
            outcome: Outcome = (self.model if is_plain else self.step)(inputs, labels, draws)
        self._losses.add(outcome)
        if is_plain:
            return outcome.loss
        gradients = torch.autograd.grad(outcome.loss, self.sam.weights, allow_unused=True)
        all_reduce_mean_([gradient for gradient in gradients if gradient is not None])
        self.sam.perturb(gradients)
        with self.accelerator.autocast():
            perturbed: Outcome = self.model(inputs, labels, draws)
        return perturbed.loss

    def optimizer_step(self) -> None:
        """Update weights, rate and average."""
        if self.layout.processes > 1:
            average_batch_statistics(self.step.network)
        if clip := self.recipe.optimizer.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_value_(self.step.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.global_step += 1
        if isinstance(self.scheduler, OneCycleLR):
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update()
        self.progress.on_step(self.epoch, self.global_step, self._losses.shown)

    def on_epoch_end(self, metrics: dict[str, float]) -> None:
        """Refuse to go on with broken numbers; report and save the epoch."""
        # The weights too: the last step of an epoch may break them without breaking a loss that was computed.
        weights = [value for value in self.step.state_dict().values() if value.is_floating_point()]
        is_finite = torch.stack(torch._foreach_norm(weights)).isfinite().all()
        # Launched before the first read, which waits for the device.
        means, losses = self._losses.read(), self._losses.shown()
        if not all(map(math.isfinite, means.values())) or not is_finite:
            raise self._not_finite()
        self._warn_if_idle()
        metrics_and_losses = metrics | {f"train/{name}": value for name, value in losses.items()}
        row = {"epoch": self.epoch + 1, "step": self.global_step, "seconds": round(time.monotonic() - self._clock, 2)}
        row |= {"lr": self.optimizer.param_groups[0]["lr"]} | metrics_and_losses
        self.history.append(row)
        self._clock = time.monotonic()
        self.progress.on_epoch_end(self.epoch, self.global_step, losses, metrics)
        for logger in self.loggers:
            logger.log_metrics(metrics_and_losses, self.epoch + 1)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics_and_losses[self.target])
        model_weights = self.step.state_dict() | (self.ema.average if self.ema else {})
        self.checkpoint.on_epoch_end(self.epoch, metrics.get(_SCORE), model_weights, self._state)

    # ------------------------------------------------------------------ held-out images

    def validate(self) -> dict[str, float]:
        """Target metric and mAP of the held-out images of all ranks, with the averaged weights if there are."""
        self.model.eval()
        with (
            self.ema.applied() if self.ema else contextlib.nullcontext(),
            torch.inference_mode(),
            self.accelerator.autocast(),
        ):
            queries, labels, predicted = self._embed(self.data.query_batches(), predict=self.predicts_classes)
            gallery, gallery_labels, _ = self._embed(self.data.gallery_batches(), predict=False)
        if not queries.isfinite().all() or not gallery.isfinite().all():
            raise self._not_finite()
        ranking = rank_relevant(queries, labels, gallery, gallery_labels, ks=(1,))
        target = (predicted == labels).double().mean() if self.predicts_classes else ranking.precision[1].mean()
        judged = ranking.relevant > 0
        score = float(ranking.average_precision[judged].mean()) if judged.any() else 0.0
        return {self.target: float(target), _SCORE: score}

    def _embed(self, batches: Iterable[Batch], *, predict: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, labels and predicted classes (empty if not asked for) of all ranks' images."""
        columns: tuple[list[Tensor], ...] = ([], [], [])
        loss = self.step.loss
        for batch in batches:
            inputs, labels = self.accelerator.to_device(batch)
            embeddings = loss.embed(in_full_precision(self.step.embed_plain(inputs)))
            predicted = loss.predict(embeddings) if predict else labels[:0]
            if predicted is None:
                raise TypeError(f"{type(loss).__name__}.predict returned nothing.")
            embeddings = nn.functional.normalize(embeddings, dim=1) if loss.normalize else embeddings
            for column, values in zip(columns, (embeddings, labels, predicted), strict=True):
                column.append(values)
        embeddings, labels, predicted = (all_gather_rows(torch.cat(column)) for column in columns)
        return embeddings, labels, predicted

    # ------------------------------------------------------------------ what may go wrong

    def _not_finite(self) -> TrainingError:
        saved = self.checkpoint.epochs_saved
        kept = f"; the checkpoint of epoch {saved} is kept" if saved else ""
        return TrainingError(
            f"The loss or the weights became NaN or infinite in epoch {self.epoch + 1}{kept}: lower "
            f"recipe.optimizer.lr (now {self.recipe.optimizer.lr:g}) and start again."
        )

    def _warn_if_idle(self) -> None:
        """Warn when the embeddings sit at the mean of the anchors, or those of a class apart like any others."""
        epoch, epochs, anchors = self.epoch + 1, self.recipe.epochs, getattr(self.step.loss, "anchors", None)
        warmup = self.recipe.schedule.warmup if self.global_step < _MIN_STEPS else 0.0
        if self._warned_idle or epoch < max(2, round(epochs * (warmup + 0.1))):
            return
        anchors = anchors.detach() if isinstance(anchors, Tensor) else None
        share = self._losses.separation(anchors)
        self._warned_idle = share is not None and share < min(_MAX_IDLE, _IDLE * epoch / epochs)
        if not self._warned_idle or not is_rank_zero():
            return
        if anchors is not None:
            found = f"the embeddings are still at the mean of the anchors (their spread is {share:.1%} of the anchors')"
            advice = "use loss.discriminate=64"
        else:
            found = f"images of one class are only {share:.1%} closer to each other than to others"
            advice = "put several images of each class into a batch (recipe.per_class=4)"
        warnings.warn(
            f"After {epoch} of {epochs} epochs {found}, so the encoder hardly learns: train for longer, lower "
            f"recipe.optimizer.lr (now {self.recipe.optimizer.lr:g}), {advice}, or check the labels.",
            stacklevel=2,
        )
