"""moto's S3 in a process of its own, that can be told to be slow, to refuse, or to break off.

    python object_store_server.py ORDERS

Prints its port. The file ORDERS holds a JSON object: `status` answers every request with it,
`seconds` delays each, `puts` is the number of objects that are taken before the rest is refused,
`hold` keeps the rest waiting until there are other orders, and refuses it then. With `silent` no
request is answered until there are other orders; with `plain` no conditional one is understood.
`PUT`s that were taken are appended to ORDERS.puts, one key a line; with `watch` also `GET`s to
ORDERS.gets, each with the number of requests under way.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from moto.s3.models import s3_backends
from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "runs"


class Quiet(WSGIRequestHandler):
    def log(self, *_):
        """Say nothing."""


class Ordered:
    """The server after its orders."""

    def __init__(self, orders: Path) -> None:
        self.orders, self.log = orders, orders.with_suffix(".puts")
        self.inner = create_backend_app("s3")
        self.lock = threading.Lock()
        self.under_way = 0

    def __call__(self, environ, start_response):
        with self.lock:
            self.under_way += 1
        try:
            return self.answer(environ, start_response)
        finally:
            with self.lock:
                self.under_way -= 1

    def answer(self, environ, start_response):
        said = json.loads(self.orders.read_text())
        while "silent" in said and said == json.loads(self.orders.read_text()):
            time.sleep(0.02)
        if "watch" in said and environ["REQUEST_METHOD"] == "GET":
            with self.lock, self.orders.with_suffix(".gets").open("a") as log:
                log.write(f"{self.under_way} {environ['PATH_INFO']}\n")
        if "seconds" in said:
            time.sleep(said["seconds"])
        status = said.get("status")
        if "plain" in said and "HTTP_IF_NONE_MATCH" in environ:
            status = 501
        if environ["REQUEST_METHOD"] == "PUT" and not status:
            with self.lock:
                taken = self.log.read_text().count("\n") if self.log.exists() else 0
                if taken >= said.get("hold", said.get("puts", 1 << 30)):
                    status = 403
                else:
                    with self.log.open("a") as log:
                        log.write(environ["PATH_INFO"] + "\n")
        while status and "hold" in said and said == json.loads(self.orders.read_text()):
            time.sleep(0.02)
        if status:
            start_response(f"{status} No", [("Content-Type", "application/xml")])
            return [b"<Error><Code>No</Code></Error>"]
        return self.inner(environ, start_response)


if __name__ == "__main__":
    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    app = Ordered(Path(sys.argv[1]))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()
