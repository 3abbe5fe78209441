"""Cases that break in every way, for the test of what runs them."""

from __future__ import annotations

import os
import signal
import threading

from tests.gpu.parts import Case, Context


def cases() -> dict[str, Case]:
    return {"raises": raises, "dies": dies, "passes": passes, "hangs": hangs}


def dies(context: Context) -> None:
    context.findings.check("before its death", holds=True, text="kept")
    os.kill(os.getpid(), signal.SIGKILL)


def raises(context: Context) -> None:
    raise ValueError("wrong in some way")


def hangs(context: Context) -> None:
    context.findings.check("before it hangs", holds=True, text="kept")
    threading.Event().wait()


def passes(context: Context) -> None:
    context.findings.figure("a figure", [1.0, 3.0, 2.0], "ms", most=1.0)
