"""The root of the hierarchy, brought to an object store where other jobs' attempts may lie."""

from __future__ import annotations

import json
from collections.abc import Callable

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths
from ddpprobe.store.commit import encode
from ddpprobe.store.group_names import ROOT
from ddpprobe.store.manifest import (
    GROUP_JSON,
    Manifest,
    State,
    is_settled,
    manifest_path,
    read_regular,
    version_of,
)
from ddpprobe.store.remote.bucket import Bucket
from ddpprobe.store.remote.carry import carry, state_there
from ddpprobe.store.remote.remote_paths import BucketTarget
from ddpprobe.store.root import ATTEMPT, SEALED


class RootUpload:
    """Brings the root of a run: its own groups, beside those that are there already.

    Args:
        run, bucket, advance: as for `Upload`.
    """

    def __init__(self, run: paths.RunDir, bucket: Bucket, advance: Callable[[], None]) -> None:
        self._run, self._bucket, self._advance = run, bucket, advance
        self._brought: tuple[dict[str, bytes], bool] | None = None

    def document(self) -> dict[str, bytes] | None:
        """Return the files of the root; None while somebody writes it, or if it is damaged."""
        manifest = Manifest(manifest_path(self._run, ""))
        try:
            if manifest.damage or manifest.undone or not is_settled(self._run.store, manifest):
                return None
            files = {k: read_regular(self._run.store, k) for k in manifest.state.files}
        except (StoreDamaged, OSError):
            return None
        same = all(version_of(data) == manifest.state.files[k] for k, data in files.items())
        return files if same and GROUP_JSON in files else None

    def bring(self, files: dict[str, bytes], *, consolidated: bool) -> None:
        """Bring the root, consolidated only where everything that lies there is listed.

        Args:
            files: as `document` returns them.
            consolidated: all that is listed in them is there.

        Raises:
            BucketError: the object store refused, or does not answer.
            StoreDamaged: the root over there is damaged.
        """
        if self._brought == (files, consolidated):
            return
        staged = dict(files)
        target = BucketTarget(self._bucket, self._advance, lambda _, key, __: staged[key], {})
        before = state_there(target, ROOT, "")  # asked anew: another job may have been there
        matches = {k: ATTEMPT.fullmatch(k) for k in before.files.keys() - files.keys()}
        others = {k: int(match[1]) for k, match in matches.items() if match}
        document = json.loads(staged[GROUP_JSON])
        if others or not consolidated:
            document.pop("consolidated_metadata", None)
        told = document["attributes"]["ddpprobe"]
        told.pop(SEALED, None)
        told["attempts"] = sorted({*told["attempts"], *others.values()})
        staged[GROUP_JSON] = encode(document)
        kept = {k: before.files[k] for k in others}
        state = State(files=kept | {k: version_of(data) for k, data in staged.items()})
        carry(target, ROOT, "", state, before)
        self._brought = files, consolidated


def is_sealed(root: dict[str, bytes] | None) -> bool:
    """Return whether a root's metadata is consolidated, or it says so: nobody commits any more."""
    if root is None:
        return False
    document = json.loads(root[GROUP_JSON])
    return "consolidated_metadata" in document or SEALED in document["attributes"]["ddpprobe"]
