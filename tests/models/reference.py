"""What passes every site of a model, noted by plain torch hooks, without anything of ddpprobe."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from tests.models.training import STEPS, Architecture, Trained, Training
from tests.site_values import Expected, GradientHook, Key, Measured, OutputHook

_WHOLE, _STRETCHES = 2**20, 256  # elements of float32 in 4 MiB; of more, so many stretches


@dataclass
class Seen:
    """One step on one rank: `measured` of each site, and over how many `calls`."""

    measured: dict[Key, Measured] = field(default_factory=dict)
    calls: dict[Key, int] = field(default_factory=dict)


@dataclass
class Reference:
    """A training on one rank, `alone` and `watched` by hooks, and what these saw in each step."""

    alone: Trained
    watched: Trained
    steps: list[Seen]


def observe(architecture: Architecture, rank: int) -> Reference:
    """Train twice: without any hook, and with them."""
    alone = Training(architecture, rank).run()
    training = Training(architecture, rank)
    steps = _Watch(training).run()
    assert not getattr(sys.modules.get("ddpprobe.probe"), "_live", ())  # it may be imported
    return Reference(alone, training.trained(), steps)


class _Watch:
    """Places the hooks, takes the steps, and measures what was seen in each."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._now = Expected()
        self._parameters = {
            name: p for name, p in training.model.named_parameters() if p.requires_grad
        }
        self._buffers = {  # but for masks, which have infinities
            name: b
            for name, b in training.model.named_buffers()
            if b.is_floating_point() and not b.isinf().any()
        }
        for path, module in training.model.named_modules():
            module.register_forward_hook(OutputHook(self._see, self._tap, path))
        for name, parameter in self._parameters.items():
            parameter.register_hook(GradientHook(self._see, (name, "grad_local", "")))

    def run(self) -> list[Seen]:
        """Take all steps."""
        return [self._step() for _ in range(STEPS)]

    def _see(self, key: Key, tensor: torch.Tensor) -> None:
        self._now.see(key, tensor)

    def _tap(self, key: Key) -> None:
        self._now.tap(key)

    def _step(self) -> Seen:
        self._now = Expected()
        self._training.backward()
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._now.see((name, "grad", ""), parameter.grad)
        self._training.update()
        for name, parameter in self._parameters.items():
            self._now.see((name, "param", ""), parameter)
            self._now.see((name, "update", ""), _looked_at(parameter.detach() - before[name]))
            state = self._training.optimizer.state.get(parameter, {})
            if "exp_avg_sq" in state:
                self._now.see((name, "optim_state", "exp_avg_sq"), state["exp_avg_sq"])
        for name, buffer in self._buffers.items():
            self._now.see((name, "buffer", ""), buffer)
        keys = self._now.values
        return Seen(
            {key: Measured.of(self._now.of(key)) for key in keys},
            {key: len(values) for key, values in keys.items()},
        )


def _looked_at(change: torch.Tensor) -> torch.Tensor:
    """Return the part of a change that a row of kind `update` is documented to be of."""
    if change.numel() <= _WHOLE:
        return change
    every = change.numel() // _STRETCHES
    spread = change.reshape(-1)[: _STRETCHES * every].view(_STRETCHES, every)
    return spread[:, : _WHOLE // _STRETCHES]
