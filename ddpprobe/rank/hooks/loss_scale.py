"""The scale that a GradScaler has multiplied the loss with, so that gradients can be told unscaled.

A script does not hand us its scaler, and torch keeps no list of them, so it is looked for among the
living objects: at the first two backwards (the first may be that of a gradient penalty, before any
loss is scaled), and again when a step is skipped while none is known. Of several enabled scalers in
one process ours is the one that was told to step an optimizer of this model. Until one was, none is
taken, and said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank import torch_private
from ddpprobe.rundir.fuse import logger

_LOOKS = 2


@final
class LossScaleReader:
    """Finds the scaler and reads its scale.

    Attributes:
        last: the scale at the last backward, float32 [] on the scaler's device; None: none in use.
    """

    def __init__(self) -> None:
        self._warned = False
        self.last: Tensor | None = None
        self._looks = _LOOKS
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._ours: weakref.ref[torch.amp.GradScaler] | None = None  # stepped our optimizer
        self._others: set[weakref.ref[torch.amp.GradScaler]] = set()  # stepped none of ours
        # Of each: what it notes of optimizers until its next update(), and those stepped by now.
        self._rounds: list[tuple[weakref.ref[torch.amp.GradScaler], object, frozenset[int]]] = []

    def remember(
        self, *, told: bool, owned: Callable[[], set[int]], may_own: Callable[[int], bool]
    ) -> None:
        """At the end of a backward: keep its scale, which a skipped step lowers.

        Args:
            told: the user has given the scale, so nothing is amiss if it cannot be found.
            owned: returns the ids of optimizers that stepped this model.
            may_own: as of `gave_up`.
        """
        if self._looks:
            self._looks -= 1
            self._look()
        self._learn(owned, may_own)
        scaler = self._choose(told=told)
        scale = torch_private.scale_of(scaler) if scaler is not None else None
        self.last = scale.clone() if scale is not None else None
        self._rounds = [
            (ref, round_, torch_private.stepped_in(round_))
            for ref in self._scalers
            if (scaler := ref()) is not None
            and (round_ := torch_private.round_of(scaler)) is not None
        ]

    def gave_up(self, may_own: Callable[[int], bool]) -> bool:
        """Whether a scaler was told to step an optimizer since the last backward.

        If that optimizer did not step, the scaler skipped it. The host knows without the device.

        Args:
            may_own: whether the optimizer of an id has parameters of this model, or may have.
        """
        return any(may_own(optimizer) for _, ids in self._stepped() for optimizer in ids)

    def look_again(self) -> None:
        """Search once more at the next backward, if no scaler is known."""
        if not any(ref() is not None for ref in self._scalers):
            self._looks = 1

    def _stepped(self) -> list[tuple[weakref.ref[torch.amp.GradScaler], frozenset[int]]]:
        """Return the ids of optimizers that scalers were told to step since the last backward."""
        return [(s, torch_private.stepped_in(now) - before) for s, now, before in self._rounds]

    def _look(self) -> None:
        used = [s for s in torch_private.loss_scalers() if torch_private.scale_of(s) is not None]
        self._scalers = [weakref.ref(scaler) for scaler in used]

    def _learn(self, owned: Callable[[], set[int]], may_own: Callable[[int], bool]) -> None:
        """Hear which scaler steps whose optimizers."""
        for scaler, ids in self._stepped():
            if ids & owned():
                self._ours = scaler
                self._others.discard(scaler)
            elif ids and scaler != self._ours and not any(map(may_own, ids)):
                self._others.add(scaler)

    def _choose(self, *, told: bool) -> torch.amp.GradScaler | None:
        if self._ours is not None and (ours := self._ours()) is not None:
            return ours
        fit = [s for ref in self._scalers if ref not in self._others and (s := ref()) is not None]
        if len(fit) > 1 and not (told or self._warned):
            self._warned = True
            logger.warning(
                "ddpprobe: several enabled GradScalers live in this process, so which one scales "
                "this loss is not known until it steps an optimizer of this model: gradients are "
                "recorded as they are. Tell the scale with "
                "probe.log(loss_scale=scaler.get_scale()) before backward()."
            )
        return fit[0] if len(fit) == 1 else None


def of_optimizer(optimizer: object) -> Tensor | None:
    """Return the scale a *fused* optimizer will divide by itself: its gradients are still scaled.

    GradScaler leaves it in the optimizer's `grad_scale` for the time of the step.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, Tensor) else None


def found_inf(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer (called even then) was told by GradScaler to do nothing."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
