"""What a checkpointed block computes in the backward is compared with what the forward computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.detectors.suite import default_suite
from ddpprobe.rank.hooks.recomputed import NUMBERS, OUTPUTS, Recomputation
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.step import RECOMPUTED, RECOMPUTED_AT, fqn_number

from ... import far


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.drop(self.fc(x)))


class Model(nn.Module):
    """Blocks that are computed once more in the backward, each in its own way."""

    def __init__(self, blocks: int = 2, **how: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head, self.how = nn.Linear(8, 1), how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.how) if self.how else block(x)
        return self.head(x)


FQNS = [f"blocks.{n}{of}" for n in range(2) for of in ("", ".fc", ".drop", ".act")]


def told(
    folder: Path, model: nn.Module, steps: int = 4, *,
    micros: int = 1, between: Callable[[], object] = lambda: None,
) -> list[tuple[str, float] | None]:  # fmt: skip
    """What differs most, of each sampled step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    with ddpprobe.install(model, run_dir=folder / "r", every=1, daemon="none"):
        for _ in range(steps):
            for _ in range(micros):
                loss = model(torch.randn(16, 8).requires_grad_()).square().mean()
                between()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [_most(r.scalars[0], FQNS) for r in ddpprobe.open(folder / "r").records()]


def _most(said: Mapping[str, float], fqns: Sequence[str]) -> tuple[str, float] | None:
    """The module whose output differs most, and by how much; None: nothing was compared."""
    if RECOMPUTED not in said:
        assert RECOMPUTED_AT not in said
        return None
    (fqn,) = (fqn for fqn in fqns if fqn_number(fqn) == said[RECOMPUTED_AT])
    return fqn, said[RECOMPUTED]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("micros", [1, 3])
def test_what_is_the_same_differs_by_exactly_nothing(
    tmp_path: Path, reentrant: bool, micros: int
) -> None:
    model = Model(use_reentrant=reentrant)
    first, *then = told(tmp_path, model, micros=micros)
    assert first is None  # it shows what is computed again
    assert all(most and most[1] == 0.0 for most in then)


@pytest.mark.parametrize("reentrant", [False, True])
def test_another_mask_of_dropout_differs_from_the_dropout_on(
    tmp_path: Path, reentrant: bool
) -> None:
    model = Model(use_reentrant=reentrant, preserve_rng_state=False)
    suite = default_suite()
    for most in told(tmp_path, model)[1:]:
        assert most is not None
        assert most[0].endswith((".drop", ".act"))
        assert 0.2 < most[1] < 2
    (warn,) = (a for r in ddpprobe.open(tmp_path / "r").records() for a in suite.update(r))
    assert (warn.detector, warn.level, warn.step) == ("recompute", "warn", 3)
    assert str(warn.module).endswith((".drop", ".act"))


def test_a_mode_that_is_changed_between_the_two_shows(tmp_path: Path) -> None:
    model = Model(use_reentrant=True)  # of the other kind torch itself says so
    model.register_forward_pre_hook(lambda module, _: module.train() and None)
    then = told(tmp_path, model, between=model.eval)[1:]
    assert all(most and most[1] > 0.05 for most in then)


def test_without_checkpoints_nothing_is_compared(tmp_path: Path) -> None:
    assert told(tmp_path, Model()) == [None] * 4


def test_a_module_that_is_called_twice_is_passed_over(tmp_path: Path) -> None:
    model = Model(use_reentrant=False, preserve_rng_state=False)
    model.blocks[1] = model.blocks[0]
    assert told(tmp_path, model) == [None] * 4


@pytest.fixture(params=["near", "far"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRows]:
    if request.param == "far":
        far.pretend(monkeypatch)
        with far.no_waiting():
            yield StepRows(torch.device("cpu"), 0)
    else:
        yield StepRows(torch.device("cpu"), 0)


def scalars(rows: StepRows) -> dict[str, float]:
    pending = rows.fetch()
    pending.wait()
    return dict(pending.result(0, partial=False).scalars)


def step(rows: StepRows, again: Recomputation, *outputs: tuple[int, Tensor, Tensor]) -> None:
    """One step with (slot, output in the forward, and in the backward)."""
    rows.begin()
    again.begin()
    for slot, output, _ in outputs:
        again.keep(slot, output.clone())
    for slot, _, output in reversed(outputs):
        again.compare(slot, str(slot), output)
    again.tell()


def test_outputs_take_turns_and_are_spread_over_the_model(rows: StepRows) -> None:
    again = Recomputation(rows)
    count = 5 * OUTPUTS - 3
    one, two = torch.ones(4), torch.full((4,), 2.0)
    step(rows, again, *((slot, one, one) for slot in range(count)))
    for apart in range(count):  # each is found once in five steps
        found = []
        for _ in range(5):
            step(
                rows, again, *((slot, one, two if slot == apart else one) for slot in range(count))
            )
            found.append(_most(scalars(rows), [*map(str, range(count))]))
        assert found.count((str(apart), 1.0)) == 1
        assert [most and most[1] for most in found].count(0.0) == 4
    seen = []
    for _ in range(5):
        rows.begin()
        again.begin()
        before = [slot for slot in range(count) if slot in again._chosen]
        assert {b - a for a, b in itertools.pairwise(before)} == {5}
        seen += before
    assert sorted(seen) == [*range(count)]


def test_the_one_that_differs_most_is_told(rows: StepRows) -> None:
    again = Recomputation(rows)
    ones = [torch.full((4,), float(slot + 1)) for slot in range(4)]
    step(rows, again, *((slot, one, one) for slot, one in enumerate(ones)))
    nan = torch.full((4,), math.nan)
    step(rows, again, *((slot, ones[0], other) for slot, other in enumerate([*ones[1:], nan])))
    assert _most(scalars(rows), ["0", "1", "2", "3"]) == ("2", 9.0)


@pytest.mark.parametrize(
    ("forward", "backward", "share"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]), 1 / 25),
        (torch.ones(7, 3, 2 * NUMBERS), torch.zeros(7, 3, 2 * NUMBERS), 1.0),
        (torch.full((4,), 3e38), torch.full((4,), 2e38), 1 / 9),
        (torch.ones(5).bfloat16(), torch.ones(5), 0.0),
        (torch.zeros(5), torch.zeros(5), 0.0),
        (torch.ones(5), torch.ones(6), None),
        (torch.ones(5), torch.ones(5, dtype=torch.int64), None),
        (torch.ones(5), torch.ones(5, device="meta"), None),
    ],
)
def test_the_difference_is_a_share_of_the_mean_square(
    rows: StepRows, forward: Tensor, backward: Tensor, share: float | None
) -> None:
    again = Recomputation(rows)
    again.compare(0, "a", forward)
    again.begin()
    given = forward.clone()
    again.keep(0, given)
    given.fill_(5.0)  # what is kept is a copy
    again.compare(0, "a", backward)
    again.compare(0, "a", backward)  # a second backward of the same forward
    again.tell()
    most = _most(scalars(rows), ["a"])
    assert most == (None if share is None else ("a", pytest.approx(share)))
