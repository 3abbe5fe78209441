r"""The page: one HTML file with everything inside, that nothing can be smuggled into.

Text goes through Jinja's escaping, and before it through `plain`, which takes the control and
bidirectional characters out. Data goes into the page as JSON with `<`, `>`, `&` and `'` written as
`\uXXXX`. And the page's policy allows the two scripts by their checksums and no connection at all,
so that a name that got through all of this would still not run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from ddpprobe.reader.text import plain
from ddpprobe.report import tables
from ddpprobe.report.close_look import close_looks, numbers_around
from ddpprobe.report.heat import heat_maps
from ddpprobe.report.histogram_maps import histogram_maps
from ddpprobe.report.host import host_panels
from ddpprobe.report.ranks import rank_maps
from ddpprobe.report.story import Story
from ddpprobe.report.timeline import timeline
from ddpprobe.report.verdict import judge

MOST_LOST = 200  # lines
MOST_TEXT = 2000  # characters of one text
Figures = dict[str, list[dict[str, Any]]]


def render(story: Story) -> str:
    """Return the whole page."""
    plotly = _asset("plotly", "package_data/plotly.min.js")
    script = _asset("ddpprobe", "report/page.js")
    figures = figures_of(story)
    return _environment().get_template("page.html").render(
        policy=_policy(plotly, script),
        style=Markup(_asset("ddpprobe", "report/page.css")),  # noqa: S704  (our own file)
        plotly=Markup(plotly),  # noqa: S704  (plotly's own file)
        script=Markup(script),  # noqa: S704  (our own file)
        figures=figures,
        story=story,
        verdict=judge(story),
        looks=[(h, numbers_around(h)) for h in story.histories],
        tables=tables,
        lost=story.lost[:MOST_LOST],
        unknown=story.held.unknown(),
        most=MOST_LOST,
        version=_version(),
        now=tables.when(time.time_ns()),
    )  # fmt: skip


def figures_of(story: Story) -> Figures:
    """Return all plots by the place where they stand; of several in one place one is shown."""
    found: Figures = {
        "timeline": [each for each in (timeline(story),) if each],
        "map": heat_maps(story),
        "histograms": histogram_maps(*story.histograms),
        "ranks": rank_maps(story),
        "host": [each for each in (host_panels(story),) if each],
    }
    for number, history in enumerate(story.histories):
        found[f"history-{number}"] = close_looks(history)
    return {where: figures for where, figures in found.items() if figures}


@functools.cache  # with the compiled templates
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddpprobe", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _clean(value: object) -> object:
    """Take control characters out of every text, and of an endless one the end.

    What is marked is our own.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return plain(value if len(value) <= MOST_TEXT else value[: MOST_TEXT - 1] + "…")


def _policy(*scripts: str) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _version() -> str:
    try:
        return version("ddpprobe")
    except PackageNotFoundError:  # it runs from a bare source tree
        return "unknown"


def _asset(package: str, path: str) -> str:
    """Return a text file of an installed package, as a browser will read it back."""
    text = files(package).joinpath(path).read_text("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
