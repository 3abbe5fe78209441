"""What `install()` was called with: every option checked, where an error reaches all ranks."""

from __future__ import annotations

import fnmatch
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from torch import nn

from ddpprobe.daemon import variables
from ddpprobe.detectors.settings import Settings
from ddpprobe.detectors.suite import chosen
from ddpprobe.errors import InstallError
from ddpprobe.rank.host import Host
from ddpprobe.rank.schedule import Schedule, as_schedule, is_step
from ddpprobe.rank.topology import stages
from ddpprobe.rank.topology.describe import Topology, describe
from ddpprobe.rank.topology.engine import Engine
from ddpprobe.rank.topology.naming import clean
from ddpprobe.rank.topology.refusals import refuse_taken
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import store_url
from ddpprobe.rundir.paths import RUN_VARIABLE

_BACKWARD = ("output", "full")
_DAEMON = ("auto", "none")
MOST_STEPS = 1 << 53  # below it every whole number is one of float64, too
MOST_NAMED = 128  # modules and parameters with histograms
_SEVERAL = "Several models have names: write ddpprobe.install({'generator': g, 'critic': c})."
_ON_ANOMALY, _TELL = ("record", "stop"), "tell"


class Variable(str):
    """A value as the environment gave it, which is a text whatever it stands for."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOptions:
    """The arguments of `install()` on this rank, and what the environment says instead.

    As they came: `check` is where a wrong one is refused. `listen` is where the daemon serves.
    `model` is the name of one of several that are installed together, "" of a lone one, and
    `beside` the directory that holds their runs, once the first of them has it. `engine` trains the
    model, if one does. `host` is the model that frozen ones follow, or, if this one `follows`, its
    host.
    """

    run_dir: str | os.PathLike[str] | None
    every: int | Schedule | Variable
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    capture: tuple[str, ...]
    on_anomaly: str | Callable[[Anomaly], object]
    budget: float | Variable | None
    backward: str
    name: str | None
    daemon: str
    first_step: int
    detectors: Mapping[str, object]
    task: str | None
    histograms: tuple[str, ...] = ()
    listen: str | None = None
    model: str = ""
    beside: list[str] = field(default_factory=list)
    engine: Engine | None = None
    host: Host | None = None
    follows: bool = False
    _chosen: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_environment(self) -> InstallOptions:
        """Return them with what the environment overrides; an empty variable is none."""
        return replace(
            self,
            run_dir=_variable(RUN_VARIABLE) or self.run_dir,
            every=_variable("DDPPROBE_EVERY") or self.every,
            budget=_variable("DDPPROBE_BUDGET") or self.budget,
            listen=_variable("DDPPROBE_LISTEN"),
        )

    def check(self, model: object, run_of: Callable[[nn.Module], str | None]) -> Checked:
        """Look at every option and at the model.

        Args:
            model: as `install()` was given it.
            run_of: returns the run directory of the living probe on a model, None without one.

        Raises:
            ValueError: a wrong argument, or a system on which no run can be recorded.
        """
        # What a rank leaves to its daemon stands on /proc and /dev/shm, and was tried nowhere else.
        if sys.platform != "linux":
            raise ValueError(
                f"install() records on Linux only, and this is {sys.platform}: train on Linux, or "
                "set DDPPROBE_DISABLE=1 to train here without a probe."
            )
        if not isinstance(model, nn.Module):
            several = isinstance(model, list | tuple | set)
            raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                f"install() takes a torch.nn.Module, got {type(model).__name__}. "
                + (_SEVERAL if several else "Write ddpprobe.install(model).")
            )
        self._check_names()
        schedule, budget = self.schedule(), self.share()
        if self.starts_daemon:
            variables.check()
        for option, value, allowed in (
            ("backward", self.backward, _BACKWARD), ("daemon", self.daemon, _DAEMON),
        ):  # fmt: skip
            if not (isinstance(value, str) and value in allowed):
                raise ValueError(f"{option} must be one of {allowed}, got {value!r}")
        if self.response not in (*_ON_ANOMALY, _TELL):
            raise ValueError(
                "on_anomaly must be 'record', 'stop' or a function that takes an Anomaly, got "
                f"{self.on_anomaly!r}"
            )
        step = self.first_step
        if not (is_step(step) and step < MOST_STEPS):
            raise ValueError(f"first_step must be a step number, 0 or more, got {step!r}")
        detectors = chosen(self.detectors, self.task)
        topology = describe(model, self.select, self.engine)
        refuse_taken(topology.named_parameters(), self.engine)
        owner = run_of(topology.root)
        if owner is not None:
            raise ValueError(
                f"this {type(topology.root).__name__} already has a probe (run {owner}). "
                "Call probe.close() before installing another."
            )
        settings = {
            **asdict(schedule), "include": self.include, "exclude": self.exclude,
            "histograms": self.histograms, "backward": self.backward, "first_step": step,
            "model": self.model, "budget": budget, "on_anomaly": self.response,
            "capture": self.capture, "detectors": detectors,
        }  # fmt: skip
        named = sum(map(self.has_histogram, _names(topology)))
        if named > MOST_NAMED:
            raise ValueError(
                f"histograms names {named} modules and parameters, at most {MOST_NAMED} have one: "
                "name fewer, such as histograms='blocks.*.mlp'"
            )
        facts = {
            "settings": settings, "every": schedule.every,
            "wrapper": topology.wrapper, "device": str(topology.device),
            "unmatched": self._unmatched(topology), "parts": stages.parts(topology),
        }  # fmt: skip
        return Checked(schedule, budget, topology, detectors, facts)

    def continuing(self, run_dir: str | None) -> InstallOptions:
        """Return them for a further attempt of the run in a directory."""
        return replace(self, run_dir=run_dir, model="")

    def _check_names(self) -> None:
        """Look at what is a text or a path. Raises ValueError."""
        for option in ("include", "exclude", "capture", "histograms"):
            for glob in getattr(self, option):
                if not isinstance(glob, str):
                    raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                        f"{option} must be a glob over module names or several, such as "
                        f"{option}=['*.attn', 'head'], got {glob!r}"
                    )
        if self.run_dir is not None:
            store_url.text_of(self.run_dir)
        if self.name is not None and not store_url.is_run_name(self.name):
            raise ValueError(
                "name must be a name of a directory, without '/', such as name='gpt-small' "
                f"(run_dir= says where it is), got {self.name!r}"
            )

    @property
    def response(self) -> str:
        """What the head announces at a page beside a capture: "record" (nothing), "stop", "tell".

        Empty if the user wrote none of them, which `check` refuses.
        """
        known = isinstance(self.on_anomaly, str) and self.on_anomaly in _ON_ANOMALY
        return _TELL if callable(self.on_anomaly) else str(self.on_anomaly) if known else ""

    @property
    def starts_daemon(self) -> bool:
        """Whether the node daemons are ours to start."""
        return self.daemon == "auto"

    def schedule(self) -> Schedule:
        """Return which steps are sampled. Raises ValueError."""
        if not isinstance(self.every, Variable):
            return as_schedule(self.every)
        if not self.every.isdecimal() or not int(self.every):
            raise ValueError(
                "DDPPROBE_EVERY must be a whole number of steps from 1 up, such as "
                f"DDPPROBE_EVERY=10, got {self.every!r}"
            )
        return as_schedule(int(self.every))

    def share(self) -> float | None:
        """Return the budget, a share of the step time. Raises ValueError."""
        said = isinstance(self.budget, Variable)
        try:
            budget = float(self.budget) if isinstance(self.budget, Variable) else self.budget
        except ValueError:
            budget = math.nan
        number = isinstance(budget, float) and 0 < budget < 1
        if budget is not None and not number:
            came = f"DDPPROBE_BUDGET={self.budget}" if said else repr(self.budget)
            raise ValueError(
                "budget must be a share of the step time, between 0 and 1 (0.01: sampling may add "
                f"1 %), or None; got {came}"
            )
        return budget

    def told(self) -> dict[str, Any]:
        """Return what the run says of them, beside the schedule and the detectors."""
        return {
            "include": self.include, "exclude": self.exclude, "capture": self.capture,
            "histograms": self.histograms, "backward": self.backward, "budget": self.share(),
            "on_anomaly": self.response, "task": self.task,
        }  # fmt: skip

    def select(self, fqn: str) -> bool:
        """Whether the module `fqn` is observed."""
        if fqn not in self._chosen:
            self._chosen[fqn] = _matches(fqn, self.include) and not _matches(fqn, self.exclude)
        return self._chosen[fqn]

    def has_histogram(self, fqn: str) -> bool:
        """Whether the module or parameter `fqn` has histograms."""
        return _matches(fqn, self.histograms)

    def _unmatched(self, topology: Topology) -> dict[str, str]:
        """Globs that match nothing here, with what to say if they match nothing on any rank."""
        names = [fqn for fqn, _ in topology.named_modules()]
        every = _names(topology) if self.histograms else []
        return {
            f"{option} {glob}": f"{option} glob {glob!r} matches no module. "
            f"{_other_name(topology, glob) or _there_are(names)}"
            for option in ("include", "exclude", "capture")
            for glob in getattr(self, option)
            if not any(_matches(name, (glob,)) for name in names)
        } | {
            f"histograms {glob}": f"histograms glob {glob!r} matches no module and no parameter. "
            f"{_other_name(topology, glob) or _there_are(every)}"
            for glob in self.histograms
            if not any(_matches(name, (glob,)) for name in every)
        }


@dataclass(frozen=True, slots=True)
class Checked:
    """What `InstallOptions.check` made of the options: `facts` are this rank's part of the plan."""

    schedule: Schedule
    budget: float | None
    topology: Topology
    detectors: Settings
    facts: dict[str, Any]


def _names(topology: Topology) -> list[str]:
    """Return the FQNs of all modules and parameters."""
    modules = [fqn for fqn, _ in topology.named_modules()]
    return [*modules, *(fqn for fqn, _ in topology.named_parameters())]


def _other_name(topology: Topology, glob: str) -> str:
    """Say under which name something is recorded that a glob means by another one; else ""."""
    first: dict[int, str] = {}
    root = topology.root
    for name, each in (
        *root.named_modules(remove_duplicate=False),
        *root.named_parameters(remove_duplicate=False),
    ):
        known = first.setdefault(id(each), clean(name))
        if known != clean(name) and _matches(clean(name), (glob,)):
            return f"{clean(name)!r} is another name of {known!r}, by which it is recorded"
    return ""


def _there_are(names: Iterable[str]) -> str:
    """Say which names a glob may match, for a message."""
    some = textwrap.shorten(", ".join(filter(None, names)), 200, placeholder=" ...")
    return f"There are: {some}" if some else "The model has no modules inside: leave it out"


def _variable(name: str) -> Variable | None:
    value = os.environ.get(name)
    return Variable(value) if value else None


def as_globs(globs: str | Iterable[str]) -> tuple[str, ...]:
    """Return one glob or several as a tuple; what is neither, too, for `check` to refuse.

    A set has another order on each rank, and ranks must say the same.
    """
    if isinstance(globs, AbstractSet):
        return tuple(sorted(globs, key=str))
    several = isinstance(globs, Iterable) and not isinstance(globs, str)
    return tuple(globs) if several else (globs,)  # type: ignore[return-value]


def options_of(
    *, include: str | Iterable[str], exclude: str | Iterable[str], capture: str | Iterable[str],
    detectors: Mapping[str, object] | None, histograms: str | Iterable[str],
    **more: Any,  # noqa: ANN401  (as `install` takes them)
) -> InstallOptions:  # fmt: skip
    """Return the arguments of `install()`, and what the environment says instead."""
    return InstallOptions(
        include=as_globs(include), exclude=as_globs(exclude), capture=as_globs(capture),
        detectors=detectors or {}, histograms=as_globs(histograms), **more,
    ).with_environment()  # fmt: skip


def is_disabled() -> bool:
    """Whether the environment switches ddpprobe off. Raises InstallError."""
    try:
        return variables.is_set("DDPPROBE_DISABLE")
    except ValueError as error:
        raise InstallError(str(error)) from error


def _matches(fqn: str, globs: tuple[str, ...]) -> bool:
    return fqn in globs or any(fnmatch.fnmatchcase(fqn, glob) for glob in globs)
