"""Bringing the store to an object store while the run goes on: in one thread, in nobody's way.

The loop of the daemon never waits for the network. While the object store is slow, refuses, or is
gone, what is committed stays on the disk, and is tried again, less and less often; at the end of
the run the daemon waits for a stated time at most, and says what is missing over there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpprobe.rundir import paths, safe_read, store_url
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.paths import OWN_DISK

if TYPE_CHECKING:
    from ddpprobe.store.remote.bucket import Bucket
    from ddpprobe.store.remote.upload import Upload

LOOK_SECONDS = 2.0  # between two looks at what was committed
BACK_OFF_SECONDS = (1.0, 60.0)  # first, longest
LAST_BACK_OFF_SECONDS = 2.0  # longest, once the run is over
# At the end: without an object that arrives, and in all.
GIVE_UP_SECONDS, MOST_SECONDS = 30.0, 600.0
LAST_TRY_SECONDS = 2.0  # for one that was given up before
ERRORS_ALLOWED = 20

logger = logging.getLogger("ddpprobe")


class Uploader:
    """Brings one node's part of a run to its destination.

    Args:
        run: the run directory.
        node: this node's directory name.
        url: of the destination.

    Attributes:
        failures: requests that did not do what they should.
        fuse: contains what is wrong with ourselves.
    """

    def __init__(self, run: paths.RunDir, node: str, url: str) -> None:
        self.failures = 0
        self.fuse = Fuse("upload", ERRORS_ALLOWED)
        self._run, self._node, self._url = run, node, url
        self._bucket: Bucket | None = None
        self._upload: Upload | None = None
        self._error = ""
        self._missing: list[str] = []
        self._behind_since: float | None = None
        self._arrived = time.monotonic()
        self._refused = False
        self._complete = False
        self._changed = threading.Condition()
        self._closing = self._stop = False
        self._asked = self._heard = 0
        self._asked_at = self._arrived
        self._thread = threading.Thread(target=self._run_all, name="ddpprobe-upload", daemon=True)
        self._thread.start()

    def lag_seconds(self) -> float:
        """Return for how long something committed has been missing over there; 0 if nothing is."""
        since = self._behind_since
        return 0.0 if since is None else time.monotonic() - since

    def finish(self) -> None:
        """Say that nothing more will be committed for now: bring what is left, and be `done`."""
        with self._changed:
            if not self._closing:
                self._ask(closing=True)

    def go_on(self) -> None:
        """Say that there will be more: another attempt has begun."""
        with self._changed:
            self._ask(closing=False)

    @property
    def done(self) -> bool:
        """Whether all of it is there, or there is no use in waiting any longer."""
        now = time.monotonic()
        late = now - self._arrived > GIVE_UP_SECONDS or now - self._asked_at > MOST_SECONDS
        hopeless = self._refused or self.fuse.blown or not self._thread.is_alive()
        return self._closing and (self._complete or hopeless or late)

    def close(self) -> None:
        """Bring the last words, for a bounded time, and say what is not there."""
        with self._changed:
            given_up = self.done and not self._complete
            self._ask(closing=True)
            seconds = LAST_TRY_SECONDS if given_up else GIVE_UP_SECONDS
            self._changed.wait_for(lambda: self.done, seconds)
            self._stop = True
            self._changed.notify_all()
        if self._bucket is not None:
            self._bucket.stop()
        self._say()

    def _ask(self, *, closing: bool) -> None:
        self._closing, self._complete = closing, False
        self._arrived = self._asked_at = time.monotonic()
        self._asked += 1
        self._changed.notify_all()

    def _run_all(self) -> None:
        pause = 0.0
        step = self.fuse.guard(self._step)
        while self._rest(pause) and not (self._refused or self.fuse.blown):
            if step():
                pause = LOOK_SECONDS
            else:
                longest = LAST_BACK_OFF_SECONDS if self._closing else BACK_OFF_SECONDS[1]
                pause = min(max(2 * pause, BACK_OFF_SECONDS[0]), longest)

    def _rest(self, seconds: float) -> bool:
        """Wait before the next look; False when it is over."""
        with self._changed:
            self._changed.notify_all()  # whoever waits for us to be done
            self._changed.wait_for(lambda: self._stop or self._asked != self._heard, seconds)
            self._heard = self._asked
            return not self._stop

    def _step(self) -> bool:
        """Bring what is new; whether the object store did what it was asked for."""
        # Not at the top: without a destination a daemon does without the library.
        try:
            from ddpprobe.store.remote.bucket import Bucket, BucketError  # noqa: PLC0415
        except ModuleNotFoundError as error:
            self._refused = True
            self._note(f"{error.name} is missing, {store_url.INSTALL}", again=False)
            return False
        from ddpprobe.store.remote.upload import AnotherRun, Conflict, Upload, Waiting  # noqa: PLC0415

        asked = self._asked
        self._behind_since = self._behind_since or time.monotonic()  # for as long as this takes
        try:
            if self._upload is None:
                self._bucket = Bucket(self._url)
                self._upload = Upload(self._run, self._node, self._bucket, self._advance)
            self._upload.bring()
        except AnotherRun as error:
            return self._go_beside(str(error))
        except Conflict as error:
            self._refused = True
            self._note(str(error), again=False)
        except (Waiting, BucketError) as error:
            self.failures += isinstance(error, BucketError)
            self._note(str(error), again=True)
        except OSError as error:  # the disk; a run.json that is not there yet
            self._note(f"{error.strerror or error}", again=True)
        else:
            if self._error:
                logger.info("ddpprobe: %s answers again", self._url)
            self._error = ""
        self._missing = [] if self._upload is None else self._upload.missing
        behind = bool(self._error or self._missing)
        if not behind:
            self._behind_since = None
        with self._changed:
            self._complete = self._closing and not behind and asked == self._asked
        return not self._error

    def _go_beside(self, why: str) -> bool:
        """Go to a place of our own, and say so: what lies where this run should go stays."""
        identity = identity_of(self._run)
        run_id = str(identity.get("run_id"))
        if self._url.endswith(run_id):
            self._refused = True
            self._note(why, again=False)
            return False
        url = store_url.beside(self._url, run_id)
        logger.warning("ddpprobe: %s: %s; this run goes to %s", self._url, why, url)
        paths.write_json(self._run.run_json, {**identity, "destination": url})
        self._url, self._upload = url, None
        return self._step()

    def _note(self, text: str, *, again: bool) -> None:
        if not self._error:
            kept = "what is committed stays on the disk"
            then = f"{kept} and is tried again" if again else kept
            logger.warning("ddpprobe: cannot upload to %s: %s; %s", self._url, text, then)
        self._error = text

    def _advance(self) -> None:
        self._arrived = time.monotonic()

    def _say(self) -> None:
        """Say how it ended, in the log and in a file for `ddpprobe info`."""
        state = self._run.daemon_file(self._node, paths.UPLOAD)
        damaged = sorted(self._upload.damaged) if self._upload is not None else []
        why = self._error or self.fuse.last_error
        for name in damaged[:5]:
            logger.warning("ddpprobe: %s is damaged, and missing at %s", name, self._url)
        if self._complete:
            state.unlink(missing_ok=True)
            logger.info("ddpprobe: the run is at %s", self._url)
            return
        command = f"ddpprobe daemon --dir {self._run.path}"
        missing = len(self._missing)
        logger.warning(
            "ddpprobe: the upload to %s is not complete (%s); finish it with: %s",
            self._url, why or f"{missing} groups are not there", command,
        )  # fmt: skip
        said = {"url": self._url, "groups": missing, "error": why, "finish": command}
        paths.write_json(state, said)


def identity_of(run: paths.RunDir) -> dict[str, Any]:
    """Return what run.json says; {} if there is none to be read."""
    try:
        found = safe_read.parse(run.run_json.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def destination_of(identity: Mapping[str, Any]) -> str | None:
    """Return where a run is to be uploaded to, by its run.json; None if nowhere."""
    url = identity.get("destination")
    return store_url.parse(url) if isinstance(url, str) else None


def stays_packed(identity: Mapping[str, Any]) -> bool:
    """Whether this node's captured tensors stay packs, and are uploaded as such.

    A node that shares no directory with the head would plan a captured step by itself, and call it
    what the head calls its own.
    """
    return destination_of(identity) is not None and OWN_DISK in identity
