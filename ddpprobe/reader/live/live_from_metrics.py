"""Watching a run through the metrics of a daemon: what any Prometheus would scrape there."""

from __future__ import annotations

import http.client
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import final
from urllib.parse import urlsplit

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ddpprobe.ends.end import ENDED, RUNNING
from ddpprobe.ends.stalls import is_late
from ddpprobe.reader.live.live_view import (
    UNREACHABLE,
    LiveView,
    RankNow,
    Rates,
    SiteNow,
    pace,
    worst_ranks,
    worst_sites,
)
from ddpprobe.records.step import LEVELS, STEP_PHASES

TIMEOUT_SECONDS = 5.0
MOST_BYTES = 64 << 20  # a daemon serves at most 5000 series, in less than 1 MB
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
_PREFIX = "ddpprobe_"
_HOST = "host_"
Fetch = Callable[[str], tuple[bytes, str]]


class NoMetricsError(Exception):
    """What answers at a URL is not a daemon of ddpprobe; the text says what it is."""


def fetch(
    url: str, *, authorization: str = "", context: ssl.SSLContext | None = None
) -> tuple[bytes, str]:
    """Return body and content type of a GET.

    Not through a proxy: daemons listen inside the cluster, on 127.0.0.1 by default.

    Args:
        url: see `target`.
        authorization: the header of that name, which no redirection is told; "": none.
        context: of TLS; None: the authorities that the machine trusts.

    Raises:
        OSError: nobody answers, or not within `TIMEOUT_SECONDS`.
        NoMetricsError: the answer is no exposition.
    """
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT})  # noqa: S310  (`target` checks)
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read(MOST_BYTES + 1)
            kind = answer.headers.get("Content-Type", "")
    except urllib.error.HTTPError as error:
        error.close()
        raise NoMetricsError(f"answers {error.code} {error.reason}") from error
    except http.client.HTTPException as error:
        raise NoMetricsError(f"speaks no HTTP ({type(error).__name__})") from error
    if len(body) > MOST_BYTES:
        raise NoMetricsError(f"answers with more than {MOST_BYTES >> 20} MiB")
    return body, kind


def target(url: str) -> str:
    """Return the address of the metrics: the path is /metrics if the URL has none.

    Raises:
        ValueError: it is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url}: expected http://HOST:PORT, as in http://127.0.0.1:13377/metrics")
    path = "/metrics" if parts.path in {"", "/"} else parts.path
    return parts._replace(path=path, fragment="").geturl()


@final
class UrlWatch:
    """Asks a daemon again and again; one that went away may come back.

    Args:
        url: see `target`.
        fetch: how to ask.
    """

    def __init__(self, url: str, fetch: Fetch = fetch) -> None:
        self._url, self._fetch = target(url), fetch
        self._steps = Rates()
        self._base: dict[tuple[str, str], float] = {}
        self._last = LiveView("", UNREACHABLE, self._url)
        self.lost: tuple[str, ...] = ()  # of a store nothing is read here

    def unknown(self) -> list[str]:
        """Return nothing: what a daemon does not know, it does not say."""
        return []

    def look(self) -> LiveView:
        """Return what the daemon says now; while it does not answer, what it said last."""
        try:
            samples = _Samples(*self._fetch(self._url))
            self._last = self._read(samples)
        except (OSError, NoMetricsError) as error:
            reason = getattr(error, "reason", None) or error
            return replace(self._last, state=f"{UNREACHABLE}: {reason}")
        except (ValueError, KeyError, OverflowError) as error:
            reason = f"its metrics make no sense ({type(error).__name__}: {error})"
            return replace(self._last, state=f"{UNREACHABLE}: {reason}")
        return self._last

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, samples: _Samples) -> LiveView:
        ranks = [self._rank(int(n), samples) for n in sorted(samples.ranks(), key=int)]
        job = samples.first("job_info")
        world = int(job.labels["world_size"]) if job else len(ranks)
        here = f"{len(ranks)} of {world} ranks: those of this node"
        return LiveView(
            name=job.labels["run_id"] if job else "",
            state=_state_of(samples),
            source=self._url,
            world_size=world,
            ranks=worst_ranks(ranks),
            sites=worst_sites(self._sites(samples), list(_guilty(samples))),
            anomalies=tuple(_anomalies(samples.all("anomalies_total"))),
            host={
                name.removeprefix(_HOST): values[0].value
                for name, values in samples.named.items()
                if name.startswith(_HOST)
            },
            sampled=any(sample.value > 0 for sample in samples.all("sites_observed")),
            grad_norm=samples.value("global_grad_norm"),
            notes=(*_stuck(samples), *((here,) if len(ranks) != world else ())),
        )

    def _rank(self, number: int, samples: _Samples) -> RankNow:
        def value(name: str) -> float | None:
            return samples.value(name, rank=str(number))

        phases = {
            s.labels["phase"]: s.value
            for s in samples.all("step_phase_seconds_total", rank=str(number))
            if s.labels["phase"] in STEP_PHASES
        }
        steps, busy = value("steps_total") or 0.0, value("rank_cpu_seconds_total")
        now = samples.value("last_collect_timestamp_seconds") or time.time()
        counters = {"steps": steps, **phases} | ({} if busy is None else {"cpu": busy})
        self._steps.add(number, now, counters)
        window = self._steps.grown(number)
        rate, phase = pace(steps, phases, window)
        seconds, grown = window
        beat = value("rank_last_heartbeat_timestamp_seconds")
        seen = None if beat is None else max(0.0, now - beat)
        info = samples.first("rank_info", rank=str(number))
        usual = sum(phases.values()) / steps if steps else None
        state, why = self._state(number, samples, seen, usual)
        return RankNow(
            number, state, why, int(steps), rate, phase, value("loss"), value("grad_norm"),
            value("rank_resident_memory_bytes"),
            grown["cpu"] / seconds if "cpu" in grown and seconds > 0 else None,
            info.labels.get("device", "") if info else "",
            int(samples.value("rank_anomalies_total", rank=str(number), level="page") or 0), seen,
        )  # fmt: skip

    @staticmethod
    def _state(
        number: int, samples: _Samples, seen: float | None, usual: float | None
    ) -> tuple[str, str]:
        up = samples.value("rank_up", rank=str(number))
        if up == 0:
            first = samples.first("first_failure_timestamp_seconds", rank=str(number))
            return "dead", first.labels.get("signal", "") if first else ""
        if up is None:  # it left as it should, or was never seen
            return ("closed" if samples.value("steps_total", rank=str(number)) else "starting"), ""
        if samples.value("paused"):
            return "paused", ""
        return ("late" if seen is not None and is_late(seen, usual) else "up"), ""

    def _sites(self, samples: _Samples) -> Iterable[SiteNow]:
        rms = {(s.labels["fqn"], s.labels["kind"]): s.value for s in samples.all("site_rms")}
        for sample in samples.all("site_abs_max"):
            key = sample.labels["fqn"], sample.labels["kind"]
            base = self._base.get(key)
            if base is None and sample.value > 0:
                self._base[key] = sample.value
            growth = sample.value / base if base else None
            yield SiteNow(":".join(key), sample.value, rms.get(key, math.nan), None, growth)


def _anomalies(samples: Iterable[Sample]) -> Iterable[str]:
    """Say per detector and level how many there were, and what the latest was, pages first."""
    known = [s for s in samples if s.value > 0 and s.labels["level"] in LEVELS]
    for sample in sorted(known, key=lambda s: LEVELS.index(s.labels["level"])):
        latest = sample.exemplar.labels if sample.exemplar else {}
        fields = ("step", "rank", "fqn", "kind")
        about = ", ".join(f"{name} {latest[name]}" for name in fields if name in latest)
        where = f", the latest at {about}" if about else ""
        level, detector = sample.labels["level"].upper(), sample.labels["detector"]
        yield f"{level} {detector}: {sample.value:.0f}{where}"


@final
class _Samples:
    """The samples of one exposition by name, without the prefix.

    Raises:
        NoMetricsError: it is none of ddpprobe's.
    """

    def __init__(self, body: bytes, kind: str) -> None:
        self.named: dict[str, list[Sample]] = {}
        self._of_rank: dict[tuple[str, str], list[Sample]] = {}
        for family in _parse(body, kind):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                if name != sample.name:
                    self.named.setdefault(name, []).append(sample)
                    rank = sample.labels.get("rank")
                    if rank is not None:
                        self._of_rank.setdefault((name, rank), []).append(sample)
        if "build_info" not in self.named:
            raise NoMetricsError("these are no metrics of ddpprobe")

    def ranks(self) -> set[str]:
        """Return the labels of all ranks."""
        return {rank for name, rank in self._of_rank if name == "steps_total" and rank.isdecimal()}

    def all(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of a name with these labels."""
        rank = labels.get("rank")
        found = self.named.get(name, []) if rank is None else self._of_rank.get((name, rank), [])
        return [s for s in found if labels.items() <= s.labels.items()]

    def first(self, name: str, **labels: str) -> Sample | None:
        """Return the only sample of a name with these labels."""
        return next(iter(self.all(name, **labels)), None)

    def value(self, name: str, **labels: str) -> float | None:
        """Return its value; None: it is not known."""
        found = self.first(name, **labels)
        return None if found is None else float(found.value)


def _parse(body: bytes, kind: str) -> Iterable[Metric]:
    text = body.decode("utf-8", "replace")
    try:
        if kind.startswith("application/openmetrics-text"):
            return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
        return list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise NoMetricsError(f"this is no exposition ({error})") from error


def _state_of(samples: _Samples) -> str:
    state = samples.first("job_state")
    running = state.labels.get("state", RUNNING) if state else RUNNING
    return ENDED if samples.value("job_finished") else running


def _guilty(samples: _Samples) -> Iterator[str]:
    """Name the site of the first cause that holds, if it has one."""
    for sample in samples.all("first_cause_info"):
        fqn, kind = (sample.labels.get(name, "") for name in ("fqn", "kind"))
        if fqn:
            yield f"{fqn}:{kind}" if kind else fqn


def _stuck(samples: _Samples) -> Iterator[str]:
    """Say which ranks the others wait for."""
    for sample in samples.all("rank_stuck"):
        rank, phase = (sample.labels.get(name, "") for name in ("rank", "phase"))
        yield f"hung: rank {rank} is behind the others, or suspended, in {phase}"
