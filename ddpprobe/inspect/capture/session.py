"""What one capture has on this rank, and what its views need to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture.gathering import Gathering, Key, StatsRows
from ddpprobe.inspect.capture.inference import Inference
from ddpprobe.inspect.capture.series import TensorMeter
from ddpprobe.inspect.capture.sites import KINDS, CallTensors, CapturedSites

NEVER_RAN = (
    "Either the module was not called while the capture was open, or it was called past its hooks: "
    "module.forward(x) instead of module(x), weights used directly as nn.MultiheadAttention does "
    "with out_proj, or torch.compile around a function or a copy of the model that was traced "
    'before (then capture with compiled="eager").'
)
NO_GRADIENT = (
    "backward() must run while the capture is open and reach this output. An output that does not "
    "require grad has none, and autograd drops the hook of a view that is later changed in place."
)


@dataclass(slots=True)
class CaptureSession:
    """The state behind a capture and its views.

    Attributes:
        sites: what the hooks have filled.
        meter: what is measured.
        kinds: the kinds of tensors that are taken.
        statistics: whether only statistics are kept.
        trouble: returns what went wrong in the hooks, "" if nothing did.
        groups: ranks of the tensor-parallel meshes that were seen.
        inference: which plain tensors the ranks of such a group hold alike.
        rank, world_size: of this process.
        names: FQNs captured on any rank; aliases: further names of shared modules.
        gathering: the line to the other ranks; None before the capture is opened.
    """

    sites: CapturedSites
    meter: TensorMeter
    kinds: tuple[str, ...]
    statistics: bool
    trouble: Callable[[], str]
    groups: set[tuple[int, ...]]
    inference: Inference
    rank: int = 0
    world_size: int = 1
    names: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    gathering: Gathering | None = None

    def gather(self) -> Gathering:
        """Return the line to the other ranks.

        Raises:
            CaptureError: the capture was never opened.
        """
        if self.gathering is None:
            raise CaptureError(
                "this capture was never opened. Write `with ddpprobe.capture(...) as seen:`, or "
                "`seen = ddpprobe.capture(...).open()` and later `seen.close()`."
            )
        return self.gathering

    def group(self) -> tuple[int, ...]:
        """Return the ranks that share tensor-parallel computations with this one."""
        return tuple(sorted({rank for ranks in self.groups for rank in ranks}))

    def calls(self, name: str, call: int | None = None) -> list[CallTensors]:
        """Return the kept calls of a module on this rank: all, or the one of this number."""
        site = self.sites.by_name.get(name)
        if site is None:
            return []
        return [c for c in site.calls if call is None or c.index == call]

    def leaves(self, name: str, kind: str) -> tuple[str, ...]:
        """Return the paths of a module's tensors on this rank."""
        site = self.sites.by_name.get(name)
        return site.leaves(kind) if site is not None else ()

    def held(self) -> Iterator[Key]:
        """Yield (name, kind, leaf) of everything this rank has."""
        for name in self.sites.by_name:
            for kind in KINDS:
                for leaf in self.leaves(name, kind):
                    yield name, kind, leaf

    def rows(self, key: Key, call: int | None = None) -> StatsRows | None:
        """Return this rank's statistics of one tensor: over all kept calls, or of one."""
        name, kind, leaf = key
        site = self.sites.by_name.get(name)
        if site is None or (kind, leaf) not in site.seen:
            return None
        shard_spec, dtype = site.seen[kind, leaf]
        label, primary = "local", True
        if shard_spec is not None:
            label, primary = shard_spec.label, shard_spec.primary(self.rank)
        elif len(self.group()) > 1:
            alike = self.inference.alike(key)
            label, primary = (
                ("replicated", self.rank == self.group()[0]) if alike else ("unknown", True)
            )
        series = site.series.get((kind, leaf))
        if series is not None:
            return StatsRows(key, dtype, label, primary, series.rows(), series.stride, series.calls)
        measured = [
            self.meter.measure(c.tensors[kind, leaf].tensor(f"{name}.{kind}")).cpu()
            for c in self.calls(name, call)
            if (kind, leaf) in c.tensors
        ]
        if not measured:
            return None
        return StatsRows(key, dtype, label, primary, torch.stack(measured), 1, len(measured))

    def why_nothing(self, name: str, kind: str) -> str:
        """Return why this rank has no tensor of this kind, for a message."""
        if self.trouble():
            return f"the capture failed on this rank ({self.trouble()})"
        if kind not in self.kinds:
            option = {"grad": "grad=True", "input": "input=True"}[kind]
            return f"the capture was not asked for it: pass {option}"
        site = self.sites.by_name.get(name)
        if site is None:
            return "this rank's model has no such module"
        if site.skipped:
            return ", ".join(f"{n} x {reason}" for reason, n in site.skipped.items())
        if not site.count:
            return f"it never ran inside the capture. {NEVER_RAN}"
        return NO_GRADIENT if kind == "grad" else "it returned no tensor"


def nothing(what: str, why: str) -> CaptureError:
    """Return the error that `what` is not there."""
    return CaptureError(f"{what} has no data: {why}")
