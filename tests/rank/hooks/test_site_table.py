"""The sites of a model are as many as it has, however it names what it returns."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks.site_table import MOST_LATE, OTHERS, SiteTable
from ddpprobe.records.step import Site


def test_all_leaves_of_a_first_step_have_sites_and_of_later_ones_so_many() -> None:
    table = SiteTable()
    many = 3 * MOST_LATE
    table.begin()
    first = [table.slot(Site("m", "output", f"a{i}")) for i in range(many)]
    table.begin()
    late = [table.slot(Site("m", "output", f"b{i}")) for i in range(many)]
    other = table.slot(Site("m", "grad_output", "b0"))
    assert first == list(range(many))
    assert late == [many + min(i, MOST_LATE) for i in range(many)]
    assert other == many + MOST_LATE + 1
    assert table.site(late[-1]).key == ("m", "output", OTHERS)
    assert [table.slot(table.site(slot)) for slot in first + late] == first + late


class NewNames(nn.Module):
    """Names its output anew at each call; one of these is bad."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.layer, self.calls, self.bad = nn.Linear(3, 3), 0, bad

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        y = self.layer(x)
        return {f"at_{self.calls}": y * (math.nan if self.calls == self.bad else 1.0)}


def test_a_model_that_names_its_output_anew_at_each_step_has_no_more_sites_in_the_end(
    tmp_path: Path, records_of
) -> None:
    steps = MOST_LATE + 30
    model = NewNames(bad=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for _ in range(steps):
            optimizer.zero_grad()
            (output,) = model(torch.ones(2, 3)).values()
            output.square().mean().backward()
            optimizer.step()
    records = [record for record in records_of(tmp_path / "run") if not record.partial]
    sites = [len(record.sites) for record in records]
    assert len(records) == steps
    assert sites[MOST_LATE + 1] == sites[-1] < sites[0] + 2 * MOST_LATE + 3
    bad = records[-1].first_bad
    assert bad is not None
    assert (bad.step, bad.fqn, bad.kind, bad.leaf, bad.nan) == (steps - 1, "", "output", OTHERS, 6)
