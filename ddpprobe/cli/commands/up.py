"""Watch all runs with Prometheus, and notify a webhook of what is wrong with them.

DIR holds all of it: prometheus.yml, alertmanager.yml, the alert rules, their runbooks, and what
Grafana needs. Prometheus and Alertmanager run in the foreground if they are on the PATH, until
Ctrl-C, or in the background with --detach; their data stay in DIR. Runs that start on this machine
are found by themselves, those of a cluster if $DDPPROBE_SD_DIR is a directory that its machines
share.

Started again it goes on with the options that it had; "" takes one back. Files that you have not
changed are brought up to date, those that you have are kept (--force overwrites them).
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddpprobe.cli import http_config, local_prometheus, stack_files, stack_process, stack_status
from ddpprobe.cli.local_prometheus import LISTEN, PORTS_TRIED
from ddpprobe.cli.local_server import (
    LocalServer,
    address_of,
    ends_with_sigterm,
    free_address,
    url_of,
    wait_for,
)
from ddpprobe.cli.output import OK, USAGE, complain, say, say_json
from ddpprobe.cli.stack_files import ALERTMANAGER, PROMETHEUS, RUNBOOKS, Stack
from ddpprobe.daemon.variables import parse_address
from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain
from ddpprobe.rundir import paths, targets

DIRECTORY = "ddpprobe-stack"
# What the next `up` goes on with.
OPTIONS = (
    "target", "listen", "webhook", "alertmanager", "prometheus", "runbook_base", "grafana_url",
    "http_config",
)  # fmt: skip
URLS = ("webhook", "alertmanager", "prometheus", "runbook_base", "grafana_url")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        default=DIRECTORY,
        help="where the files go (default: %(default)s)",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="notify this one of alerts, by Alertmanager's JSON"
    )
    parser.add_argument(
        "--alertmanager", metavar="URL", help="use this Alertmanager, and start none"
    )
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="use this Prometheus: only write the files, and say how it loads them",
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        action="append",
        help="scrape this daemon as well, which is not found by itself; may be repeated",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"of Prometheus (default: {LISTEN} or the next free port)",
    )
    parser.add_argument(
        "--runbook-base",
        metavar="URL",
        help="where alerts find their runbooks (default: Prometheus serves them)",
    )
    parser.add_argument(
        "--grafana-url",
        metavar="URL",
        help=f"where alerts find the dashboard (default: {stack_files.GRAFANA})",
    )
    parser.add_argument(
        "--http-config",
        metavar="FILE",
        help="certificates and password that daemons ask Prometheus for (a how-to)",
    )
    parser.add_argument("--no-start", action="store_true", help="only write the files")
    parser.add_argument("--force", action="store_true", help="overwrite files that were changed")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="return when all is ready, it goes on")
    how.add_argument(
        "--status", action="store_true", help="say what runs in DIR, what it watches and what fires"
    )
    how.add_argument("--stop", action="store_true", help="end what runs in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the files; then be Prometheus and Alertmanager until Ctrl-C."""
    directory = Path(args.directory).absolute()
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{directory}: no directory; give one for the files of up, or a new name")
    if args.status:
        return _status(directory, as_json=args.json)
    if args.stop:
        return _stop(directory, as_json=args.json)
    before = stack_files.remembered(directory)
    options = _options(args, before)
    starts = not (args.no_start or "prometheus" in options)
    if args.detach and not starts:
        raise RunError("--detach is for what is started: leave --no-start and --prometheus out")
    _say_remembered(options, before, args)
    if not starts or not local_prometheus.is_there():
        return _write(directory, options, args, wanted=starts)
    directory.mkdir(parents=True, exist_ok=True)
    if args.detach:
        stack_files.remember(directory, options)  # which that process goes by
        words = ["--force"] if args.force else []
        _tell(stack_process.detach(directory, words), as_json=args.json, detached=True)
        return OK
    with ends_with_sigterm(), stack_process.StackProcess(directory) as process:
        _serve(directory, options, args, process)
    return OK


def _options(args: argparse.Namespace, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, now or, if not now, before.

    Raises:
        RunError: one of them is wrong, or two do not go together.
    """
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if "target" in given:
        given["target"] = [target for target in given["target"] if target]
    if given.get("http_config"):
        given["http_config"] = str(Path(given["http_config"]).absolute())
    known = {name: value for name, value in before.items() if name in OPTIONS}
    options = {name: value for name, value in (known | given).items() if value}
    for address in options.get("target", ()):
        _check_target(address)
    address_of(options.get("listen", LISTEN), "--listen")
    for name in URLS:
        _check_url(name, options.get(name))
    for name, why in (
        ("alertmanager", "an Alertmanager that runs already has receivers of its own"),
        ("prometheus", "a Prometheus that runs already has an Alertmanager of its own"),
    ):
        if name in options and "webhook" in options:
            raise RunError(f'--webhook does not go with --{name}: {why} (--webhook "" forgets it)')
    if {"alertmanager", "prometheus"} <= options.keys():
        raise RunError("--alertmanager does not go with --prometheus: that one knows its own")
    return options


def _check_target(address: str) -> None:
    try:
        parse_address(address)
    except ValueError as error:
        raise RunError(
            f"--target: expected the HOST:PORT of a daemon, as in node1:13377, got {address!r}"
        ) from error


def _check_url(name: str, url: str | None) -> None:
    if url is None:
        return
    parts = urlsplit(url)
    known = ("http", "https", "file") if name == "runbook_base" else ("http", "https")
    whole = parts.scheme in known and (parts.netloc or parts.scheme == "file")
    try:
        _ = parts.port
    except ValueError:  # no number: it might be a password that lacks its @, and be shown
        whole = False
    if not whole or not url.isprintable() or " " in url:
        raise RunError(f"--{name.replace('_', '-')}: expected http://HOST..., got {url!r}")


def _write(
    directory: Path, options: Mapping[str, Any], args: argparse.Namespace, *, wanted: bool
) -> int:
    """Only write the files; `wanted`: a Prometheus would be started if there was one."""
    listen = options.get("listen", LISTEN)
    url = options.get("prometheus") or url_of(listen, socket.gethostname())
    alertmanager = options.get("alertmanager") or url_of(_beside(listen))
    base = (directory / RUNBOOKS).as_uri()  # nobody serves them, as far as is known
    facts = _put(_stack(directory, options, url, alertmanager, base), args) | {"started": False}
    stack_files.remember(directory, options)
    _tell(facts, as_json=args.json)
    if wanted:
        where = plain(directory / PROMETHEUS)
        complain(f"ddpprobe: {local_prometheus.NO_PROMETHEUS} with {where}")
    elif "prometheus" in options and not args.json:
        for line in _how_to_load(directory, url):
            say(line)
    return OK


def _serve(
    directory: Path, options: Mapping[str, Any], args: argparse.Namespace,
    process: stack_process.StackProcess,
) -> None:  # fmt: skip
    """Write the files and run the servers until Ctrl-C."""
    given = options.get("listen")
    listen = free_address(given or LISTEN, 1 if given else PORTS_TRIED)
    url, other = url_of(listen, socket.gethostname()), options.get("alertmanager", "")
    beside = None
    if not other and (local_prometheus.alertmanager_is_there() or "webhook" in options):
        beside = free_address(_beside(given or LISTEN), PORTS_TRIED)
        other = url_of(beside)
    stack = _stack(directory, options, url, other, f"{url}/user")
    facts = _put(stack, args)
    if not other:
        facts["notes"].append(local_prometheus.NO_ALERTMANAGER)
    stack_files.remember(directory, options)
    with ExitStack() as running:
        servers = [
            running.enter_context(server)
            for server in _servers(directory, listen, beside, url, process.lock)
        ]
        facts |= {"started": True, "listen": listen, "alertmanager": other or None}
        _tell(process.publish(facts), as_json=args.json)
        sys.stdout.flush()
        wait_for(*servers)


def _servers(
    directory: Path, listen: str, beside: str | None, url: str, lock: int
) -> Iterator[LocalServer]:
    """Yield the servers in the order in which they start, each when the one before is ready."""
    if beside is not None:
        yield local_prometheus.alertmanager(
            directory / ALERTMANAGER, directory / "alertmanager-data", beside,
            directory / "alertmanager.log", url_of(beside, socket.gethostname()), lock,
        )  # fmt: skip
    yield local_prometheus.prometheus(
        directory / PROMETHEUS, directory / "data", listen, directory / "prometheus.log",
        ("--enable-feature=exemplar-storage", f"--web.user-assets={directory / RUNBOOKS}",
         f"--web.external-url={url}/"),
        lock,
    )  # fmt: skip


def _beside(listen: str) -> str:
    """Return where Alertmanager listens, on the same interface as Prometheus; port 0 is any."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) and local_prometheus.ALERTMANAGER_PORT}"


def _stack(
    directory: Path, options: Mapping[str, Any], url: str, alertmanager: str, base: str
) -> Stack:
    discovered, path = paths.sd_dir(), options.get("http_config")
    return Stack(
        directory=directory,
        prometheus=url,
        alertmanager=alertmanager,
        discovered=() if discovered is None else tuple(targets.patterns(discovered)),
        targets=tuple(options.get("target", ())),
        webhook=options.get("webhook", ""),
        runbook_base=options.get("runbook_base") or base,
        grafana=options.get("grafana_url") or stack_files.GRAFANA,
        http=http_config.read(Path(path)).scrape_config() if path else {},
    )


def _put(stack: Stack, args: argparse.Namespace) -> dict[str, Any]:
    """Write the files; return the facts about them; `notes`: what is not as it was meant."""
    state = stack_files.put(stack.directory, stack.files(), force=args.force)
    kept = [name for name, what in state.items() if what == "kept"]
    notes = []
    if kept:
        notes.append(f"you have changed {', '.join(kept)}: kept; --force overwrites")
    if PROMETHEUS in kept and stack.alertmanager:
        address = urlsplit(stack.alertmanager).netloc
        if address not in (stack.directory / PROMETHEUS).read_text(errors="replace"):
            notes.append(f"your {PROMETHEUS} does not name the Alertmanager at {address}")
    if not stack.discovered and not stack.targets:
        notes.append("DDPPROBE_SD_DIR is empty, and there is no --target: nothing is scraped")
    return {
        "format_version": 1, "directory": str(stack.directory), "files": state,
        "url": stack.prometheus, "notifies": _shown(stack.webhook) or None,
        "runbooks": stack.runbook_base, "discovered": list(stack.discovered),
        "targets": list(stack.targets), "notes": notes,
    }  # fmt: skip


def _shown(url: str) -> str:
    """Return a webhook's URL without what may be the key to it: its path, user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if url else ""


def _say_remembered(
    options: Mapping[str, Any], before: Mapping[str, Any], args: argparse.Namespace
) -> None:
    """Say which options are those of last time."""
    same = [name for name in options if name in before and getattr(args, name) is None]
    if same and not args.json:
        words = ", ".join(
            f"--{name.replace('_', '-')} {_shown(options[name]) if name == 'webhook' else value}"
            for name in same
            for value in [" ".join(options[name]) if name == "target" else options[name]]
        )
        say(plain(f"as last time: {words}"))


def _tell(facts: Mapping[str, Any], *, as_json: bool, detached: bool = False) -> None:
    for note in facts["notes"]:
        complain(plain(f"ddpprobe: {note}"))
    if as_json:
        say_json(facts)
        return
    states = Counter(facts["files"].values())
    files = ", ".join(f"{count} {state}" for state, count in states.items())
    say(plain(f"{facts['directory']}: {files}"))
    if facts["started"]:
        ends = f"ddpprobe up --stop {facts['directory']}" if detached else "Ctrl-C"
        say(plain(f"Prometheus: {facts['url']}; {ends} ends it"))
        for line in _alerting(facts):
            say(plain(line))
    say(plain(f"runbooks: {facts['runbooks']}/"))
    provisioning = plain(f"{facts['directory']}/grafana/provisioning")
    say(f"Grafana: start it with GF_PATHS_PROVISIONING={provisioning}")


def _alerting(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"Alertmanager: {facts['alertmanager'] or 'none'}"
    if facts["notifies"]:
        yield f"alerts go to {facts['notifies']}"


def _how_to_load(directory: Path, url: str) -> Iterator[str]:
    rules, config = directory / stack_files.RULES, directory / PROMETHEUS
    yield plain(f"rules: add {rules} to rule_files of the Prometheus at {url}")
    yield plain(f"targets: add the scrape_configs of {config}, whose files it must be able to read")
    yield f"then: kill -HUP it, or with --web.enable-lifecycle: curl -X POST {url}/-/reload"


def _status(directory: Path, *, as_json: bool) -> int:
    state = stack_process.running(directory)
    ready = bool(state and "url" in state)
    facts: dict[str, Any] = {"format_version": 1, "directory": str(directory), "running": ready}
    if state and ready:
        facts |= {**state, "watched": stack_status.watched(url_of(state["listen"]))}
    if as_json:
        say_json(facts)
    elif not ready:
        what = "nothing runs" if state is None else "it is starting or ending"
        complain(f"ddpprobe: {plain(directory)}: {what}")
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["since"]))
        say(f"runs since {since} (process {facts['pid']} on {plain(facts['host'])})")
        say(plain(f"Prometheus: {facts['url']}"))
        for line in (*_alerting(facts), *stack_status.lines(facts["watched"])):
            say(plain(line))
    return OK if ready else USAGE


def _stop(directory: Path, *, as_json: bool) -> int:
    found = stack_process.stop(directory)
    if as_json:
        say_json({"format_version": 1, "directory": str(directory), "stopped": found})
    elif found:
        say(plain(f"{directory}: stopped"))
    else:
        say(plain(f"{directory}: nothing ran"))
    return OK
