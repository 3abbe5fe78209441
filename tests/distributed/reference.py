"""What an unsharded model in one process sees of a step: the truth that merged records must equal.

Plain torch hooks; nothing of ddpprobe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Key = tuple[str, str, str]
_EPS = torch.finfo(torch.float32).eps


class Reference:
    """All values of one step, by site, from one process that plays the data-parallel `groups`.

    `build()` makes the model, `batch(micro, group)` its input; it returns its loss as item 1.
    """

    def __init__(
        self, build: Callable[[], nn.Module], batch: Callable[[int, int], torch.Tensor],
        groups: Sequence[int], micros: int,
    ) -> None:  # fmt: skip
        self._build = build
        self.tensors: dict[Key, list[torch.Tensor]] = {}
        self.rounding: dict[Key, float] = {}  # of one element, beyond its share of the largest one
        self.reduced: dict[str, torch.Tensor] = {}
        for group in groups:
            model = build()
            for name, module in model.named_modules():
                module.register_forward_hook(self._hook(name))
            for name, parameter in model.named_parameters():
                parameter.register_hook(lambda g, n=name: self._see((n, "grad_local", ""), g))
            for micro in range(micros):
                model(batch(micro, group))[1].backward()
            for name, parameter in model.named_parameters():
                self.reduced[name] = self.reduced.get(name, 0) + parameter.grad / len(groups)

    def step(self, rate: float) -> Reference:
        """Take the first step of SGD: the weights after it, and what it changes of them."""
        for name, before in self._build().named_parameters():
            after = before.detach() - rate * self.reduced[name]
            self._see((name, "param", ""), after)
            self._see((name, "update", ""), after - before)
            self.rounding[name, "update", ""] = _EPS * float(before.detach().abs().max())
        return self

    def _hook(self, name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            leaves = [("", output)] if isinstance(output, torch.Tensor) else enumerate(output)
            for leaf, tensor in leaves:
                self._see((name, "output", str(leaf)), tensor)
                key = (name, "grad_output", str(leaf))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g, key=key: self._see(key, g))

        return hook

    def _see(self, key: Key, tensor: torch.Tensor) -> None:
        self.tensors.setdefault(key, []).append(tensor.detach().double().clone().reshape(-1))

    def of(self, key: Key) -> torch.Tensor:
        """All elements of a site, float64 [n]."""
        if key[1] == "grad":
            return self.reduced[key[0]].double().reshape(-1)
        return torch.cat(self.tensors[key])

    @property
    def keys(self) -> set[Key]:
        return set(self.tensors) | {(name, "grad", "") for name in self.reduced}
