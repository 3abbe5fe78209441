"""Whose each attempt of a run in an object store is: `attempts/NNN.json` there says so.

The first job that comes to a URL makes the run; every further one, also on an empty disk, is the
next attempt of it. It claims the attempt's number over there, so that two jobs never write the same
object, even if both live. A training process talks to no network: it asks in a process of its own,
`python -m ddpprobe.store.remote.claims URL`. What was claimed is kept beside the journals, and the
daemon brings nothing of an attempt that is another job's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from ddpprobe.rundir import paths, safe_read, store_url
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store.remote.bucket import Bucket, BucketError

FOLDER = "attempts"
MOST_BYTES = 4096
MOST_ATTEMPTS = 1 << 16  # a number beyond it is a stranger's, and nobody goes on from there
IDENTITY: Mapping[str, type] = {
    "format_version": int, "run_id": str, "name": str, "world_size": int, "nodes": int,
    "created_ns": int, "every": int, "wrapper": str, "torch": str, "backend": str, "hostname": str,
}  # fmt: skip


def claim_next(
    bucket: Bucket, run_json: Mapping[str, Any], least: int, token: str, *, new: bool
) -> dict[str, Any]:
    """Find out which attempt of which run a job is, and claim it.

    Args:
        bucket: where the run goes.
        run_json: what this run's run.json says, or will say.
        least: number that the attempt has at least.
        token: what tells this attempt from all others.
        new: nothing of the run is on the disk yet, so that it may be what lies there.

    Returns:
        `run_json` and `attempt`; or `another`, the id of the run that lies there instead.

    Raises:
        BucketError: the object store does not do what it should.
        ValueError: what lies there cannot be continued; the text says what to do.
    """
    own = json.dumps(run_json, indent=1).encode()
    found = bucket.create(paths.RUN_JSON, own, safe_read.MAX_JSON_BYTES)
    there = _identity(found, bucket.url)
    if there["run_id"] != run_json["run_id"] and not new:
        return {"another": there["run_id"]}
    taken = [n for n in _numbers(bucket) if n < MOST_ATTEMPTS]
    attempt = max([least, *(n + 1 for n in taken)])
    while not claim(bucket, attempt, token):
        attempt += 1
    return {"run_json": there if new else dict(run_json), "attempt": attempt}


def claim(bucket: Bucket, attempt: int, token: str) -> bool:
    """Claim an attempt, and return whether it is ours. Raises BucketError."""
    own = _content(token)
    return bucket.create(_key(attempt), own, MOST_BYTES) == own


def is_claimed(bucket: Bucket, attempt: int, token: str) -> bool | None:
    """Return whether an attempt is ours; None if nobody has claimed it. Raises BucketError."""
    found = bucket.read(_key(attempt), MOST_BYTES)
    return None if found is None else found == _content(token)


def token_of(run: paths.RunDir, attempt: int) -> str:
    """Return what was claimed for an attempt of a run directory; "" if nothing was."""
    try:
        return str(safe_read.parse(run.claim(attempt).read_bytes())["claim"])
    except (OSError, *MALFORMED):
        return ""


def _identity(data: bytes, url: str) -> dict[str, Any]:
    found = paths.continued(data, url, "another URL")
    if any(type(found.get(key)) is not kind for key, kind in IDENTITY.items()):
        raise ValueError(
            f"{url} cannot be continued: its run.json is damaged. Give run_dir= another URL."
        )
    return {**{key: found[key] for key in IDENTITY}, "destination": url}


def _numbers(bucket: Bucket) -> list[int]:
    names = (key.rpartition("/")[2] for key, _, _ in bucket.names(FOLDER))
    digits = (name.removesuffix(".json") for name in names)
    return [int(n) for n in digits if n.isascii() and n.isdecimal()]


def _key(attempt: int) -> str:
    return f"{FOLDER}/{attempt:03d}.json"


def _content(token: str) -> bytes:
    return json.dumps({"claim": token}).encode()


def main() -> None:
    """Answer the question on standard input, as JSON; `launch.ask_store` asks it."""
    question = json.load(sys.stdin)
    try:
        answer = claim_next(Bucket(store_url.parse(sys.argv[1])), **question)
    except ValueError as error:
        answer = {"refused": str(error)}
    except BucketError as error:
        answer = {"unknown": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
