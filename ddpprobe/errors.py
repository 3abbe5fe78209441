"""Every error that a user of ddpprobe can meet, below one base.

Each keeps the built-in bases that fit it, so `except ValueError` around `install()` works, too.
What goes wrong in the middle of training is contained (`rundir/fuse.py`) and raises none of these,
but `AnomalyStop`, which the user asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpprobe.records.step import Anomaly


class Error(Exception):
    """Base of all errors of ddpprobe; the text says what came, what was expected, what to type."""


class InstallError(Error, ValueError, RuntimeError, TypeError):
    """`ddpprobe.install()` refused, on every rank, for the reason given by the first that did.

    It is a ValueError and a TypeError (an argument is wrong), and a RuntimeError (some rank did not
    come, or a probe has no run). The integrations raise it, too.
    """


class ModelRefused(Error, ValueError):
    """A model, or a part of one, that ddpprobe cannot observe truthfully."""


class AnomalyStop(Error, RuntimeError):
    """`install(on_anomaly="stop")`: training stops here, on all ranks after the same step.

    Attributes:
        anomaly: the verdict that the user wanted to stop for.
        step: the last optimizer step that was taken.
    """

    def __init__(self, anomaly: Anomaly, step: int) -> None:
        super().__init__(anomaly, step)
        self.anomaly, self.step = anomaly, step

    def __str__(self) -> str:
        found = self.anomaly
        rank = "no rank alone" if found.rank is None else f"rank {found.rank}"
        where = "unknown module" if found.module is None else found.module or "(root)"
        return (
            f"ddpprobe stopped training after step {self.step}, as on_anomaly='stop' asks for: "
            f"{found.detector} at step {found.step}, {rank}, {where}: {found.message}"
        )


class CaptureError(Error, ValueError, RuntimeError, TypeError):
    """`ddpprobe.capture` cannot give what was asked."""


class UnknownName(CaptureError, KeyError, IndexError):
    """There is no captured module of this name or number; the text lists close ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class SummaryError(Error, RuntimeError, TypeError):
    """`ddpprobe.summary` cannot tell what was asked of this model without running it."""


class UnknownRow(SummaryError, KeyError):
    """A summary has no module of this name; the text lists those it has."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class RunError(Error):
    """A run that cannot give what was asked; the text is one line.

    Attributes:
        exit_code: of the command line: 2 wrong use, 3 damaged.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunNotFound(RunError):
    """`ddpprobe.open()` was given a path or a URL at which there is no run."""


class UnknownSeries(RunError, ValueError):
    """A site, statistic, scalar, rank or attempt that a run has not; the text names those it has.

    Of many it names those that come close. Steps that no run has, such as negative ones, are told
    by it, too. Where a site was never heard of, it also says why, as far as the run knows.
    """


class TensorError(Error):
    """A tensor that was not captured, or whose parts are not there."""


class StoreDamaged(Error):
    """A file of the store that is missing, damaged, or nothing this format knows."""


class PackDamaged(Error, ValueError):
    """A file of captured tensors that is not whole, or bytes in it that were altered."""
