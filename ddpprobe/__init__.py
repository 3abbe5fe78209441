"""ddpprobe: names the first bad tensor of a distributed PyTorch run.

`import ddpprobe` loads neither torch nor zarr; the names below are resolved when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpprobe.errors import AnomalyStop as AnomalyStop
    from ddpprobe.errors import CaptureError as CaptureError
    from ddpprobe.errors import Error as Error
    from ddpprobe.errors import InstallError as InstallError
    from ddpprobe.errors import ModelRefused as ModelRefused
    from ddpprobe.errors import PackDamaged as PackDamaged
    from ddpprobe.errors import RunError as RunError
    from ddpprobe.errors import RunNotFound as RunNotFound
    from ddpprobe.errors import StoreDamaged as StoreDamaged
    from ddpprobe.errors import SummaryError as SummaryError
    from ddpprobe.errors import TensorError as TensorError
    from ddpprobe.errors import UnknownName as UnknownName
    from ddpprobe.errors import UnknownRow as UnknownRow
    from ddpprobe.errors import UnknownSeries as UnknownSeries
    from ddpprobe.inspect.capture.capture import capture as capture
    from ddpprobe.inspect.summary.summary import summary as summary
    from ddpprobe.probe import Probe as Probe
    from ddpprobe.probe import install as install
    from ddpprobe.rank.probes import Probes as Probes
    from ddpprobe.rank.schedule import Schedule as Schedule
    from ddpprobe.reader.listed_run import ListedRun as ListedRun
    from ddpprobe.reader.listed_run import runs as runs
    from ddpprobe.reader.models import Models as Models
    from ddpprobe.reader.models import open_models as open_models
    from ddpprobe.reader.run import Run as Run
    from ddpprobe.reader.run import open_run as open  # noqa: A004, F401  (ddpprobe.open)
    from ddpprobe.records.step import Anomaly as Anomaly
    from ddpprobe.records.step import FirstBad as FirstBad
    from ddpprobe.records.step import Site as Site
    from ddpprobe.records.step import StepRecord as StepRecord

__version__ = "0.1.0"

_ERRORS = (
    "AnomalyStop",
    "CaptureError",
    "Error",
    "InstallError",
    "ModelRefused",
    "PackDamaged",
    "RunError",
    "RunNotFound",
    "StoreDamaged",
    "SummaryError",
    "TensorError",
    "UnknownName",
    "UnknownRow",
    "UnknownSeries",
)
_HOMES = {
    **{name: ("ddpprobe.errors", name) for name in _ERRORS},
    "Anomaly": ("ddpprobe.records.step", "Anomaly"),
    "FirstBad": ("ddpprobe.records.step", "FirstBad"),
    "ListedRun": ("ddpprobe.reader.listed_run", "ListedRun"),
    "Models": ("ddpprobe.reader.models", "Models"),
    "Probe": ("ddpprobe.probe", "Probe"),
    "Probes": ("ddpprobe.rank.probes", "Probes"),
    "Run": ("ddpprobe.reader.run", "Run"),
    "Schedule": ("ddpprobe.rank.schedule", "Schedule"),
    "Site": ("ddpprobe.records.step", "Site"),
    "StepRecord": ("ddpprobe.records.step", "StepRecord"),
    "capture": ("ddpprobe.inspect.capture.capture", "capture"),
    "install": ("ddpprobe.probe", "install"),
    "open": ("ddpprobe.reader.run", "open_run"),
    "open_models": ("ddpprobe.reader.models", "open_models"),
    "runs": ("ddpprobe.reader.listed_run", "runs"),
    "summary": ("ddpprobe.inspect.summary.summary", "summary"),
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
