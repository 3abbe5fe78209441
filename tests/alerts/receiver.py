"""A webhook: it takes what Alertmanager notifies of, and says what it was told of a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Notification:
    """One notification, as it came in.

    Attributes:
        time: Unix seconds.
        run: label `run` of its group, "" for none.
        firing: labels and annotations of the alerts that fire, each as one mapping.
        resolved: the same of those that do not any more.
    """

    time: float
    run: str
    firing: tuple[Mapping[str, str], ...]
    resolved: tuple[Mapping[str, str], ...]

    @property
    def names(self) -> list[str]:
        """Names of the alerts that fire."""
        return sorted(alert["alertname"] for alert in self.firing)

    @property
    def text(self) -> str:
        """What a person reads of those that fire."""
        return "\n".join(f"{alert['summary']}\n{alert['description']}" for alert in self.firing)


def read(body: bytes) -> Notification:
    """Read what Alertmanager sends."""
    said: dict[str, Any] = json.loads(body)
    alerts: dict[str, list[dict[str, str]]] = {"firing": [], "resolved": []}
    for alert in said["alerts"]:
        alerts[alert["status"]].append({**alert["labels"], **alert["annotations"]})
    run = said["groupLabels"].get("run", "")
    return Notification(time.time(), run, tuple(alerts["firing"]), tuple(alerts["resolved"]))


class Receiver:
    """The webhook, as a context manager.

    Attributes:
        url: to be notified at.
    """

    def __init__(self) -> None:
        taken: list[Notification] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append(read(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._taken = taken
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of(self, run: str) -> list[Notification]:
        """Return what came in of a run, in order."""
        return [notification for notification in list(self._taken) if notification.run == run]

    def firing(self, run: str) -> list[Notification]:
        """Return the notifications of a run in which something fires."""
        return [notification for notification in self.of(run) if notification.firing]
