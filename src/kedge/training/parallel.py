"""Data parallelism: how a batch is split among processes and accumulation steps, and Fabric for it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.precision.amp import MixedPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kedge.distributed import all_reduce_mean_, global_rank, is_torchrun, world_size
from kedge.errors import ConfigError
from kedge.training.config import Settings

__all__ = [
    "SINGLE_PROCESS",
    "Layout",
    "average_batch_statistics",
    "device_of",
    "layout_of",
    "make_fabric",
    "precision_on",
]


@dataclass(frozen=True)
class Layout:
    """Processes (on each of some machines) and accumulation steps that share a batch, and this process's rank."""

    devices: int = 1
    nodes: int = 1
    accumulate: int = 1
    rank: int = 0

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.devices * self.nodes

    @property
    def parts(self) -> int:
        """Of a batch: one for each process and accumulation step."""
        return self.processes * self.accumulate

    def batch_size(self, requested: int, images: int) -> int:
        """The global batch: as requested, or as large as so few images allow."""
        size = requested if requested <= images else images - images % self.parts
        if self.parts > 1 and size < 2 * self.parts:
            raise ConfigError(f"{images} training images are too few for {self}: each needs at least two at a time.")
        return size

    def check(self, batch_size: int) -> None:
        """Refuse a batch that cannot be split evenly."""
        if batch_size % self.parts or (self.parts > 1 and batch_size < 2 * self.parts):
            raise ConfigError(
                f"recipe.batch_size must be a multiple of {self.parts}, with at least two images for each of "
                f"{self}, found {batch_size}."
            )

    def __str__(self) -> str:
        words = [f"{self.processes} processes"] if self.processes > 1 else []
        words += [f"{self.accumulate} steps (trainer.accumulate)"] if self.accumulate > 1 else []
        return " times ".join(words)


SINGLE_PROCESS = Layout()


def layout_of(settings: Settings, *, resumed: bool = False) -> Layout:
    """The layout that the settings ask for or, under torchrun, the one that it has started."""
    trainer = settings.trainer
    if world_size() > 1 and not is_torchrun():
        raise ConfigError(f"{world_size()} processes of another kind are at work: start them with torchrun.")
    device = device_of(trainer.accelerator)
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    devices = available if isinstance(trainer.devices, str) else trainer.devices
    nodes = trainer.num_nodes
    if is_torchrun():
        started = int(os.environ["LOCAL_WORLD_SIZE"])
        if not resumed and trainer.devices not in ("auto", 1, started):
            raise ConfigError(f"torchrun started {started} processes on this machine, but trainer.devices={devices}.")
        devices, nodes = started, int(os.environ["WORLD_SIZE"]) // started
    if device.type == "cuda" and devices > available:
        raise ConfigError(f"trainer.devices={devices}, but this machine has {available} GPUs.")
    layout = Layout(devices, nodes, trainer.accumulate, global_rank())
    layout.check(settings.recipe.batch_size)
    return layout


def device_of(accelerator: str) -> torch.device:
    """The kind of device to train on."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=gpu, but no CUDA GPU is there: use auto or cpu.")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def make_fabric(settings: Settings, layout: Layout, device: torch.device, *, find_unused_parameters: bool) -> Fabric:
    """Fabric for one process, or DDP for several; one seed gives one result on the same machine."""
    # cuDNN's kernels that always add in one order, and no search for others.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if settings.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.trainer.deterministic)
    strategy: Any = "auto"
    if layout.processes > 1:
        warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")  # its successor is too new
        # Buffers are averaged (`average_batch_statistics`), not broadcast from rank 0.
        strategy = DDPStrategy(find_unused_parameters=find_unused_parameters, broadcast_buffers=False)
    plugins: list[Any] = [TorchElasticEnvironment()] if layout.processes > 1 else []
    precision = precision_on(device, settings.trainer.precision)
    if precision.endswith("-mixed"):
        plugins.append(_MixedPrecision(precision, device.type))  # type: ignore[arg-type]
    fabric = Fabric(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=layout.devices,
        num_nodes=layout.nodes,
        strategy=strategy,
        # Otherwise "32-true", also in float64, where the module itself is: the plugin would cast the loss to float32.
        plugins=plugins,
    )
    fabric.launch()
    return fabric


class _MixedPrecision(MixedPrecision):
    """Autocast alone: a batch's random numbers, rounded to bfloat16 as Fabric does with inputs, would reach 1."""

    def convert_input(self, data: Any) -> Any:
        """As it is."""
        return data


def precision_on(device: torch.device, precision: str) -> str:
    """The precision that `auto` stands for."""
    if precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    return precision


def average_batch_statistics(network: nn.Module) -> None:
    """Average over ranks the statistics of batch normalisation that is not synchronised."""
    layers = (layer for layer in network.modules() if isinstance(layer, _BatchNorm))
    local = (layer for layer in layers if not isinstance(layer, nn.SyncBatchNorm))
    buffers: list[Tensor] = [value for layer in local for value in layer.buffers() if value.is_floating_point()]
    all_reduce_mean_(buffers)
