"""`vanishing`: next to nothing of the gradient reaches a part of the model."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, grown
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.records.step import Anomaly, StepRecord

_NUMBER = re.compile(r"\d+")


class Vanishing(SoundStepsDetector):
    """Warns, once, when some weight's gradient is many decades below another's, and stays so.

    Compared is the rms over a weight with those of the same name but for numbers in it, in other
    layers; where there are none, with all. Queries and keys may get far less than an embedding in
    good health, but not than those of the next layer. Biases, and gradients of zeros only, are not
    looked at (a gradient that stopped is what `grad_none_or_zero` finds).

    Args:
        decades: between the largest and the smallest rms.
        steps: steps for which it must last.
        samples: sampled steps for which it must last.
    """

    name = "vanishing"
    title = "Gradients vanish along the depth"

    def __init__(self, *, decades: float = 5.0, steps: int = 50, samples: int = 5) -> None:
        above_zero(decades=decades)
        at_least(0, steps=steps)
        at_least(1, samples=samples)
        self._decades, self._steps, self._samples = decades, steps, samples
        self._reset()

    def _reset(self) -> None:
        self._gradients = SitesOfKind("grad")
        self._since = np.zeros(0, np.int64)  # of each gradient: first step of its looks in a row
        self._lasted = np.zeros(0, np.int64)  # at which it is so far below, and how many
        self._told = False
        self._weight = np.zeros(0, bool)  # of each gradient: whether it is a weight's
        self._peers = np.zeros(0, np.intp)  # of each gradient: which have its name in other layers

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if self._told or record.skipped:
            return []
        rms = self._gradients.read(record, "rms")
        fqns = self._gradients.fqns
        if len(self._weight) < len(fqns):
            self._weight = np.array([not fqn.endswith("bias") for fqn in fqns])
            names = [_NUMBER.sub("#", fqn) for fqn in fqns]
            self._peers = np.unique(names, return_inverse=True)[1]
        weights = np.flatnonzero(self._weight & (rms > 0))
        if len(weights) < 2:
            return []
        below, beside = self._below(rms, weights)
        lasting = self._follow(weights, below > self._decades, record.step)
        if not lasting.any():
            return []
        self._told = True
        place = int(np.argmax(np.where(lasting, below, -np.inf)))
        smallest, largest, decades = weights[place], beside[place], below[place]
        message = (
            f"its gradient (rms {rms[smallest]:.3g}) is {decades:.1f} decades below that of "
            f"{fqns[largest]} ({rms[largest]:.3g}), and has been more than {self._decades:.3g} "
            f"below the largest since step {self._since[smallest]}: unless the optimizer "
            "divides by the size of gradients, it is hardly trained; look at activations that "
            "saturate, at the initialization, at missing norms or residual connections"
        )
        values = {
            "decades": float(decades),
            "smallest": float(rms[smallest]),
            "largest": float(rms[largest]),
        }
        return [
            self.anomaly(
                record, "warn", message, values, module=fqns[smallest], kind="grad",
                phase="backward",
            )
        ]  # fmt: skip

    def _follow(self, weights: NDArray[np.intp], far: Mask, step: int) -> Mask:
        """Take which weights are far below others at a step; return those that are for long."""
        sites = len(self._weight)
        self._since, self._lasted = (grown(of, sites, 0) for of in (self._since, self._lasted))
        self._since[weights[far & (self._lasted[weights] == 0)]] = step
        before, self._lasted = self._lasted, np.zeros(sites, np.int64)
        self._lasted[weights[far]] = before[weights[far]] + 1
        enough = self._lasted[weights] >= self._samples
        lasting: Mask = far & enough & (step - self._since[weights] >= self._steps)
        return lasting

    def _below(self, rms: Floats, weights: NDArray[np.intp]) -> tuple[Floats, NDArray[np.intp]]:
        """Return by how many decades weights are below the largest of those beside them: which."""
        peers, logs = self._peers[weights], np.log10(rms[weights])
        best = np.full(len(self._peers), -1)  # by group: place in `weights` of the largest one
        ascending = np.argsort(logs, kind="stable")
        best[peers[ascending]] = ascending  # the last one stays
        alone = np.bincount(peers, minlength=len(best))[peers] == 1
        beside = np.where(alone, ascending[-1], best[peers])
        return logs[beside] - logs, weights[beside]
