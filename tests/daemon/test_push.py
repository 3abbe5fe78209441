"""A node's way to the head: what it says when the head is away, and when it is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ddpprobe.daemon import push
from ddpprobe.daemon.push import Pusher

from ..made_runs import record


class Head:
    """A head that answers as it is told; `status` None: it is away."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.listens: list[str | None] = []
        head = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if head.status is None:
                    self.close_connection = True
                    return
                head.listens.append(self.headers["Ddpprobe-Listen"])
                self.send_response(head.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.fixture
def pusher(head, caplog) -> Iterator[Pusher]:
    caplog.set_level(logging.INFO, "ddpprobe")
    made = Pusher(head.url, lambda: "token", "node_0001")
    yield made
    made.close(5.0)


def test_each_outage_of_the_head_is_said_once_and_so_is_its_end(
    head, pusher, poll, caplog, monkeypatch
) -> None:
    def said(text: str) -> list[str]:
        return [r.message for r in caplog.records if text in r.message]

    pusher.push(record(0, 0))
    poll(lambda: said("does not answer"))
    head.status = 503
    poll(lambda: said("answers 503"))
    head.status = 200
    poll(lambda: said("answers again"))
    assert said("answers again")[0].endswith("answers again; nothing was dropped")
    # Another outage, longer than what is kept.
    size = len(push.framing.encode_record(record(0, 1)))
    monkeypatch.setattr(push, "QUEUE_BYTES", 4 * size)
    head.status = None
    for step in range(1, 11):
        pusher.push(record(0, step))
    poll(lambda: len(said("does not answer")) == 2)
    poll(lambda: pusher.dropped["push_overflow"])
    head.status = 200
    poll(lambda: len(said("answers again")) == 2)
    poll(lambda: pusher.pending == 0)
    lost = pusher.dropped["push_overflow"]
    assert said("answers again")[1].endswith(f"again; {lost} records were dropped meanwhile")
    assert [len(said(t)) for t in ("does not answer", "answers 503", "answers again")] == [2, 1, 2]


def test_what_the_head_refuses_is_said_to_be_dropped_and_is_no_outage(
    head, pusher, poll, caplog
) -> None:
    head.status = 400
    for step in range(3):
        pusher.push(record(0, step))
        poll(lambda: pusher.pending == 0)
    poll(lambda: pusher.dropped["push_refused"] == 3)
    head.status = 200
    pusher.push(record(0, 3))
    poll(lambda: pusher.acknowledged == (0, 3))
    assert "refuses what this node pushes (400" in caplog.text
    assert caplog.text.count("the head at") == 1


def test_the_head_hears_where_a_node_is_scraped_and_when_it_is_no_more(head, pusher) -> None:
    head.status = 204
    pusher.listen = "0.0.0.0:13377"
    pusher.push(record(0, 1))
    pusher.close(5.0)
    assert head.listens == ["0.0.0.0:13377", None]


def test_who_is_kept_out_for_a_moment_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart a node may have its new secret before the head has heard of it."""
    own = Pusher("http://127.0.0.1:1", lambda: "token", "node_0001")
    monkeypatch.setattr(push, "KEPT_OUT_SECONDS", 1e9)
    own._keep_out("answers 401 ")
    assert own.not_let_in == ""
    monkeypatch.setattr(push, "KEPT_OUT_SECONDS", 0.0)
    own._keep_out("answers 401 ")
    assert own.not_let_in.endswith("see that DDPPROBE_TOKEN is the same on both, or on neither")
    own.close(0.0)
