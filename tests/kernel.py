"""What the kernel that a test runs on can do."""

from __future__ import annotations

import os

_VERSION = tuple(int(number) for number in os.uname().release.split(".")[:2])

# A pidfd says how a process ended that was reaped.
TELLS_THE_REAPED = _VERSION >= (6, 15)
