"""Encoder and loss as one Lightning module: the training step, the target metric, the parameter groups."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from kedge.distributed import all_gather_rows, all_reduce_mean_
from kedge.errors import TrainingError
from kedge.losses import RetrievalLoss
from kedge.losses.base import in_full_precision
from kedge.metrics import rank_relevant
from kedge.training.compiling import Fast, Forward
from kedge.training.data import Batch, seed_of
from kedge.training.layout import ALONE, Layout
from kedge.training.settings import Recipe
from kedge.training.sharpness import Climb
from kedge.training.step import Draws, Outcome, Step

__all__ = ["CHOICE", "RetrievalTraining"]

CHOICE = "val/mAP"
"""By this metric an epoch is chosen: brute-force mAP of held-out images among training images."""

_IDLE, _IDLE_AT_MOST = 0.3, 0.15
"""A run is idle while its embeddings' spread, as a share of the anchors', is below so much of its progress."""
_NEXT_TO_NOTHING = 4e-6
"""The schedule divides by the last rate."""


class RetrievalTraining(L.LightningModule):
    """Trains the network of a step (an encoder, or only its head) together with the parameters of its loss."""

    def __init__(
        self,
        step: Step,
        recipe: Recipe,
        *,
        head: nn.Module,
        bounded: bool,
        held_out: bool,
        few_shot: bool = False,
        seed: int = 0,
        layout: Layout = ALONE,
    ) -> None:
        super().__init__()
        # In tuples, so that they are no second submodules with the same weights.
        self._step = (step,)
        self._forward: tuple[Forward] = (step,)
        self._with_gradients = False
        self.network = step.network
        self.loss = step.loss
        self.recipe = recipe
        self.held_out = held_out
        self.few_shot = few_shot
        self.seed = seed
        self.layout = layout
        # Only the bounded head makes the loss a quadratic of known curvature; elsewhere the scale has no meaning.
        self.bounded = bounded
        sgd = recipe.optimizer.name == "sgd"
        self.loss_scale = recipe.loss_scale if bounded else step.loss.encoder_scale if sgd else 1.0
        self.knows_classes = type(step.loss).predict is not RetrievalLoss.predict
        self._head_parameters = list(head.parameters())
        self._climb = Climb(step.network, recipe.sharpness.radius)
        self._climbs_from = math.inf
        self._chance = torch.Generator()
        self._drawn: Draws | None = None
        self._names: tuple[str, ...] = ()
        self._totals: Tensor | None = None
        self._steps = 0
        self._means: tuple[int, dict[str, float]] = (0, {})
        self._warned = False
        self.saved_epochs = 0
        """How many epochs the last checkpoint holds."""
        self.stopped = False
        """Whether the user asked for an end."""
        self.validated = False
        """Whether this epoch ended with a look at the held-out images."""
        self._found: list[list[Batch]] = [[], []]
        self._predicted: list[Batch] = []

    def use(self, fast: Fast) -> None:
        """Take a compiled step in place of the plain one."""
        self._forward, self._with_gradients = (fast.forward,), fast.with_gradients

    @property
    def target(self) -> tuple[str, Literal["max", "min"]]:
        """The metric that a plateau schedule watches, and whether it should be `max` or `min`."""
        if not self.held_out:
            return "train/loss", "min"
        return ("val/accuracy" if self.knows_classes else "val/knn1"), "max"

    @property
    def watched(self) -> tuple[str, ...]:
        """The metrics of held-out images: the target, and by which the epoch is chosen."""
        return (self.target[0], CHOICE)

    # ------------------------------------------------------------------ training

    def on_train_start(self) -> None:
        """A resumed run has its checkpoint."""
        self.saved_epochs = self.current_epoch
        if self.recipe.sharpness.radius:
            self._climbs_from = self.recipe.sharpness.start * float(self.trainer.estimated_stepping_batches)

    def on_train_epoch_start(self) -> None:
        """Restart every source of chance from seed and epoch, so that a resumed run repeats the epoch."""
        seed, rank, own = seed_of(self.seed, self.current_epoch, 1), self.layout.rank, self._step[0].chance
        torch.manual_seed(seed_of(seed, rank) if rank and own is None else seed)
        if own is not None:
            own.restart(seed_of(seed, rank), self.device)
        # On the device itself: numbers drawn elsewhere would have to be waited for.
        self._chance = torch.Generator(self.device).manual_seed(seed_of(self.seed, self.current_epoch, 2))
        self._totals, self._steps, self._means = None, 0, (0, {})
        self.validated = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One batch: augment, embed, compare with the anchors."""
        if self.stopped:
            raise KeyboardInterrupt
        inputs, labels = batch
        draws = self._draw(inputs, batch_idx)
        found = self._forward[0](inputs, labels, draws)
        if self._totals is None:
            # A copy: the memory of a compiled step's outcome is used again.
            self._names, self._totals = found.names, found.counted.clone()
        elif self._names == found.names:
            self._totals.add_(found.counted)
        else:
            parts = " and ".join(", ".join(names[1:-1]) for names in (self._names, found.names))
            raise TrainingError(f"The loss {self.loss.name} must have the same parts in every step, found {parts}.")
        self._steps += 1
        if self._looks_at_once(found.loss) and not torch.isfinite(found.loss):
            raise self._not_finite()
        if self.global_step >= self._climbs_from:
            found = self._from_above(found, inputs, labels, draws)
        return found.loss * self.loss_scale

    def _draw(self, inputs: Tensor, batch_idx: int) -> Draws:
        """The numbers of these pictures: of all that are drawn for the batch, whoever sees the others."""
        if self.layout.parts == 1:
            return self._step[0].draw(inputs, self._chance)
        turn = batch_idx % self.layout.accumulate
        if self._drawn is None or turn == 0:
            self._drawn = self._step[0].draw(inputs, self._chance, self.layout.parts)
        place = (self.layout.rank * self.layout.accumulate + turn) * len(inputs)
        return self._drawn.of(place, place + len(inputs))

    def _looks_at_once(self, values: Tensor) -> bool:
        """Whether a look costs no waiting, and no other process waits for us: else broken numbers end the epoch."""
        return values.device.type == "cpu" and self.layout.processes == 1

    def _from_above(self, found: Outcome, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        """The same batch again, seen from where its loss is higher."""
        weights = self._climb.weights
        if not weights:  # only the loss has any
            return found
        if self._with_gradients:
            self._climb.ascend([weight.grad for weight in weights])
        else:
            slopes = torch.autograd.grad(found.loss, weights, allow_unused=True)
            all_reduce_mean_([slope for slope in slopes if slope is not None])
            self._climb.ascend(slopes)
        return self._forward[0](inputs, labels, draws)

    def on_after_backward(self) -> None:
        """The gradient from above is applied below, and no process keeps statistics of its own."""
        if self._climb.up:
            self._climb.descend()
        if self.layout.processes > 1:
            all_reduce_mean_(_unshared_statistics(self.network))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """An epoch's means are those of all processes."""
        del outputs, batch, batch_idx
        if self.layout.processes > 1 and self.trainer.is_last_batch and self._totals is not None:
            all_reduce_mean_([self._totals])
            self._means = (0, {})

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients, where the compiled step has not done so already."""
        if not self._with_gradients:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Forget the last step's gradients, where the compiled step does not write over them."""
        if not self._with_gradients:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means, refuse to go on with broken numbers, move the rate."""
        # The weights too: the last step of an epoch may break them without breaking a loss that was seen.
        weights = [value for value in self.state_dict().values() if value.is_floating_point()]
        whole = torch.stack(torch._foreach_norm(weights)).isfinite().all()
        anchors = getattr(self.loss, "anchors", None)
        if isinstance(anchors, Tensor):
            far = (anchors.detach() - anchors.detach().mean(0)).square().sum(1).mean()
        # All of that was asked for before the first answer, which waits until the device has finished.
        means = self.running_means()
        if not all(map(math.isfinite, means.values())) or not whole:
            raise self._not_finite()
        if isinstance(anchors, Tensor):
            self._warn_if_idle(means["_spread"], float(far))
        shown = {f"train/{name}": value for name, value in self.shown(means).items()}
        for logger in self.loggers:
            logger.log_metrics({"epoch": float(self.current_epoch), **shown}, self.global_step)
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, ReduceLROnPlateau):
            # Stepped here, not by the trainer, which would do so after the checkpoint is written.
            target = self.target[0]
            if target in shown:
                self.log(target, shown[target], logger=False)
            scheduler.step(shown[target] if target in shown else self.trainer.callback_metrics[target])

    def running_means(self) -> dict[str, float]:
        """The epoch's means so far; reading new ones waits for the device."""
        if self._totals is not None and self._means[0] != self._steps:
            means = (self._totals / self._steps).tolist()
            self._means = self._steps, dict(zip(self._names, means, strict=True))
        return self._means[1]

    @staticmethod
    def shown(means: dict[str, float]) -> dict[str, float]:
        """Those means that a user looks at: the loss and, where it has several, its parts."""
        shown = {name: value for name, value in means.items() if not name.startswith("_")}
        return shown if len(shown) > 2 else {"loss": shown["loss"]} if shown else {}

    def _not_finite(self) -> TrainingError:
        kept = f"; the checkpoint of epoch {self.saved_epochs} is kept" if self.saved_epochs else ""
        return TrainingError(
            f"The loss or the weights became NaN or infinite in epoch {self.current_epoch + 1}{kept}. Lower "
            f"recipe.optimizer.lr (now {self.recipe.optimizer.lr:g}) and start again."
        )

    def _warn_if_idle(self, spread: float, anchors: float) -> None:
        """Say so when the embeddings sit near the mean of the anchors (most of training must not pass like that)."""
        epoch, epochs = self.current_epoch + 1, self.recipe.epochs
        if self._warned or epoch < max(2, round(epochs / 10)):
            return
        share = spread / anchors if anchors > 0 else 1.0
        if share < min(_IDLE_AT_MOST, _IDLE * epoch / epochs):
            self._warned = True
            L.pytorch.utilities.rank_zero_warn(
                f"After {epoch} of {epochs} epochs the embeddings still sit at the mean of the anchors "
                f"(their spread is {share:.1%} of the anchors'): the encoder is hardly learning. "
                f"{self._advice()}lower recipe.optimizer.lr (now {self.recipe.optimizer.lr:g}), "
                "or check that the labels fit the images."
            )

    def _advice(self) -> str:
        if getattr(self.loss, "discriminate", 0):
            return "Train for longer, "
        return "Use loss.discriminate=4, " if self.bounded else "Use loss.discriminate=4 or encoder.head=bounded, "

    # ------------------------------------------------------------------ held-out images

    def on_validation_epoch_start(self) -> None:
        """Forget the last round."""
        self._found, self._predicted = [[], []], []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Embed held-out images (loader 0) and the gallery they are searched in (loader 1)."""
        del batch_idx
        inputs, labels = batch
        outputs = in_full_precision(self._step[0].look(inputs))
        if self._looks_at_once(outputs) and not outputs.isfinite().all():
            raise self._not_finite()
        embeddings = self.loss.embed(outputs)
        if self.loss.normalize:
            embeddings = nn.functional.normalize(embeddings, dim=1)
        self._found[dataloader_idx].append((embeddings, labels))
        if self.knows_classes and dataloader_idx == 0:
            predicted = self.loss.predict(self.loss.embed(outputs))
            if predicted is None:
                raise TypeError(f"{type(self.loss).__name__}.predict returned nothing.")
            self._predicted.append((predicted, labels))

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all processes' held-out images."""
        (queries, labels), (gallery, gallery_labels) = map(_join, self._found)
        if not queries.isfinite().all() or not gallery.isfinite().all():
            raise self._not_finite()
        ranking = rank_relevant(queries, labels, gallery, gallery_labels, ks=(1,))
        if self.knows_classes:
            predicted, labels = _join(self._predicted)
            value = (predicted == labels).double().mean().item()
        else:
            value = float(ranking.precision[1].mean())
        self.log(self.target[0], value)
        judged = ranking.relevant > 0
        self.log(CHOICE, float(ranking.average_precision[judged].mean()) if judged.any() else 0.0)
        self.validated = True

    # ------------------------------------------------------------------ optimiser and schedule

    def configure_optimizers(self) -> Any:
        """Three groups: backbone, head, and the loss's own parameters (no weight decay)."""
        wanted = self.recipe.optimizer
        in_head = {id(parameter) for parameter in self._head_parameters}
        backbone = [p for p in self.network.parameters() if id(p) not in in_head and p.requires_grad]
        head_lr = wanted.lr / self.loss_scale if self.bounded else wanted.lr
        own_lr = wanted.lr * wanted.anchor_lr * (self.loss.lr_mult if wanted.name == "sgd" else 1.0)
        groups = [
            {"name": "backbone", "params": backbone, "lr": wanted.lr},
            {"name": "head", "params": self._head_parameters, "lr": head_lr},
            {
                "name": "loss",
                "params": list(self.loss.parameters()),
                "lr": own_lr / self.loss_scale,
                "weight_decay": 0.0,
            },
        ]
        groups = [group for group in groups if group["params"]]
        optimizer: torch.optim.Optimizer
        fused = self.device.type == "cuda"
        if wanted.name in ("adam", "adamw"):
            adam = torch.optim.AdamW if wanted.name == "adamw" else torch.optim.Adam
            optimizer = adam(groups, lr=wanted.lr, weight_decay=wanted.weight_decay, fused=fused)
        else:
            optimizer = torch.optim.SGD(
                groups,
                lr=wanted.lr,
                momentum=wanted.momentum,
                nesterov=wanted.momentum > 0,
                weight_decay=wanted.weight_decay,
                fused=fused,
            )
        return self._with_schedule(optimizer)

    def _with_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        schedule = self.recipe.schedule
        scheduler: LRScheduler | ReduceLROnPlateau
        if schedule.name == "one_cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            rates = [group["lr"] for group in optimizer.param_groups]
            start = 1 / 25
            # A rise of exactly one step is one that torch divides by zero in.
            warmup = schedule.warmup / 2 if schedule.warmup * max(2, steps) == 1 else schedule.warmup
            scheduler = OneCycleLR(
                optimizer,
                rates,
                total_steps=max(2, steps),
                pct_start=warmup,
                cycle_momentum=False,
                div_factor=1 / start,
                final_div_factor=start / max(schedule.final, _NEXT_TO_NOTHING),
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if schedule.name == "plateau":
            patience = schedule.patience_few_shot if self.few_shot else schedule.patience
            scheduler = ReduceLROnPlateau(optimizer, mode=self.target[1], factor=schedule.factor, patience=patience)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": self.target[0]},
            }
        return optimizer

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Leave the plateau schedule to `on_train_epoch_end`."""
        if not isinstance(scheduler, ReduceLROnPlateau):
            super().lr_scheduler_step(scheduler, metric)


def _join(batches: list[Batch]) -> Batch:
    found, labels = torch.cat([values for values, _ in batches]), torch.cat([labels for _, labels in batches])
    return all_gather_rows(found), all_gather_rows(labels)


def _unshared_statistics(network: nn.Module) -> list[Tensor]:
    """Those of batch normalisation that sees the pictures of one process only."""
    layers = (layer for layer in network.modules() if isinstance(layer, _BatchNorm))
    own = (layer for layer in layers if not isinstance(layer, nn.SyncBatchNorm))
    return [value for layer in own for value in layer.buffers() if value.is_floating_point()]
