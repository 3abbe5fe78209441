"""What retention took away."""

from __future__ import annotations

from ddpprobe import layout
from ddpprobe.replay.overlay import Overlay
from ddpprobe.store.capture_event import captures_key
from ddpprobe.store.captures import expired_steps
from ddpprobe.store.format import attempt_key
from ddpprobe.store.manifest import Lost, StoreError

WHY = "expired (max_bytes, max_age)"


def expired_in(overlay: Overlay) -> list[Lost]:
    """Return the spans of steps whose records or captures are gone, by group."""
    found = []
    for attempt in overlay.attempts():
        for name in overlay.groups(attempt):
            group = overlay.group(attempt, name) if _has_steps(name) else None
            where = f"run.zarr/{attempt_key(attempt)}/{name}"
            found += [Lost(where, span, WHY) for span in (group.expired() if group else ())]
        found += [
            Lost(f"run.zarr/{captures_key(attempt)}", (step, step), WHY)
            for step in _captures(overlay.run, attempt)
        ]
    return found


def _captures(run: layout.RunDir, attempt: int) -> list[int]:
    try:
        return sorted(expired_steps(run, attempt))
    except StoreError:
        return []  # `verify` says what is wrong with it


def _has_steps(name: str) -> bool:
    return name == "merged" or name.startswith("rank_")
