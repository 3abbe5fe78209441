"""What the root of the store repeats of run.json: all that is left of it where that is lost."""

from __future__ import annotations

from typing import Any

from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store.manifest import GROUP_JSON


def repeated_identity(run: paths.RunDir) -> dict[str, Any]:
    """Return it; {} if there is no root, or none that can be read."""
    key = f"{safe_read.STORE}/{GROUP_JSON}"
    try:
        data = safe_read.read_regular(run.path, key, safe_read.MAX_JSON_BYTES)
        return dict(safe_read.parse(data)["attributes"]["ddpprobe"])
    except (OSError, *MALFORMED):
        return {}
