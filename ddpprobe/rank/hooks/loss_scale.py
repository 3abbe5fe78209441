"""The scale that a GradScaler has multiplied the loss with, so that gradients can be told unscaled.

A script does not hand us its scaler, and torch keeps no list of them, so it is looked for among the
living objects: once, at the first backward, and again when a step is skipped while none is known.
Two enabled scalers in one process cannot be told apart: then none is taken, and said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rundir.fuse import logger

# Kinds that a backward produces; `grad` too, as long as nobody has unscaled it.
SCALED_KINDS = ("grad_output", "grad_input", "grad_local")


@final
class LossScaleReader:
    """Finds the scaler and reads its scale.

    Attributes:
        last: the scale at the last backward, float32 [] on the scaler's device; None: none in use.
    """

    def __init__(self) -> None:
        self._warned = False
        self.last: Tensor | None = None
        self._looked = False
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None  # if it is the only one
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        # Of each: what it notes of optimizers until its next update(), and those stepped by now.
        self._rounds: list[tuple[object, frozenset[int]]] = []

    def remember(self, *, told: bool) -> None:
        """At the end of a backward: keep its scale, which a skipped step lowers.

        `told`: the user has given the scale, so nothing is amiss if it cannot be found.
        """
        if not self._looked:
            self._looked = True
            self._look(told=told)
        scaler = self._living()
        scale = torch_private.scale_of(scaler) if scaler is not None else None
        self.last = scale.clone() if scale is not None else None
        rounds = [torch_private.round_of(s) for ref in self._scalers if (s := ref()) is not None]
        self._rounds = [(round_, torch_private.stepped_in(round_)) for round_ in rounds]

    def gave_up(self, may_own: Callable[[int], bool]) -> bool:
        """Whether a scaler was told to step an optimizer since the last backward.

        If that optimizer did not step, the scaler skipped it. The host knows without the device.

        Args:
            may_own: whether the optimizer of an id has parameters of this model, or may have.
        """
        new = [torch_private.stepped_in(round_) - before for round_, before in self._rounds]
        return any(may_own(optimizer) for ids in new for optimizer in ids)

    def look_again(self) -> None:
        """Search once more at the next backward, if no scaler is known."""
        self._looked = self._living() is not None

    def _living(self) -> torch.amp.GradScaler | None:
        return self._scaler() if self._scaler is not None else None

    def _look(self, *, told: bool) -> None:
        used = [s for s in torch_private.loss_scalers() if torch_private.scale_of(s) is not None]
        self._scalers = [weakref.ref(scaler) for scaler in used]
        self._scaler = self._scalers[0] if len(used) == 1 else None
        if len(used) > 1 and not (told or self._warned):
            self._warned = True
            logger.warning(
                "ddpprobe: several enabled GradScalers live in this process, so which one scales "
                "this loss is not known: gradients are recorded as they are. Tell the scale with "
                "probe.log(loss_scale=scaler.get_scale()) before backward()."
            )


def of_optimizer(optimizer: object) -> Tensor | None:
    """Return the scale a *fused* optimizer will divide by itself: its gradients are still scaled.

    GradScaler leaves it in the optimizer's `grad_scale` for the time of the step.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, Tensor) else None
