"""Write what Prometheus and Grafana need to watch runs into a directory, and start Prometheus.

DIR then holds prometheus.yml with the targets to scrape (targets/*.json, read again as they
change), the alert rules, and Grafana's data source, dashboards and their provisioning. Prometheus
runs in the foreground if it is on the PATH, and Ctrl-C ends it; its data stay in DIR/data.

Run it again after an upgrade: files that you have not changed are brought up to date, those that
you have are kept (--force overwrites them).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpprobe.commands.output import complain, plain, say, say_json, table

DIRECTORY = "ddpprobe-stack"
LISTEN = "127.0.0.1:9090"
WRITTEN = ".ddpprobe-up.json"  # the checksum of each file as it was written
PROVISIONED = "/etc/grafana/dashboards/ddpprobe"  # what the provisioning file says before
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (to be replaced)


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
        "--target",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="a daemon to scrape, may be repeated (default: the ports 13377 to 13384 of this "
        "machine, those of its first eight jobs)",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=LISTEN, help="of Prometheus (default: %(default)s)"
    )
    parser.add_argument("--no-start", action="store_true", help="only write the files")
    parser.add_argument("--force", action="store_true", help="overwrite files that were changed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the files; then be Prometheus until Ctrl-C."""
    from ddpprobe.commands import local_prometheus  # noqa: PLC0415

    for address in (*args.target, args.listen):
        local_prometheus.address_of(address)
    starts = not args.no_start and local_prometheus.is_there()
    listen = local_prometheus.free_address(args.listen) if starts else args.listen
    directory = Path(args.directory).absolute()
    state = put(directory, files(directory, listen, args.target), force=args.force)
    facts = {
        "format_version": 1, "directory": str(directory), "files": state, "started": starts,
        "url": f"http://{listen}",
    }  # fmt: skip
    if not starts:
        _tell(facts, as_json=args.json)
        if not args.no_start:
            where = plain(directory / "prometheus.yml")
            complain(f"ddpprobe: {local_prometheus.NO_PROMETHEUS} with {where}")
        return 0
    config, log = directory / "prometheus.yml", directory / "prometheus.log"
    flags = ("--enable-feature=exemplar-storage",)
    with (
        local_prometheus.ends_with_sigterm(),
        local_prometheus.LocalPrometheus(
            config, directory / "data", listen, log, flags
        ) as prometheus,
    ):
        _tell(facts, as_json=args.json)
        sys.stdout.flush()
        prometheus.wait()
    return 0


def files(directory: Path, listen: str, targets: list[str]) -> dict[str, str]:
    """Return the text of each file by its path below the directory.

    Args:
        directory: absolute; Grafana is told where its dashboards lie.
        listen: where Prometheus will be.
        targets: HOST:PORT of the daemons; [] for those of the package.
    """
    from ddpprobe.commands.local_prometheus import address_of  # noqa: PLC0415
    from ddpprobe.daemon.server import join_address  # noqa: PLC0415

    stack = _stack()
    host, port = address_of(listen)
    url = f"http://{join_address(EVERYWHERE.get(host, host), port)}"
    dashboards = directory / "grafana" / "dashboards"
    rules, boards = "rules/ddpprobe.yml", "provisioning/dashboards/ddpprobe.yml"
    sources, found = "provisioning/datasources/ddpprobe.yml", "targets/ddpprobe.json"
    out = {
        "prometheus.yml": _text(stack / "prometheus/prometheus.yml", "../rules/", "rules/"),
        found: _text(stack / "prometheus" / found),
        rules: _text(stack / rules),
        f"grafana/{boards}": _text(stack / boards, PROVISIONED, json.dumps(str(dashboards))),
        f"grafana/{sources}": _text(stack / sources, f"http://{LISTEN}", url),
    }
    if targets:
        out[found] = json.dumps([{"targets": targets, "labels": {}}], indent=2) + "\n"
    for board in sorted((stack / "dashboards").glob("*.json")):
        out[f"grafana/dashboards/{board.name}"] = _text(board)
    return out


def put(directory: Path, texts: Mapping[str, str], *, force: bool) -> dict[str, str]:
    """Write files into a directory; return what became of each.

    "written": it was not there; "updated": it was as an earlier `up` wrote it, or `force`;
    "unchanged": it says the same; "kept": it is somebody else's work.
    """
    before, state, now = _written(directory), {}, {}
    for name, text in texts.items():
        path, data = directory / name, text.encode()
        current = path.read_bytes() if path.exists() else None
        ours = current is None or force or before.get(name) == _checksum(current)
        if current == data:
            state[name] = "unchanged"
        elif ours:
            state[name] = "written" if current is None else "updated"
            _replace(path, data)
        else:
            state[name] = "kept"
            continue
        now[name] = _checksum(data)
    _replace(directory / WRITTEN, (json.dumps(now, indent=1) + "\n").encode())
    return state


def _stack() -> Path:
    """Return where the files are: in the package, or, in a checkout, beside it."""
    package = Path(__file__).parent.parent
    inside = package / "stack"
    return inside if inside.is_dir() else package.parent / "grafana"


def _text(path: Path, old: str = "", new: str = "") -> str:
    text = path.read_text(encoding="utf-8")
    if old and old not in text:
        msg = f"{path} does not say {old!r}"
        raise ValueError(msg)
    return text.replace(old, new) if old else text


def _written(directory: Path) -> dict[str, str]:
    try:
        found = json.loads((directory / WRITTEN).read_bytes())
    except (OSError, ValueError):
        return {}  # nothing is known to be ours
    return found if isinstance(found, dict) else {}


def _checksum(data: bytes) -> str:
    import hashlib  # noqa: PLC0415

    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable as the umask says: Grafana is another user."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def _tell(facts: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        say_json(facts)
        return
    directory = facts["directory"]
    for line in table((state, f"{directory}/{name}") for name, state in facts["files"].items()):
        say(line)
    kept = [name for name, state in facts["files"].items() if state == "kept"]
    if kept:
        complain(f"ddpprobe: you have changed {', '.join(kept)}: kept; --force overwrites")
    if facts["started"]:
        say(f"Prometheus: {facts['url']}; Ctrl-C ends it")
    provisioning = plain(f"{directory}/grafana/provisioning")
    say(f"Grafana: start it with GF_PATHS_PROVISIONING={provisioning}")
