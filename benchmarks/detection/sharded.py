"""The listed faults once more under FSDP2, on two ranks or more, where they mean something there.

Left out is what needs a whole weight or its gradient in one place (N02, N03, N07, F01, D01), DDP
itself (D02), one process (N06, F02), or a module that is not sharded (F06). E01 and E04 stay
with one process, too.
"""

from __future__ import annotations

from benchmarks.detection.faults import FAULTS, Fault

SUFFIX = "-fsdp2"
_THERE = (
    "N01", "N04", "N05", "E02", "E03", "E05", "E06", "E07", "F03", "F04", "F07", "S01",
    "D03", "D04", "D05", "D06",
)  # fmt: skip


def _sharded(name: str) -> type[Fault]:
    kind = FAULTS[name]
    changes = {"wrap": "fsdp2", "world": max(2, kind.world), "__doc__": kind.__doc__}
    return type(f"{name}{SUFFIX}", (kind,), changes)


SHARDED: dict[str, type[Fault]] = {f"{name}{SUFFIX}": _sharded(name) for name in _THERE}
