"""ddpprobe: names the first bad tensor of a distributed PyTorch run.

`import ddpprobe` loads neither torch nor zarr; the names below are resolved when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpprobe.captured.capture import capture as capture
    from ddpprobe.captured.errors import CaptureError as CaptureError
    from ddpprobe.inventory.summary import summary as summary
    from ddpprobe.probe import Probe as Probe
    from ddpprobe.probe import install as install
    from ddpprobe.records import Anomaly as Anomaly
    from ddpprobe.records import FirstBad as FirstBad
    from ddpprobe.records import Site as Site
    from ddpprobe.records import StepRecord as StepRecord
    from ddpprobe.replay.run import Run as Run
    from ddpprobe.replay.run import open_run as open  # noqa: A004, F401  (ddpprobe.open)
    from ddpprobe.responder import AnomalyStop as AnomalyStop
    from ddpprobe.sampling import Schedule as Schedule

__version__ = "0.1.0"

_HOMES = {
    "Anomaly": ("ddpprobe.records", "Anomaly"),
    "AnomalyStop": ("ddpprobe.responder", "AnomalyStop"),
    "CaptureError": ("ddpprobe.captured.errors", "CaptureError"),
    "FirstBad": ("ddpprobe.records", "FirstBad"),
    "Probe": ("ddpprobe.probe", "Probe"),
    "Run": ("ddpprobe.replay.run", "Run"),
    "Schedule": ("ddpprobe.sampling", "Schedule"),
    "Site": ("ddpprobe.records", "Site"),
    "StepRecord": ("ddpprobe.records", "StepRecord"),
    "capture": ("ddpprobe.captured.capture", "capture"),
    "install": ("ddpprobe.probe", "install"),
    "open": ("ddpprobe.replay.run", "open_run"),
    "summary": ("ddpprobe.inventory.summary", "summary"),
}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:  # noqa: ANN401  (module protocol)
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(module), attribute)
    msg = f"module 'ddpprobe' has no attribute {name!r}; it has: {', '.join(__all__)}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
