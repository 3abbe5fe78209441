"""Numbers of a whole step that follow from a merged record: published formulas, nothing measured.

Each is None where the record does not hold what its formula needs, which is never the number 0.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.reduction_law import reduction_law, same_factor
from ddpprobe.records.site_stats import global_grad_norm
from ddpprobe.records.step import (
    NONFINITE,
    NUMEL,
    OBSERVED,
    SUM_SQ,
    UNREDUCED,
    USED_NORM,
    Floats,
    Site,
    StepRecord,
)

Rows = NDArray[np.intp]
FEWEST_BLOCKS = 3  # of a chain whose growth is told
NOISE_WINDOW = 32  # sampled steps over which the parts of the noise scale are averaged
_TABLES = 8  # of sites: of the last attempts, and of steps that lack ranks
_ROUNDING = 1e-3  # relative: norms of reduced gradients, in bfloat16 too
_NUMBERED = re.compile(r"^(?P<chain>.+)\.(?P<number>\d+)$")


class Derived(NamedTuple):
    """A number of a step.

    Attributes:
        name: of it.
        unit: what it counts; "" for a ratio.
        text: what it is, and what to do about it.
        source: where the formula comes from.
        of: computes it from a merged record; None where it is not known.
    """

    name: str
    unit: str
    text: str
    source: str
    of: Callable[[StepRecord], float | None]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which rows of a table of sites belong together.

    Attributes:
        ends: by kind, the rows of the first and the last block of the longest chain of modules, and
            how many steps lie between them.
        experts: of each group of experts their FQNs [n] and the rows of their outputs [n]; -1: it
            has never been called.
        whole: whether each parameter's gradient is there as one whole before the reduction, too.
        gradients: by placement, the rows of reduced gradients.
    """

    ends: Mapping[str, tuple[Rows, Rows, int]]
    experts: tuple[tuple[tuple[str, ...], Rows], ...]
    whole: bool
    gradients: Mapping[str, Rows]


def gradient_noise(record: StepRecord) -> tuple[float, float] | None:
    """Return the noise of a gradient and its signal, both squared norms: (S, G^2).

    With n ranks, each with the gradient g_r of its own batch, and their mean g:
    G^2 = (n |g|^2 - mean |g_r|^2) / (n - 1) and S = (mean |g_r|^2 - |g|^2) / (1 - 1/n), without
    bias for the squared norm of the true gradient and for the trace of the covariance of one
    rank's. A single step's is rough, G^2 may be negative: average both, then divide.

    Returns:
        None unless all of at least two ranks delivered a whole step of one micro-batch, with the
        gradients of all parameters before and after they were averaged over them.
    """
    ranks = len(record.ranks)
    said = [record.scalars.get(rank, {}) for rank in record.ranks]
    fit = ranks > 1 and not (record.missing or record.partial or record.skipped)
    if not fit or any(UNREDUCED in s or s.get("micro_batches", 1) != 1 for s in said):
        return None
    norm, own = global_grad_norm(record), [s.get("grad_norm_local", math.nan) for s in said]
    if norm is None or not math.isfinite(norm) or not all(map(math.isfinite, own)):
        return None
    factor = _factor(record)
    if (factor is not None and not same_factor(factor, 1.0)) or not _layout(record).whole:
        return None  # it is no mean
    if norm > max(own) * (1 + _ROUNDING):  # nor is what cannot be one
        return None
    mean = math.fsum(each * each for each in own) / ranks
    return (mean - norm * norm) / (1 - 1 / ranks), (ranks * norm * norm - mean) / (ranks - 1)


def _noise(record: StepRecord) -> float | None:
    found = _noises(record)
    return None if found is None else found[0]


def _signal(record: StepRecord) -> float | None:
    found = _noises(record)
    return None if found is None else found[1]


def _used_norm(record: StepRecord) -> float | None:
    """Return the L2 norm of all gradients as the optimizers were given them.

    A rank says the norm of what it holds, before clipping and after it. How many ranks hold each
    element follows from the first and from the norm of the whole, if it is the same number for all
    of them: so it is not told where some gradients are sharded and others are not.
    """
    gradients = _layout(record).gradients.values()
    seen = sum(bool((record.counts[rows, OBSERVED] > 0).any()) for rows in gradients)
    whole = global_grad_norm(record)
    if record.missing or seen != 1 or whole is None:
        return None
    said = [record.scalars.get(rank, {}) for rank in record.ranks]
    before, used = (
        math.fsum(s.get(name, math.nan) ** 2 for s in said) for name in ("grad_norm", USED_NORM)
    )
    return whole * math.sqrt(used / before) if before > 0 and used >= 0 else None


def _factor(record: StepRecord) -> float | None:
    law = reduction_law(record)
    return None if law is None else law.factor


def _growth(record: StepRecord, kind: str) -> float | None:
    """Return the mean growth from block to block: ln(rms of the last / of the first) / steps."""
    ends = _layout(record).ends.get(kind)
    if ends is None:
        return None
    first, last, steps = ends
    low, high = (_rms(record, rows) for rows in (first, last))
    return math.log(high / low) / steps if low and high else None


def _rms(record: StepRecord, rows: Rows) -> float | None:
    if not (record.counts[rows, OBSERVED] > 0).all():
        return None
    finite = (record.counts[rows, NUMEL] - record.counts[rows][:, NONFINITE].sum(axis=1)).sum()
    square = record.values[rows, SUM_SQ].sum()
    return math.sqrt(square / finite) if finite else None


def expert_loads(record: StepRecord) -> list[tuple[tuple[str, ...], Floats]]:
    """Return of each group of experts that got anything its FQNs [n] and their loads [n].

    A load is the elements of an expert's output: its tokens times the width of each. One that was
    never called is known by its parameters.
    """
    found = []
    for fqns, rows in _layout(record).experts:
        load = np.where(rows >= 0, record.counts[rows, NUMEL], 0).astype(np.float64)
        if load.sum() > 0:
            found.append((fqns, load))
    return found


def is_in_expert(fqn: str) -> bool:
    """Whether a name is that of an expert, or of something in one."""
    names = pairwise(fqn.split("."))
    return any(number.isdecimal() and _is_of_experts(chain) for chain, number in names)


def _worst(record: StepRecord, of: Callable[[Floats], float]) -> float | None:
    """Return the largest number of any group of experts; None without one that got anything."""
    return max((of(load) for _, load in expert_loads(record)), default=None)


def _violation(load: Floats) -> float:
    """Return by how much the busiest expert has more than the mean."""
    return float(load.max() / load.mean() - 1)


def _concentration(load: Floats) -> float:
    """Return 1 - exp(entropy) / experts: 0 where all have the same, near 1 where one has all."""
    share = load[load > 0] / load.sum()
    return float(1 - math.exp(-(share * np.log(share)).sum()) / len(load))


def _idle(load: Floats) -> float:
    """Return the share of experts that got nothing."""
    return float((load == 0).mean())


_NOISE_SOURCE = "McCandlish et al. 2018, arXiv 1812.06162, appendix A.1"
_GROWTH_SOURCE = "OLMo Team 2025, arXiv 2501.00656 (growth exponent)"
_BALANCE_SOURCE = "Wang et al. 2024, arXiv 2408.15664 (MaxVio)"
DERIVED: tuple[Derived, ...] = (
    Derived(
        "global_grad_norm_used", "",
        "L2 norm of the reduced gradients as the optimizer is given them, over all ranks: after "
        "clipping; beside the one before it says how much clipping takes away",
        "what torch.nn.utils.clip_grad_norm_ leaves", _used_norm,
    ),
    Derived(
        "grad_noise", "squared gradient",
        "trace of the covariance of one rank's gradient; averaged and divided by grad_signal it is "
        "the gradient noise scale",
        _NOISE_SOURCE, _noise,
    ),
    Derived(
        "grad_signal", "squared gradient",
        "squared norm of the true gradient, without the noise of the batch; rough, and negative "
        "now and then",
        _NOISE_SOURCE, _signal,
    ),
    Derived(
        "reduction_factor", "",
        "the reduced gradients as a multiple of the mean of the ranks' own: 1 is that mean, the "
        "number of ranks their sum; anything else, or another one than before, is a gradient that "
        "is scaled by a mistake or not reduced as it should be",
        "linearity of the mean: sums of elements before and after it", _factor,
    ),
    Derived(
        "output_growth", "nepers a block",
        "how fast outputs grow from one block of the longest chain to the next; far from 0 they "
        "explode or vanish with depth",
        _GROWTH_SOURCE, lambda record: _growth(record, "output"),
    ),
    Derived(
        "grad_output_growth", "nepers a block",
        "the same of the gradients of the blocks' outputs; clearly negative: the first blocks get "
        "small ones",
        _GROWTH_SOURCE, lambda record: _growth(record, "grad_output"),
    ),
    Derived(
        "expert_violation", "",
        "by how much the busiest expert has more than the mean, of the worst layer; if it grows, "
        "the router prefers few",
        _BALANCE_SOURCE, lambda record: _worst(record, _violation),
    ),
    Derived(
        "expert_concentration", "",
        "1 - exp(entropy of the load) / experts, of the worst layer: 0 is balance, near 1 is one "
        "expert for all",
        "Shannon entropy of the shares of the load", lambda record: _worst(record, _concentration),
    ),
    Derived(
        "expert_idle", "",
        "share of the experts that got nothing, of the worst layer; in a small batch some get "
        "nothing by chance",
        "share of zero loads", lambda record: _worst(record, _idle),
    ),
)  # fmt: skip
NOISE_SCALE = Derived(
    "grad_noise_scale", "batches of one rank",
    f"grad_noise by grad_signal, each averaged over {NOISE_WINDOW} sampled steps: more ranks than "
    "that are worth little for the same steps",
    _NOISE_SOURCE, lambda _: None,
)  # fmt: skip


@final
class NoiseScale:
    """The gradient noise scale over the merged steps of an attempt, in their order: a pure fold.

    Attributes:
        now: as of the newest step that told noise and signal; None where it is not known.
    """

    def __init__(self) -> None:
        self.now: float | None = None
        self._attempt = -1
        self._parts: deque[tuple[float, float]] = deque(maxlen=NOISE_WINDOW)

    def update(self, record: StepRecord) -> float | None:
        """Take the next record; return the scale as of it, None where it does not tell it."""
        if record.attempt != self._attempt:
            self._attempt = record.attempt
            self._parts.clear()
            self.now = None
        parts = _noises(record)
        if parts is None:
            return None
        self._parts.append(parts)
        noise, signal = map(math.fsum, zip(*self._parts, strict=True))
        known = len(self._parts) == NOISE_WINDOW and signal > 0
        self.now = noise / signal if known else None
        return self.now


@final
class DerivedNumbers:
    """What is known of each merged step, in the order of the steps: a pure fold."""

    def __init__(self) -> None:
        self._noise_scale = NoiseScale()

    def update(self, record: StepRecord) -> dict[str, float]:
        """Return the numbers of a step by name; what is not known of it is not there."""
        found = {each.name: each.of(record) for each in DERIVED}
        found[NOISE_SCALE.name] = self._noise_scale.update(record)
        return {name: value for name, value in found.items() if value is not None}


def _layout(record: StepRecord) -> _Layout:
    return _layouts(record.sites)


def _lay(sites: tuple[Site, ...]) -> _Layout:
    rows: dict[tuple[str, str], list[int]] = {}
    placements: dict[str, dict[str, list[int]]] = {}
    for row, site in enumerate(sites):
        placements.setdefault(site.kind, {}).setdefault(site.placement, []).append(row)
        if site.placement not in ("partial", "unknown"):
            rows.setdefault((site.fqn, site.kind), []).append(row)
    chains: dict[str, dict[str, set[int]]] = {}  # kind -> chain -> numbers
    for fqn, kind in rows:
        numbered = _NUMBERED.match(fqn)
        if numbered and kind in ("output", "grad_output"):
            numbers = chains.setdefault(kind, {}).setdefault(numbered["chain"], set())
            numbers.add(int(numbered["number"]))
    inner = {fqn.rpartition(".")[0] for fqn, _ in rows}
    ends = {}
    for kind, found in chains.items():
        blocks = {
            chain: sorted(numbers)
            for chain, numbers in found.items()
            if not _is_of_experts(chain) and all(f"{chain}.{n}" in inner for n in numbers)
        }
        chain = max(blocks, key=lambda c: len(blocks[c]), default="")
        if chain and len(blocks[chain]) >= FEWEST_BLOCKS:
            first, last = blocks[chain][0], blocks[chain][-1]
            low, high = (np.array(rows[f"{chain}.{n}", kind], np.intp) for n in (first, last))
            ends[kind] = low, high, last - first
    experts = tuple(
        (
            tuple(f"{chain}.{n}" for n in sorted(numbers)),
            np.array([rows.get((f"{chain}.{n}", "output"), [-1])[0] for n in sorted(numbers)],
                     np.intp),
        )
        for chain, numbers in _experts_in(fqn for fqn, _ in rows).items()
        if len(numbers) > 1 and any((f"{chain}.{n}", "output") in rows for n in numbers)
    )  # fmt: skip
    before, after = ({f for f, k in rows if k == kind} for kind in ("grad_local", "grad"))
    alone = placements.get("grad_local", {}).keys() == {"local"}
    gradients = {how: np.array(of, np.intp) for how, of in placements.get("grad", {}).items()}
    return _Layout(ends, experts, alone and before == after, gradients)


def _experts_in(fqns: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the experts that names are of, or of something in, by their chain."""
    found: dict[str, set[int]] = {}
    for fqn in fqns:
        parts = fqn.split(".") if "experts" in fqn else []
        for i in range(1, len(parts)):
            chain = ".".join(parts[:i])
            if parts[i].isdecimal() and _is_of_experts(chain):
                found.setdefault(chain, set()).add(int(parts[i]))
    return found


def _is_of_experts(chain: str) -> bool:
    return chain.rpartition(".")[2].endswith("experts")


_layouts = IdentityCache(_lay, _TABLES)
_noises = IdentityCache(gradient_noise, 1)  # S and G^2 of a record are asked for one by one
