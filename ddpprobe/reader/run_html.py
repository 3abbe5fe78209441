"""A run as a notebook shows it: the line of `ddpprobe ls`, as a small HTML table."""

from __future__ import annotations

import time
from html import escape

from ddpprobe.reader.listed_run import ListedRun
from ddpprobe.reader.text import UNOBSERVED, plain


def html_of(run: ListedRun, where: str) -> str:
    """Return a table with the facts of a run; every text in it is escaped.

    Args:
        run: as it is listed.
        where: its directory or URL.
    """
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.began_ns / 1e9))
    facts = {
        "run": where,
        "name": run.name,
        "began": began if run.began_ns else UNOBSERVED,
        "state": run.state,
        "ranks": str(run.ranks or UNOBSERVED),
        "step": UNOBSERVED if run.step is None else str(run.step),
        "verdict": run.verdict,
    }
    rows = "".join(
        f'<tr><th style="text-align:left">{name}</th>'
        f'<td style="text-align:left">{escape(plain(text))}</td></tr>'
        for name, text in facts.items()
        if text
    )
    return f"<table>{rows}</table>"
