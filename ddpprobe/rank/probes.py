"""`ddpprobe.install({"generator": g, "critic": d})`: several models of a process, a run of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, final

from torch import nn

from ddpprobe.errors import InstallError
from ddpprobe.rank.host import Host

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]*")  # a directory, and a part of a URL


class _OfOne(Protocol):
    """The probe of one model, as this file sees it."""

    run_dir: str | None

    def note(self, what: str = "", *, config: Mapping[str, object] | None = None) -> None: ...
    def pause(self, reason: str = "") -> contextlib.AbstractContextManager[None]: ...
    def trigger(self, reason: str = "asked for") -> None: ...
    def close(self) -> None: ...


_Probe = TypeVar("_Probe", bound=_OfOne)


@final
class Probes(Mapping[str, _Probe], Generic[_Probe]):
    """The probes of several models by name, each with a run in a directory of that name.

    The runs lie side by side, below what `run_dir` and `name` say of a lone model. What concerns
    one model is said to its own probe: `probes["critic"].log(loss=loss)`. `ddpprobe anomalies` of
    the directory that holds them says which model was bad first.
    """

    def __init__(self, probes: Mapping[str, _Probe]) -> None:
        self._probes = dict(probes)

    def __getitem__(self, model: str) -> _Probe:
        return self._probes[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._probes)

    def __len__(self) -> int:
        return len(self._probes)

    @property
    def run_dir(self) -> str | None:
        """The directory that holds their runs; None as long as `Probe.run_dir` is."""
        known = next((p.run_dir for p in self._probes.values() if p.run_dir is not None), None)
        return None if known is None else str(Path(known).parent)

    def note(self, what: str = "", *, config: Mapping[str, object] | None = None) -> None:
        """Write it down in each run, as `Probe.note`."""
        for probe in self._probes.values():
            probe.note(what, config=config)

    def trigger(self, reason: str = "asked for") -> None:
        """Ask for a capture of each model, as `Probe.trigger`."""
        for probe in self._probes.values():
            probe.trigger(reason)

    @contextlib.contextmanager
    def pause(self, reason: str = "") -> Iterator[None]:
        """Within this block nothing is a training step of any of them, as `Probe.pause`."""
        with contextlib.ExitStack() as stack:
            for probe in self._probes.values():
                stack.enter_context(probe.pause(reason))
            yield

    def close(self) -> None:
        """Close each of them. Idempotent."""
        for probe in self._probes.values():
            probe.close()

    def __enter__(self) -> Probes[_Probe]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def install_each(
    models: Mapping[str, nn.Module],
    options: Mapping[str, object],
    install: Callable[[nn.Module, dict[str, Any]], _Probe],
) -> Probes[_Probe]:
    """Observe several models; none, if one of them is refused.

    Args:
        models: by name, in the same order on all ranks.
        options: keywords of `install()`. A mapping from names of models holds for each of these by
            itself; who is not in it has what the keyword is by default.
        install: observes one of them with its options.

    Raises:
        InstallError: no model, a name that is no name of a directory, or some rank refused; the
            same text on every rank.
    """
    if not models:
        raise InstallError("install() was given no model: write install({'generator': g, ...})")
    for name in models:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InstallError(
                f"{name!r} is no name for a model: it becomes a directory, so write it of letters, "
                "digits and . _ - = + @"
            )
    beside: list[str] = []
    hosts = _hosts(models)
    probes: dict[str, _Probe] = {}
    try:
        for name, model in models.items():
            own = {key: _own(value, name, models) for key, value in options.items()}
            given = {key: value for key, value in own.items() if value is not _DEFAULT}
            given |= {"model": name, "beside": beside, **hosts.get(name, {})}
            probes[name] = install(model, given)
    except BaseException:
        Probes(probes).close()
        raise
    return Probes(probes)


def _hosts(models: Mapping[str, nn.Module]) -> dict[str, dict[str, object]]:
    """Return options of the frozen models, which follow the first of the others, and of that."""
    known = {name: m for name, m in models.items() if isinstance(m, nn.Module)}  # else refused
    trained = [name for name, m in known.items() if any(p.requires_grad for p in m.parameters())]
    frozen = [name for name in known if name not in trained]
    host = Host()
    if not (trained and frozen):
        return {}
    options: dict[str, dict[str, object]] = {trained[0]: {"host": host}}
    return options | {name: {"host": host, "follows": True} for name in frozen}


_DEFAULT = object()


def _own(value: object, name: str, models: Mapping[str, nn.Module]) -> object:
    """Return what an option is for one model."""
    if isinstance(value, Mapping) and value and value.keys() <= models.keys():
        return value.get(name, _DEFAULT)
    return value
