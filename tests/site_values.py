"""What passes every site, noted by plain torch hooks, and how a recorded row is held against it.

Nothing of ddpprobe is imported here: this is what its statistics are compared with. Values are
kept whole, in float64, and reduced when compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Key = tuple[str, str, str]  # module or parameter path, kind, leaf
See = Callable[[Key, Tensor], None]


@dataclass
class Expected:
    """One step: the values of every site over all calls, micro-batches and ranks.

    `values[key]` are 1-D float64; `tapped` counts hooks placed, so that a key with hooks and no
    value is one whose hook autograd itself has dropped. `skipped`: the step was given up.
    `scale`: what the first rank multiplies its loss with.
    """

    values: dict[Key, list[Tensor]] = field(default_factory=dict)
    tapped: dict[Key, int] = field(default_factory=dict)
    skipped: bool = False
    scale: float = 1.0

    def see(self, key: Key, tensor: Tensor, scale: float = 1.0) -> None:
        """Keep a copy of what arrived, divided by the loss scale."""
        stored = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        self.values.setdefault(key, []).append(stored.double().reshape(-1).clone() / scale)

    def tap(self, key: Key) -> None:
        """A hook was placed for `key`."""
        self.tapped[key] = self.tapped.get(key, 0) + 1

    def of(self, key: Key) -> Tensor:
        """All values of a site, float64 [n]."""
        return torch.cat(self.values[key])


@dataclass(frozen=True)
class OutputHook:
    """A forward hook: tells the floating-point tensors of an output, and hooks their gradients."""

    see: See
    tap: Callable[[Key], None]
    path: str

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf, tensor in tensors_of(output):
            if tensor.is_floating_point():
                key = (self.path, "output", leaf)
                self.tap(key)
                self.see(key, tensor)
            if tensor.requires_grad and not tensor.is_leaf:
                key = (self.path, "grad_output", leaf)
                self.tap(key)
                tensor.register_hook(GradientHook(self.see, key))


@dataclass(frozen=True)
class GradientHook:
    """A tensor's hook: tells its gradient."""

    see: See
    key: Key

    def __call__(self, gradient: Tensor) -> None:
        self.see(self.key, gradient)


def tensors_of(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in what a module returned, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        items = []
    for key, child in items:
        yield from tensors_of(child, f"{path}.{key}" if path else str(key))


@dataclass(frozen=True)
class Measured:
    """The statistics of all values of a site; those of magnitudes are over the finite ones.

    Attributes:
        counts: numel, nan, pos_inf, neg_inf, zeros.
        values: min, max, sum, sum_sq.
        total: the sum of magnitudes, which is what an error of `sum` is relative to.
    """

    counts: tuple[int, ...]
    values: tuple[float, ...]
    total: float

    @classmethod
    def of(cls, whole: Tensor) -> Measured:
        """Measure float64 [n]."""
        finite = whole[torch.isfinite(whole)]
        counts = (whole.isnan(), whole == torch.inf, whole == -torch.inf, whole == 0)
        values = (0.0, 0.0, 0.0, 0.0)
        if len(finite):
            values = (finite.min(), finite.max(), finite.sum(), finite.square().sum())
        return cls(
            (whole.numel(), *(int(c.sum()) for c in counts)),
            tuple(map(float, values)), float(finite.abs().sum()),
        )  # fmt: skip

    def merged(self, other: Measured) -> Measured:
        """Return the statistics of the values of both."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        if not (self.finite and other.finite):
            return dataclasses.replace(self if self.finite else other, counts=counts)
        (low, high, *sums), (low_2, high_2, *sums_2) = self.values, other.values
        added = (a + b for a, b in zip(sums, sums_2, strict=True))
        values = (min(low, low_2), max(high, high_2), *added)
        return Measured(counts, values, self.total + other.total)

    @property
    def finite(self) -> int:
        """How many of the values are finite."""
        numel, *bad, _ = self.counts
        return numel - sum(bad)

    @property
    def peak(self) -> float:
        """The largest magnitude of a finite value."""
        return max(map(abs, self.values[:2]))


def differ(
    counts: Sequence[float], values: Sequence[float], want: Measured, tolerance: float,
    doubtful: int = 0,
) -> tuple[str, float]:  # fmt: skip
    """Compare a recorded row with what was seen; returns what differs, and the worst error.

    Errors of minimum and maximum are relative to the largest magnitude, those of sums to the sum of
    magnitudes. As many as `doubtful` of the values may be zeros on one side only.
    """
    names = ("numel", "nan", "pos_inf", "neg_inf", "zeros")
    wrong = [
        f"{name} {int(got)}, expected {value}"
        for name, got, value in zip(names, counts, want.counts, strict=False)
        if int(got) != value and not (name == "zeros" and doubtful and 0 <= got <= value + doubtful)
    ]
    if wrong or not want.finite:
        return "; ".join(wrong), 0.0
    scales = (want.peak, want.peak, want.total, want.values[3])
    worst = 0.0
    for name, got, expected, scale in zip(
        ("min", "max", "sum", "sum_sq"), values, want.values, scales, strict=False
    ):
        error = abs(got - expected) / scale if scale else abs(got)
        worst = max(worst, error)
        if not error <= tolerance * (2 if name == "sum_sq" else 1):
            wrong.append(f"{name} {got:.9g}, expected {expected:.9g} (off {error:.1e})")
    return "; ".join(wrong), worst
