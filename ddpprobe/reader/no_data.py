"""Why a run has no numbers of a site, or none at some steps, as far as the run itself knows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.series import Series
from ddpprobe.records.events import BlindEvent, SitesEvent
from ddpprobe.records.near_names import nearest
from ddpprobe.records.step import Site

LISTED = 5  # modules named in a line
OF_PARAMETERS = {
    "grad",
    "grad_local",
    "param",
    "update",
}  # kinds that are chosen by a parameter's module
# Of what belongs to a parameter or an optimizer a call of the module says nothing.
_NOT_THERE = {
    **dict.fromkeys(("grad", "grad_local"), "it had no gradient at these steps"),
    **dict.fromkeys(
        ("param", "buffer", "update"),
        "it had no turn at these steps: parameters and buffers take turns",
    ),
    "optim_state": "no optimizer held it at these steps, or it had no turn",
}


def no_site(
    merged_reader: MergedReader, attempts: Iterable[int], glob: str, known: Collection[Site]
) -> str:
    """Say that no site matches a glob, why that may be, and what comes close.

    Args:
        merged_reader: the run.
        attempts: that were looked through.
        glob: as it was typed: over `fqn:kind`, or over `fqn`.
        known: every site of these attempts.
    """
    module, kind = _parts(glob)
    why = list(dict.fromkeys(w for n in attempts for w in _reasons(merged_reader, n, module, kind)))
    kinds = {site.kind for site in known if kind and fnmatchcase(site.fqn, module)}
    if kinds and kind not in kinds:
        why.append(f"{module} has no {kind}, but {', '.join(sorted(kinds))}")
    near = nearest(glob, (str(site) if ":" in glob else site.printed_fqn for site in known))
    return "; ".join([f"no site matches {glob!r}", *why, f"nearest: {near}"])


def why_empty(series: Series, tapped: Series) -> list[str]:
    """Say of the sites that have no number at any of the steps why that is.

    Args:
        series: of any statistic.
        tapped: the statistic of that name of the same sites at the same steps.
    """
    said: dict[str, list[str]] = {}
    columns = {site.key: column for column, site in enumerate(tapped.sites)}
    for column, site in enumerate(series.sites):
        if not np.isnan(series.values[:, column]).all():
            continue
        calls = np.nan_to_num(tapped.values[:, columns[site.key]])
        bad = np.nan_to_num(series.nonfinite[:, column])
        if bad.any():
            why = f"no element was finite ({int(bad.sum())} were not); --stat nonfinite counts them"
        elif calls.any():
            why = (
                "its module was called, and no tensor arrived: no gradient flowed there, or the "
                "tensor was changed in place or does not exist as one of its own"
            )
        else:
            why = _NOT_THERE.get(site.kind, "its module was not called at these steps")
        said.setdefault(why, []).append(str(site))
    return [f"no data of {_named(sites)}: {why}" for why, sites in said.items()]


def sampled_around(steps: NDArray[np.int64], wanted: slice) -> str:
    """Name the sampled steps next to a range in which there is none."""
    first = wanted.start or 0
    before, behind = steps[steps < first][-1:].tolist(), steps[steps >= first][:1].tolist()
    return " and ".join(map(str, [*before, *behind]))


def _reasons(merged_reader: MergedReader, attempt: int, module: str, kind: str) -> Iterator[str]:
    """Yield what the ranks said of modules of this name that they do not observe."""
    never, blind, unsupported = dict[str, None](), dict[str, None](), dict[str, None]()
    for event in merged_reader.events(attempt):
        match event.what:
            case SitesEvent(silent=modules, unsupported=kinds):
                never |= dict.fromkeys(n for n in modules if _is_meant(n, module))
                unsupported |= dict.fromkeys(kinds)
            case BlindEvent(modules=modules) if modules:
                blind |= dict.fromkeys(n for n in modules if _is_meant(n, module))
    if never:
        yield f"never called on a sampled step: {_named(never)}"
    if blind:
        yield f"hidden by torch.compile, which ran it without its hooks: {_named(blind)}"
    chosen = merged_reader.rank_meta(attempt)
    include, exclude = (_globs(chosen.get(name)) for name in ("include", "exclude"))
    owner = module.rpartition(".")[0]
    names = (module, owner) if kind in OF_PARAMETERS else (module,)
    hit = [glob for glob in exclude if any(fnmatchcase(name, glob) for name in names)]
    if hit:
        yield f"left out by install(exclude={hit!r})"
    elif include and not any(fnmatchcase(name, glob) for name in names for glob in include):
        yield f"not chosen by install(include={include!r})"
    if unsupported:
        yield f"of kinds that are not supported the run has {', '.join(unsupported)}"


def _is_meant(module: str, glob: str) -> bool:
    """Whether a module is one that a glob over sites is about, or holds the parameter named."""
    return fnmatchcase(module, glob) or glob.rpartition(".")[0] == module != ""


def _parts(glob: str) -> tuple[str, str]:
    """Split a glob over sites into module and kind; "" for any kind."""
    place, colon, kind = glob.rpartition(":")
    return (place.partition("[")[0], kind.partition("[")[0]) if colon else (glob, "")


def _globs(said: object) -> list[str]:
    return [str(glob) for glob in said] if isinstance(said, list | tuple) else []


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", ... ({len(listed)})" if len(listed) > LISTED else ""
    return ", ".join(name or "(root)" for name in listed[:LISTED]) + more
