"""What is switched on and off between the blocks: ddpprobe, plain hooks, and its peers.

Each variant is a function of the training and a scratch directory that installs itself, switched
off; its `on` and `off` are called outside of the clock, `begin` and `end` around each step inside.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import ddpprobe
from benchmarks.workloads import Training
from ddpprobe.rank.hooks.row_buffer import RowBuffer
from ddpprobe.rank.stats import native


class Variant:
    """One that does nothing: "no probe against itself" tells the noise of the measurement."""

    def __init__(self, training: Training, scratch: Path) -> None:
        self._training, self._model = training, training.model
        self._scratch = scratch

    def on(self) -> None:
        """Begin to observe the model."""

    def off(self) -> None:
        """Leave it as it was."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, loss: Tensor) -> None:
        """A step is over."""

    def own_seconds(self) -> float:
        """Return what it says itself that it took since `on`, in host seconds; NaN: nothing."""
        return math.nan


class Sampled(Variant):
    """ddpprobe, installed for the block and closed after it, so that "without" is without.

    The first two steps after `install()` are not timed: one looks at the model once more, the other
    learns which gradients may be read together. The daemon does not run: it takes nothing from the
    ranks but cores, and has a section of its own.
    """

    EVERY = 1
    _installs = itertools.count()

    def on(self) -> None:
        run = self._scratch / f"run{next(self._installs)}"
        self._probe = ddpprobe.install(self._model, run_dir=run, every=self.EVERY, daemon="none")
        for _ in range(2):
            self._training.step()

    def off(self) -> None:
        self._probe.close()

    def own_seconds(self) -> float:
        recorder = self._probe._recorder  # noqa: SLF001  (an experiment on the inside)
        return float(recorder._clock.probe_seconds)  # noqa: SLF001


class Unsampled(Sampled):
    """No step is sampled but the first, which is not timed; the every-step watch looks."""

    EVERY = 1 << 40


class Default(Sampled):
    """As `install(model)` samples by default."""

    EVERY = 10


class Callbacks(Unsampled):
    """The hooks of an unsampled step as they hang, but each returns at once.

    What Python takes to be called at all: less than this no tool of hooks can cost.
    """

    def on(self) -> None:
        super().on()
        recorder = self._probe._recorder  # noqa: SLF001  (an experiment on the inside)
        recorder.fuse.blown = recorder._clock_fuse.blown = True  # noqa: SLF001


class _Hooks(Variant):
    """Hooks of our own on outputs, their gradients, and the gradients of parameters."""

    GRADIENTS = True

    def on(self) -> None:
        self._handles: list[RemovableHandle] = []
        for module in self._model.modules():
            self._handles.append(module.register_forward_hook(self._forward))
        if self.GRADIENTS:
            for parameter in self._model.parameters():
                self._handles.append(parameter.register_hook(self.look))

    def off(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self, module: nn.Module, args: object, output: object) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor):
                self.seen(module, tensor)
                if self.GRADIENTS and tensor.requires_grad:
                    tensor.register_hook(self.look)

    def seen(self, module: nn.Module, output: Tensor) -> None:
        self.look(output)

    def look(self, tensor: Tensor) -> None:
        """Do nothing."""


class NoOp(_Hooks):
    """Hooks that do nothing: what the calls alone cost."""


class Item(_Hooks):
    """What one writes in five minutes."""

    def look(self, tensor: Tensor) -> None:
        x = tensor.detach()
        x.mean().item(), x.std(correction=0).item(), x.abs().max().item(), x.isfinite().all().item()


class ReadOnce(_Hooks):
    """Each tensor that a sampled step observes is read once, and nothing is kept of it.

    What memory takes to be read: less than this no statistics can cost.
    """

    def on(self) -> None:
        super().on()
        native.prepare()
        self._buffer = RowBuffer(self._training.device)
        optimizer = self._training.optimizer
        self._handles.append(optimizer.register_step_pre_hook(self._reduced))

    def look(self, tensor: Tensor) -> None:
        self._buffer.reduce(tensor, 0)

    def _reduced(self, *_: object) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self.look(parameter.grad)


class ActivationStats(_Hooks):
    """The same numbers as fastai's ActivationStats(with_hist=True), in plain hooks.

    Of the outputs of modules that have parameters: mean, deviation, share of elements up to 0.05,
    and a histogram of 40 bins over [0, 10]; fastai itself wants a Learner.
    """

    GRADIENTS = False

    def seen(self, module: nn.Module, output: Tensor) -> None:
        if next(module.parameters(recurse=False), None) is not None:
            x = output.detach().float()
            x.mean().item(), x.std().item()
            (x <= 0.05).long().sum().item()
            x.histc(40, 0, 10)


class DetectAnomaly(Variant):
    """torch.autograd.set_detect_anomaly."""

    def on(self) -> None:
        torch.autograd.set_detect_anomaly(True)

    def off(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class WandbWatch(Variant):
    """`wandb.watch(log="all", log_freq=1)` offline, on rank 0, which logs each step's loss."""

    def __init__(self, training: Training, scratch: Path) -> None:
        super().__init__(training, scratch)
        self._run = None
        if dist.get_rank() == 0:
            import wandb  # noqa: PLC0415  (a peer need not be installed)

            self._run = wandb.init(project="benchmark", mode="offline", dir=str(scratch))
        self._on = False

    def on(self) -> None:
        self._on = self._run is not None
        if self._on:
            self._run.watch(self._model, log="all", log_freq=1)

    def off(self) -> None:
        if self._on:
            self._run.unwatch(self._model)
        self._on = False

    def end(self, loss: Tensor) -> None:
        if self._on:
            self._run.log({"loss": loss.item()})


class UnderflowOverflow(Variant):
    """transformers' DebugUnderflowOverflow, which looks at inputs, outputs and parameters."""

    def on(self) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow  # noqa: PLC0415

        self._debug = DebugUnderflowOverflow(self._model)

    def off(self) -> None:  # it has no way to take its hooks off
        for module in self._model.modules():
            for key, hook in list(module._forward_hooks.items()):  # noqa: SLF001
                if getattr(hook, "__self__", None) is self._debug:
                    del module._forward_hooks[key]  # noqa: SLF001


class MsprobeL0(Variant):
    """msprobe's PrecisionDebugger, statistics of modules; switched off, its hooks just return."""

    LEVEL = "L0"

    def __init__(self, training: Training, scratch: Path) -> None:
        super().__init__(training, scratch)
        from msprobe.pytorch import PrecisionDebugger  # noqa: PLC0415

        self._debugger = PrecisionDebugger(
            dump_path=str(scratch / "dump"), task="statistics", level=self.LEVEL
        )
        self._on = False

    def on(self) -> None:
        self._on = True

    def off(self) -> None:
        self._on = False

    def begin(self) -> None:
        if self._on:
            self._debugger.start(model=self._model)

    def end(self, loss: Tensor) -> None:
        if self._on:
            self._debugger.stop()
            self._debugger.step()


class MsprobeMix(MsprobeL0):
    """The same with the functions of torch beside the modules."""

    LEVEL = "mix"


# name: (title, what makes it, what it must be able to import)
VARIANTS: dict[str, tuple[str, Callable[[Training, Path], Variant], str]] = {
    "none": ("no probe, against itself (the noise)", Variant, "torch"),
    "sampled": ("**ddpprobe, sampled step**", Sampled, "torch"),
    "unsampled": ("**ddpprobe, unsampled step**, with the watch", Unsampled, "torch"),
    "default": ("ddpprobe, every 10th step sampled", Default, "torch"),
    "read": ("every tensor of a sampled step read once, nothing else", ReadOnce, "torch"),
    "callbacks": ("the hooks of an unsampled step, returning at once", Callbacks, "torch"),
    "no-op": ("hooks that do nothing", NoOp, "torch"),
    "item": ("naive `.item()` hooks", Item, "torch"),
    "anomaly": ("`torch.autograd.set_detect_anomaly`", DetectAnomaly, "torch"),
    "activation-stats": ("fastai's ActivationStats, equal hooks", ActivationStats, "torch"),
    "wandb": ('`wandb.watch(log="all", log_freq=1)`, offline, rank 0', WandbWatch, "wandb"),
    "transformers": ("transformers `DebugUnderflowOverflow`", UnderflowOverflow, "transformers"),
    "msprobe-L0": ("msprobe, statistics, level L0", MsprobeL0, "msprobe"),
    "msprobe-mix": ("msprobe, statistics, level mix", MsprobeMix, "msprobe"),
}
OURS = ("none", "sampled", "unsampled", "default", "read", "callbacks")
PEERS = tuple(name for name in VARIANTS if name not in OURS)


def missing(name: str) -> str | None:
    """Return the package that a variant needs and that is not installed."""
    package = VARIANTS[name][2]
    return package if importlib.util.find_spec(package) is None else None
