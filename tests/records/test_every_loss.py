"""A record tells the losses of the steps before it by names of their own."""

from __future__ import annotations

from ddpprobe.records.every_loss import losses_of, name_of
from ddpprobe.records.step import StepRecord


def test_losses_come_in_the_order_of_their_steps_with_those_of_each_rank() -> None:
    scalars = {
        0: {"loss": 1.0, "loss@-2": 3.0, "loss@-1": 2.0, "lr": 0.1},
        1: {"loss@-1": 20.0, "loss": 10.0},
    }
    record = StepRecord(0, 7, (0, 1), 0, scalars=scalars)
    assert losses_of(record) == [(5, {0: 3.0}), (6, {0: 2.0, 1: 20.0}), (7, {0: 1.0, 1: 10.0})]
    assert [name_of(n) for n in (0, 1, 12)] == ["loss", "loss@-1", "loss@-12"]


def test_names_that_are_no_losses_are_none() -> None:
    odd = ("loss@-", "loss@-x", "loss@-1.5", "loss@--1", "loss@-²", "loss@-" + "9" * 40, "lossy")
    assert losses_of(StepRecord(0, 7, (0,), 0, scalars={0: dict.fromkeys(odd, 1.0)})) == []
