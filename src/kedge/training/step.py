"""The forward half of a training step (augment, mix, embed, loss) as one module, and its compilation."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.distributed import all_gather_rows, all_gather_with_grad, all_reduce_mean_, is_rank_zero
from kedge.errors import TrainingError
from kedge.images import Augmentation, Mixing, Preprocessing
from kedge.losses import RetrievalLoss
from kedge.losses.base import in_full_precision

__all__ = ["Draws", "EpochMeans", "Outcome", "Step", "compile_step"]


_SPREAD_ROWS, _PAIR_ROWS = 32, 128
"""So many images of a batch tell how far apart embeddings are, and those of a class from those of others."""
_PAIRS = ("_same", "_same_pairs", "_other", "_other_pairs")


class Draws(NamedTuple):
    """All random numbers of one step, drawn before it."""

    augmentation: Tensor
    mixing: Tensor

    def rows(self, start: int, stop: int) -> Draws:
        """Those of the images from `start` to `stop`."""
        return Draws(self.augmentation[:, start:stop], self.mixing[:, start:stop])


Embedded = tuple[Tensor, tuple[Tensor, Tensor] | None]
"""Embeddings and, where images were mixed, the partner of each and its own weight."""


class Outcome(NamedTuple):
    """The loss, and the values to average: the loss, its components in the order of `names`, and how far embeddings are
    apart: their spread or, for a loss of pairs, squared distances in a class and between classes with their counts."""

    loss: Tensor
    values: Tensor
    names: tuple[str, ...]


class EpochMeans:
    """Means of the loss and its components over the steps of an epoch, summed on the device."""

    def __init__(self, loss_name: str) -> None:
        self.loss_name = loss_name
        self._names: tuple[str, ...] = ()
        self._totals: Tensor | None = None
        self._steps = 0

    def add(self, outcome: Outcome) -> None:
        """Take in one step."""
        self._steps += 1
        if self._totals is None:
            # A copy: a compiled step uses the memory of its outcome again.
            self._names, self._totals = outcome.names, outcome.values.double().clone()
        elif self._names == outcome.names:
            self._totals.add_(outcome.values)
        else:
            parts = " and ".join(", ".join(names[1:-1]) for names in (self._names, outcome.names))
            raise TrainingError(f"The loss {self.loss_name} must have the same parts in every step, found {parts}.")

    def all_reduce(self) -> None:
        """Average over ranks."""
        if self._totals is not None:
            all_reduce_mean_([self._totals])

    def separation(self, anchors: Tensor | None) -> float | None:
        """How far embeddings have come apart, from 0 (not at all) to 1; None where that cannot be told.

        With anchors, their spread as a share of the anchors'. For a loss of pairs, by how much closer images of one
        class are than images of two, in squared distance.
        """
        means = self.read()
        if anchors is not None:
            anchor_spread = float((anchors - anchors.mean(0)).square().sum(1).mean())
            return means["_spread"] / anchor_spread if anchor_spread > 0 else 1.0
        same, same_pairs, other, other_pairs = (means.get(name, 0.0) for name in _PAIRS)
        if not same_pairs or not other_pairs:
            return None
        return 1 - (same / same_pairs) / (other / other_pairs) if other > 0 else 0.0

    def read(self) -> dict[str, float]:
        """The means so far; reading waits for the device."""
        values = [] if self._totals is None else (self._totals / self._steps).tolist()
        return dict(zip(self._names, values, strict=True))

    def shown(self) -> dict[str, float]:
        """The means to report: the loss and, where it has several, its components."""
        shown = {name: value for name, value in self.read().items() if not name.startswith("_")}
        return shown if len(shown) > 2 else {"loss": shown["loss"]} if shown else {}


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the RNG state of the CPU and of `device` at the end of the block."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class RankRNG:
    """Per-rank RNG state (dropout); losses use the RNG that all ranks share.

    A network that draws (dropout) should do so differently on each rank; a loss that draws (which anchors repel, which
    triplets count) must draw alike on all of them.
    """

    def __init__(self) -> None:
        self._state: tuple[Tensor, Tensor | None] | None = None

    def seed(self, seed: int, device: torch.device) -> None:
        """Start this rank's stream anew."""
        with fork_rng(device):
            torch.manual_seed(seed)
            self._state = _rng_state(device)

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        """Draw from this rank's stream inside the block; until `seed` was called, from the shared one."""
        if self._state is None:
            yield
            return
        with fork_rng(device):
            cpu, cuda = self._state
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
            try:
                yield
            finally:
                self._state = _rng_state(device)


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


class Step(nn.Module):
    """Network and loss, from a batch of pixels (or of features, where there is no `preprocessing`) to the loss.

    With several processes each has a part of the batch and mixes the images of its own part. Embeddings are gathered
    for a loss that depends on the other samples of the batch.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: RetrievalLoss,
        mixing: Mixing,
        augmentation: Augmentation | None = None,
        preprocessing: Preprocessing | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        distributed: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.loss, self.mixing = network, loss, mixing
        self.augmentation, self.preprocessing = augmentation, preprocessing
        self.dtype, self.memory_format = dtype, memory_format
        self.gathers = distributed and loss.uses_other_samples
        # A loss that compiles draws no random numbers: then the global RNG is all this rank's own.
        self.rank_rng = RankRNG() if distributed and not loss.compiles else None
        self._compiled: Callable[[Tensor, Tensor, Draws], Outcome] | None = None

    def draw(self, inputs: Tensor, generator: torch.Generator, parts: int = 1) -> Draws:
        """The random numbers of one step, for a batch of so many parts like `inputs`."""
        count, device = len(inputs) * parts, inputs.device
        augmentation = torch.empty(0, count, device=device)
        if self.augmentation is not None:
            augmentation = self.augmentation.draw(count, generator, device)
        return Draws(augmentation, self.mixing.draw(count, generator, device))

    def forward(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        """Loss of a batch; compiled, if `compile_step` succeeded."""
        return (self._compiled or self._eager)(inputs, labels, draws)

    def _eager(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        return self._run(self.embed, inputs, labels, draws)

    def _run(self, embed: Callable[[Tensor, Draws], Embedded], inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        if self.rank_rng is None:
            return self.compare(embed(inputs, draws), labels)
        with self.rank_rng.use(inputs.device):
            embedded = embed(inputs, draws)
        return self.compare(embedded, labels)

    def embed(self, inputs: Tensor, draws: Draws) -> Embedded:
        """Augment, mix and embed images."""
        images = inputs
        if self.augmentation is not None and self.preprocessing is not None:
            images = self.augmentation.apply(inputs, draws.augmentation)
            images = self.preprocessing.normalize(self.preprocessing.resize(images))
            images = images.contiguous(memory_format=self.memory_format)
        images = images.to(self.dtype)
        if not (self.mixing.cutmix or self.mixing.mixup):
            return self.network(images), None
        mixed = self.mixing.apply(images, draws.mixing)
        return self.network(mixed.images), (mixed.partners, mixed.weights)

    def embed_plain(self, inputs: Tensor) -> Tensor:
        """The network's output for images as they are, as the model will compute it."""
        if self.preprocessing is None:
            images, options = inputs, {}
        else:
            images = self.preprocessing.to_input(inputs)
            options = {"flip_tta": True} if self.preprocessing.flip_tta else {}
        output: Tensor = self.network(images.to(self.dtype), **options)
        return output

    def compare(self, embedded: Embedded, labels: Tensor) -> Outcome:
        """The loss of embeddings."""
        components = self._components(embedded, labels)
        values = torch.stack(list(components.values()))
        total = values.sum()
        with torch.no_grad():
            names, apart = self._apart(embedded[0].detach(), labels, is_mixed=embedded[1] is not None)
            values = torch.cat([total.reshape(1), values, apart]).double()
        return Outcome(total, values, ("loss", *components, *names))

    def _apart(self, outputs: Tensor, labels: Tensor, *, is_mixed: bool) -> tuple[tuple[str, ...], Tensor]:
        """What `EpochMeans.separation` is made of."""
        if hasattr(self.loss, "anchors") or not self.loss.uses_other_samples or is_mixed:
            points = self.loss.embed(in_full_precision(outputs[:_SPREAD_ROWS]))
            # As `points.var(0).sum()`, which takes as long as a layer.
            spread = (points - points.mean(0)).square().sum() / max(1, len(points) - 1)
            return ("_spread",), spread.reshape(1)
        points, labels = self.loss.embed(in_full_precision(outputs[:_PAIR_ROWS])), labels[:_PAIR_ROWS]
        squares = torch.cdist(points, points).square()
        same = labels[:, None] == labels
        pairs = (same.triu(1), ~same)
        return _PAIRS, torch.stack([part for mask in pairs for part in ((squares * mask).sum(), mask.sum())])

    def _components(self, embedded: Embedded, labels: Tensor) -> dict[str, Tensor]:
        embeddings, mixed = embedded
        others, weights = (labels[mixed[0]], mixed[1]) if mixed else (None, None)
        if self.gathers:
            # Backward sums over ranks where DDP averages over them: together the gradient of the whole batch.
            embeddings = all_gather_with_grad(in_full_precision(embeddings))
            labels = all_gather_rows(labels)
            others, weights = (None if part is None else all_gather_rows(part) for part in (others, weights))
        if others is None or weights is None:
            return self.loss.components(embeddings, labels)
        return self.loss.mixed_components(embeddings, labels, others, weights)

    def compile(self, mode: str | None) -> None:
        """Compile forward and backward with `torch.compile`, a loss that cannot be compiled left out; lazily."""
        if self.loss.compiles and not self.gathers:
            run: Any = torch.compile(self._eager, mode=mode, dynamic=False)
        else:
            run = partial(self._run, torch.compile(self.embed, mode=mode, dynamic=False))

        def marked(inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
            # The last step's outcome and gradients have been used: their memory may be.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            outcome: Outcome = run(inputs, labels, draws)
            return outcome

        self._compiled = marked


def compile_step(
    step: Step, batch: tuple[Tensor, Tensor, Draws], mode: str | None, autocast: AbstractContextManager[Any]
) -> float | None:
    """Compile `step` and try it on a batch like those to come: the seconds it took, or None where it stays eager.

    A step that cannot be compiled trains eagerly, with a warning. Weights, statistics and RNG are left as they were.
    """
    started = time.monotonic()
    before = copy.deepcopy(step.state_dict())
    # In a sweep, each run's step is one more variant of the same code, of which torch compiles eight.
    torch.compiler.reset()
    step.train()
    with fork_rng(batch[0].device):
        try:
            step.compile(mode)
            for _ in range(3):  # a CUDA graph is recorded in the second and replayed from the third on
                with autocast:
                    loss = step(*batch).loss
                loss.backward()
                step.zero_grad(set_to_none=True)
        except Exception as error:  # whatever a compiler, its cache or a missing tool may raise
            step._compiled = None
            if is_rank_zero():
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(f"The training step could not be compiled, so training is slower: {reason}", stacklevel=2)
    step.zero_grad(set_to_none=True)
    step.load_state_dict(before)
    return None if step._compiled is None else time.monotonic() - started
