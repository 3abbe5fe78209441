"""Pages, or parts of them, made from what does the work: metrics, detectors, what alerts hold back."""

from __future__ import annotations

from collections.abc import Iterable

from ddpprobe.detectors.settings import defaults, meanings, summary
from ddpprobe.detectors.suite import DETECTORS
from ddpprobe.ends.anomalies import TITLES
from ddpprobe.metrics.labels import EXEMPLAR_CHARACTERS, LABEL_BYTES, PATH_BYTES
from ddpprobe.metrics.table import (
    JOINED_ABOVE,
    METRICS,
    SERIES_LIMIT,
    Metric,
)
from ddpprobe.records.step import COUNTED_KINDS, IN_TURN, KINDS, LEVELS
from grafana import alerts, measured, series_table


def _names(words: Iterable[str]) -> str:
    return ", ".join(words)


_HEAD = f"""# Metrics

*Made by `python -m grafana.build` from the table `METRICS` in `ddpprobe/metrics/table.py`; edit that.*

The daemon of every node answers `GET /metrics` for all its ranks, by default at
`127.0.0.1:13377` (the next free port up for a further job on the node). The format is Prometheus
text 0.0.4, or OpenMetrics 1.0 with exemplars for a client that asks for it.

- The body is made once per collection interval, not per scrape:
  `ddpprobe_last_collect_timestamp_seconds` says when.
- A value that is not known is absent, never 0. Counters start at 0 and begin anew with a daemon that
  begins with another attempt: what is found, ordered or lost in one attempt still counts in the next
  one that the same daemon follows, and for the one that takes its place if it is killed. But
  `ddpprobe_restarts_total` begins with all attempts before its own. What a rank counts
  itself (its steps, skipped steps, seconds) begins anew with its process, and so with each attempt;
  `rate()` and `increase()` take such a fall for the restart that it is.
- Anomalies, the global norm and the sites are served by the head node only (that of rank 0). They
  cover all ranks. Detectors: {", ".join(TITLES)}; levels: {", ".join(LEVELS)}.
- The series of `ddpprobe_anomalies_total` carry the latest anomaly as an exemplar: `step`, `fqn`,
  `kind` and `rank`, at most {EXEMPLAR_CHARACTERS} characters together, a longer `fqn` cut from the
  left.
- A target has at most {SERIES_LIMIT} series: first those of tier A, then of the sites (tier B)
  modules that hold others, gradients, and the rest, each in execution order.
  `ddpprobe_series_dropped_total` counts what is left out.
- Label values have at most {LABEL_BYTES} bytes, `directory` {PATH_BYTES:,}, and are cut from the left.
  Several tensors of one output (a tuple, a dict) count as one site here; the store keeps them apart.
- `kind` is, in the metrics of sites (tier B), one of {_names(k for k in KINDS if k not in IN_TURN)};
  in `ddpprobe_nonfinite_elements_total` one of {_names(COUNTED_KINDS)};
  in `ddpprobe_site_update_ratio` always update. A first cause can be of each of these.
  `grad_local` is a gradient before any reduction, `grad` one after it, `update` what the step
  changed of a parameter, `optim_state` the optimizer's second moment of one.

"""


_ROOM = """## What finds room

Of a transformer on the head's node, how many series are served, of how many there are, counted on
the exposition. The store has all of them. A series that is refused again and again counts once.
Without a row here: histograms, which `DDPPROBE_HISTOGRAMS=1` adds before the sites.

"""


_MANY = f"""## Above {JOINED_ABOVE:,} ranks

What tells who makes the others wait, who lives, and whose loss or gradient is not like the others'
has a series for each rank in jobs of any size. The rest has one for all ranks of a node above
{JOINED_ABOVE:,} ranks: the label `rank` says which they are, as `1016-1023`, and the table says how they
are joined. The store has each rank's.

"""


def _joined_metrics() -> str:
    lines = ["| joined | metrics |", "|---|---|"]
    for how in ("sum", "mean", "min", "max"):
        names = ", ".join(f"`{m.name}`" for m in METRICS if m.joined == how)
        lines.append(f"| {how} | {names} |")
    return "\n".join(lines) + "\n"


def _table(title: str, rows: list[Metric]) -> str:
    lines = [
        f"## {title}",
        "",
        "| name | kind | labels | unit | meaning |",
        "|---|---|---|---|---|",
    ]
    for m in rows:
        labels = ", ".join(f"`{x}`" for x in m.labels)
        text = m.help.replace("|", r"\|")
        lines.append(f"| `{m.name}` | {m.kind} | {labels} | {m.unit} | {text} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page."""
    titles = {"A": "Per rank and per node (tier A)", "B": "Per site (tier B)"}
    tables = "\n".join(
        _table(title, [m for m in METRICS if m.tier == tier]) for tier, title in titles.items()
    )
    many = f"{_joined_metrics()}\n{series_table.table_of_ranks()}\n"
    return _HEAD + _ROOM + series_table.table() + "\n" + _MANY + many + tables


BEGIN = "<!-- Made by `python -m grafana.build` from the classes in ddpprobe/detectors/. -->\n"
END = "<!-- End of what is made. -->\n"


def detectors(page: str, detection: str) -> str:
    """Return the detectors' page with what is measured of each one, and its settings, made anew.

    Args:
        page: as it is.
        detection: the page of the benchmark.
    """
    before, rest = measured.told(page, measured.read(detection)).split(BEGIN)
    _, after = rest.split(END)
    lines = ["", "| Detector | In a report | What it does |", "|---|---|---|"]
    lines += [f"| `{d.name}` | {d.title} | {summary(d)} |" for d in DETECTORS]
    lines += ["", "| Detector | Setting | Default | Meaning |", "|---|---|---|---|"]
    for detector in DETECTORS:
        says = meanings(detector)
        lines += [
            f"| `{detector.name}` | `{key}` | {value:.10g} | {says[key]} |"
            for key, value in defaults(detector).items()
        ]
    return before + BEGIN + "\n".join(lines) + "\n\n" + END + after


ECHOES = "<!-- Made by `python -m grafana.build` from ECHOES in grafana/alerts.py. -->\n"


def echoes(page: str) -> str:
    """Return the page about alerts with what holds back what made anew.

    Args:
        page: as it is.
    """
    before, rest = page.split(ECHOES)
    _, after = rest.split(END)
    held: dict[str, list[str]] = {}
    for echo in alerts.ECHOES:
        for target in echo.targets:
            name = f"`{target}`" + (", where no rank is known" if echo.only else "")
            held.setdefault(name, []).extend(f"`{source}`" for source in echo.sources)
    lines = ["", "| not sent | while one of these fires |", "|---|---|"]
    lines += [f"| {target} | {_names(sources)} |" for target, sources in held.items()]
    return before + ECHOES + "\n".join(lines) + "\n\n" + END + after
