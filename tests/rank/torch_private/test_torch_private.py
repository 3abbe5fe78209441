"""The private names mean what we take them for in the torch that is installed."""

from __future__ import annotations

import torch

from ddpprobe.rank import torch_private
from ddpprobe.rank.torch_private import anomaly, functorch, graph, modes, tcp_store


def test_every_private_name_passes_its_self_test() -> None:
    assert torch_private.self_test() == dict.fromkeys(torch_private.self_test(), True)
    assert tcp_store.self_test() == {"bounded_store": True}
    assert functorch.self_test() == {"outside_functorch": True}
    assert anomaly.self_test() == {"traceback_of": True}
    assert graph.self_test() == {
        "current_node": True, "leaves_gradients": True, "returns_gradients": True,
        "uses_of_leaves": True,
    }  # fmt: skip
    assert modes.self_test() == {"plain_mode": True}


def test_without_the_private_names_each_degrades_as_it_says(monkeypatch) -> None:
    for name in ("_graph_task_id", "_engine_queue_callback", "_default_store", "_is_functorch",
                 "_active_ddp"):  # fmt: skip
        monkeypatch.setattr(torch_private, name, None)
    assert torch_private.in_backward() is False
    assert torch_private.after_backward(lambda: None, lambda: None) is False
    assert torch_private.default_store() is None
    assert torch_private.active_ddp() is None
    assert torch_private.is_functorch(torch.ones(1)) is False
