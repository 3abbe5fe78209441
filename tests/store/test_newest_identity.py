"""What the newest attempt says of a run holds over what its first one wrote down."""

from __future__ import annotations

from typing import Any

import pytest

from ddpprobe.store.newest_identity import newest_identity

FIRST = {"backend": "gloo", "wrapper": "ddp", "torch": "2.9", "nodes": 1, "hostname": "a"}
META = {"rank": 0, "node": 0, "hostname": "b", "world_size": 1, "torch": "2.13"}


@pytest.mark.parametrize(
    ("said", "backend"),
    [({"backend": ""}, ""), ({"backend": "nccl"}, "nccl"), ({}, "gloo")],
)
def test_an_attempt_without_a_process_group_has_no_backend(
    said: dict[str, Any], backend: str
) -> None:
    found = {**FIRST, **newest_identity(FIRST, [META | said], ["none"])}
    assert (found["backend"], found["wrapper"], found["torch"]) == (backend, "none", "2.13")
    assert (found["hostname"], found["nodes"]) == ("b", 1)
