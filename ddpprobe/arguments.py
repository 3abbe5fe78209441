"""What `install()` was called with: every argument checked, where an error reaches all ranks."""

from __future__ import annotations

import fnmatch
import math
import os
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, final

from torch import nn

from ddpprobe.records import Anomaly
from ddpprobe.sampling import Schedule, as_schedule
from ddpprobe.topology import stages
from ddpprobe.topology.describe import Topology, describe

_BACKWARD = ("output", "full")
_DAEMON = ("auto", "none")
_ON_ANOMALY, _TELL = ("record", "stop"), "tell"


@final
class Arguments:
    """What `install()` was called with on this rank.

    Args:
        run_of: returns the run directory of the living probe on a model, None without one.

    Attributes:
        capture: globs over the FQNs of the modules whose tensors are kept.
        found: the model; set by `check`, which runs where an error reaches all ranks.
    """

    def __init__(
        self, model: object, every: int | Schedule, include: str | Iterable[str],
        exclude: str | Iterable[str], capture: str | Iterable[str],
        on_anomaly: str | Callable[[Anomaly], object],
        budget: float | None, backward: str, daemon: str, first_step: int,
        run_of: Callable[[nn.Module], str | None],
    ) -> None:  # fmt: skip
        self._model = model
        self._every = every
        self._include = _globs(include)
        self._exclude = _globs(exclude)
        self.capture = _globs(capture)
        self._on_anomaly = on_anomaly
        self._budget = budget
        self._backward = backward
        self._daemon = daemon
        self._first_step = first_step
        self._run_of = run_of
        self._chosen: dict[str, bool] = {}
        self.found: Topology

    def check(self) -> dict[str, Any]:
        """Return this rank's part of the plan.

        Raises:
            ValueError: a wrong argument.
        """
        if not isinstance(self._model, nn.Module):
            raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                f"install() takes a torch.nn.Module, got {type(self._model).__name__}. "
                "Write ddpprobe.install(model)."
            )
        schedule, budget = self.schedule(), self.budget()
        for option, value, allowed in (
            ("backward", self._backward, _BACKWARD), ("daemon", self._daemon, _DAEMON),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {value!r}")
        if self.response not in (*_ON_ANOMALY, _TELL):
            raise ValueError(
                "on_anomaly must be 'record', 'stop' or a function that takes an Anomaly, got "
                f"{self._on_anomaly!r}"
            )
        step = self._first_step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"first_step must be a step number, 0 or more, got {step!r}")
        found = self.found = describe(self._model, self.select)
        owner = self._run_of(found.root)
        if owner is not None:
            raise ValueError(
                f"this {type(found.root).__name__} already has a probe (run {owner}). "
                "Call probe.close() before installing another."
            )
        settings = [schedule.fingerprint(), self._include, self._exclude, self._backward, step]
        return {
            "settings": [*settings, budget, self.response, self.capture],
            "every": schedule.every,
            "wrapper": found.wrapper, "device": str(found.device),
            "unmatched": self._unmatched(found), "parts": stages.parts(found),
        }  # fmt: skip

    @property
    def response(self) -> str:
        """What the head announces at a page beside a capture: "record" (nothing), "stop", "tell".

        Empty if the user wrote none of them, which `check` refuses.
        """
        known = isinstance(self._on_anomaly, str) and self._on_anomaly in _ON_ANOMALY
        return _TELL if callable(self._on_anomaly) else str(self._on_anomaly) if known else ""

    def schedule(self) -> Schedule:
        """Return the schedule; `DDPPROBE_EVERY` overrides the argument."""
        text = os.environ.get("DDPPROBE_EVERY")
        if text is None:
            return as_schedule(self._every)
        if not text.isdecimal():
            raise ValueError(f"DDPPROBE_EVERY must be a whole number of steps, got {text!r}")
        return as_schedule(int(text))

    def budget(self) -> float | None:
        """Return the budget; `DDPPROBE_BUDGET` overrides the argument."""
        text = os.environ.get("DDPPROBE_BUDGET")
        try:
            budget = self._budget if text is None else float(text)
        except ValueError:
            budget = math.nan
        number = isinstance(budget, float) and 0 < budget < 1
        if budget is not None and not number:
            came = repr(self._budget) if text is None else f"DDPPROBE_BUDGET={text}"
            raise ValueError(
                "budget must be a share of the step time, between 0 and 1 (0.01: sampling may add "
                f"1 %), or None; got {came}"
            )
        return budget

    def select(self, fqn: str) -> bool:
        """Whether the module `fqn` is observed."""
        if fqn not in self._chosen:
            self._chosen[fqn] = _matches(fqn, self._include) and not _matches(fqn, self._exclude)
        return self._chosen[fqn]

    def _unmatched(self, found: Topology) -> dict[str, str]:
        """Globs that match nothing here, with what to say if they match nothing on any rank."""
        names = [fqn for fqn, _ in found.named_modules()]
        some = textwrap.shorten(", ".join(filter(None, names)), 200, placeholder=" ...")
        return {
            f"{option} {glob}": f"{option} glob {glob!r} matches no module. There are: {some}"
            for option, globs in (
                ("include", self._include),
                ("exclude", self._exclude),
                ("capture", self.capture),
            )
            for glob in globs
            if not any(_matches(name, (glob,)) for name in names)
        }


def _globs(globs: str | Iterable[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def _matches(fqn: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, glob) for glob in globs)
