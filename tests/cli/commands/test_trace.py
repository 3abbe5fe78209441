"""Numbers over the steps: loss and gradient norm, and why a site has none."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.records.step import OBSERVED, Site
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.writer import StoreWriter

from ...made_runs import NODE, Made, record

Call = Callable[..., tuple[int, str, str]]
NAN = float("nan")


def cells(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks, of which the second has a loss that is not finite from step 2 on."""
    made = Made(tmp_path / "run")
    for step in range(4):
        for rank in range(2):
            loss = NAN if rank and step >= 2 else 0.5
            said = {"loss": loss, "grad_norm_local": 1.0 + step, "data_seconds": 0.25}
            if (rank, step) == (0, 3):
                del said["loss"]
            made.write([record(rank, step, scalars={rank: said})])
    return made.close().path


def test_without_a_site_it_shows_the_loss_and_the_gradient_norm(call: Call, run: Path) -> None:
    code, out, err = call("trace", run, "--steps", "1:4")
    assert (code, err) == (0, "")
    assert cells(out) == [
        ["attempt", "step", "rank", "loss", "grad_norm_local"],
        ["0", "1", "0", "0.5", "2"],
        ["0", "1", "1", "0.5", "2"],
        ["0", "2", "0", "0.5", "3"],
        ["0", "2", "1", "nan", "3"],
        ["0", "3", "0", "-", "4"],
        ["0", "3", "1", "nan", "4"],
    ]


def test_a_glob_chooses_scalars_and_a_rank(call: Call, run: Path) -> None:
    out = call("trace", run, "--scalar", "*_seconds", "--rank", 1, "--steps", 0)[1]
    assert cells(out) == [["attempt", "step", "rank", "data_seconds"], ["0", "0", "1", "0.25"]]


def test_an_option_that_is_given_again_asks_for_more(call: Call, run: Path) -> None:
    words = ("--scalar", "data_seconds", "--scalar", "loss", "--rank", 1, "--steps", 0)
    code, out, err = call("trace", run, *words)
    assert (code, err, cells(out)[0][3:]) == (0, "", ["data_seconds", "loss"])
    sites = ("blocks.0.mlp:output", "blocks.1.mlp:output")
    words = [word for site in sites for word in ("--site", site)]
    told = json.loads(call("trace", run, *words, "--json")[1])
    assert [each["site"] for each in told["series"]] == [*sites]


def test_of_several_globs_one_that_matches_nothing_is_named(call: Call, run: Path) -> None:
    for option, there, kind in (("--scalar", "loss", "scalar"), ("--site", "*:output", "site")):
        code, out, err = call("trace", run, option, there, option, "nope")
        assert (code, out) == (2, "")
        assert err.startswith(f"ddpprobe: no {kind} matches 'nope'")
    code, _, err = call("trace", run, "--derived", "--derived", "nope")
    assert code == 2
    assert err.startswith("ddpprobe: no derived number 'nope'")


def test_as_json_what_was_not_given_is_told_from_what_is_not_finite(call: Call, run: Path) -> None:
    code, out, _ = call("trace", run, "--scalar", "loss", "--json")
    (loss,) = json.loads(out)["scalars"]
    assert (code, loss["name"], loss["ranks"], loss["steps"]) == (0, "loss", [0, 1], [0, 1, 2, 3])
    assert loss["values"][2:] == [[0.5, None], [None, None]]
    assert loss["given"][2:] == [[True, True], [False, True]]


def test_what_is_not_finite_stands_beside_every_statistic_once(call: Call, tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.write([record(0, 0)])
    path = made.close().path
    for stat, last in (("rms", ["rms", "nonfinite"]), ("nonfinite", ["nonfinite"])):
        lines = cells(call("trace", path, "--site", "*", "--stat", stat)[1])
        assert lines[0] == ["attempt", "step", "site", *last]
        assert len(lines[1]) == len(lines[0])


def test_a_plot_says_what_it_cannot_draw(call: Call, run: Path) -> None:
    code, out, err = call("trace", run, "--scalar", "loss", "--plot")
    assert code == 0
    assert "loss rank 0" in out
    assert "loss of rank 1 is not finite at 2 steps, the first of them 2" in err


def test_the_names_of_curves_stand_below_the_plot_and_hide_none_of_it(
    call: Call, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    lines = call("trace", run, "--scalar", "*", "--plot")[1].splitlines()
    assert (len(lines), max(map(len, lines))) == (22, 60)
    bottom = next(i for i, line in enumerate(lines) if line.strip().startswith("└"))
    assert not any("rank" in line for line in lines[: bottom + 1])
    below = [line for line in lines[bottom:] if "▚" in line]
    names = [name.strip() for line in below for name in line.split("▚")[1:]]
    of_all = ("data_seconds", "grad_norm_local", "loss")
    assert names == [f"{name} rank {rank}" for name in of_all for rank in (0, 1)]


def test_every_curve_has_a_colour_of_its_own_and_so_has_its_name(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path / "run", ranks=8)
    made.write(
        record(r, step, scalars={r: {"loss": float(r)}}) for r in range(8) for step in (0, 1)
    )
    path = made.close().path
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = call("trace", path, "--plot")[1]
    shades = re.findall(r"\x1b\[38;5;(\d+)m▚\x1b\[0m loss rank \d", out)
    assert len(set(shades)) == 8
    plot = out.partition("▚\x1b[0m loss")[0]
    assert all(f"\x1b[38;5;{shade}m\x1b[48;5;15m" in plot for shade in shades)


def test_a_run_without_loss_says_what_it_has(call: Call, tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.write([record(0, 0, scalars={0: {"micro_batches": 1.0}})])
    code, out, err = call("trace", made.close().path)
    assert (code, out) == (2, "")
    assert "no loss and no gradient norm; --scalar takes one of micro_batches" in err


@pytest.mark.parametrize(
    ("site", "printed"),
    [
        ("rnn[0]:output", ["rnn[0]:output"]),  # as a glob it would be `rnn0:output`
        ("rnn:output[1]", ["rnn[1]:output"]),  # as captured tensors are named
        ("rnn.weight[exp_avg_sq]:optim_state", ["rnn.weight[exp_avg_sq]:optim_state"]),
        ("rnn:output", ["rnn[0]:output", "rnn[1]:output"]),
        ("(root)[0]:output", ["(root)[0]:output"]),
        ("(root):output[0]", ["(root)[0]:output"]),
    ],
)
def test_a_site_is_found_by_the_name_that_is_printed(
    call: Call, tmp_path: Path, site: str, printed: list[str]
) -> None:
    known = (
        Site("rnn", "output", "0"), Site("rnn", "output", "1"), Site("", "output", "0"),
        Site("rnn.weight", "optim_state", "exp_avg_sq"),
    )  # fmt: skip
    made = Made(tmp_path / "run", ranks=1)
    made.write([record(0, 0, len(known), sites=known)])
    code, out, err = call("trace", made.close().path, "--site", site)
    assert (code, err) == (0, "")
    assert [row[2] for row in cells(out)[1:]] == printed


def test_a_leaf_that_is_not_there_is_not_said_to_be_a_missing_kind(
    call: Call, tmp_path: Path
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.write([record(0, 0, 1, sites=(Site("rnn", "output", "0"),))])
    path = made.close().path
    for site in ("rnn[7]:output", "rnn:output[7]"):
        err = call("trace", path, "--site", site)[2]
        assert f"no site matches {site!r}; nearest: rnn[0]:output" in err


# ---- why there is no number


def silent(path: Path, first: dict[str, Any], **said: Any) -> Path:
    """A run of one rank that wrote so of itself, and then of what it watches."""
    made = Made(path, ranks=1)
    identity = made._meta
    made._meta = lambda rank: {**identity(rank), **first}  # type: ignore[method-assign]
    made.write(record(0, step) for step in range(2))
    made.writer(0).append_json(framing.LIFE, {"expected": 9, "observed": 3, **said})
    return made.close().path


@pytest.mark.parametrize(
    ("first", "said", "site", "answer"),
    [
        ({}, {"event": "sites", "silent": ["blocks.7.adapter"]}, "blocks.7.adapter",
         "never called on a sampled step: blocks.7.adapter"),
        ({}, {"event": "sites", "silent": ["blocks.7.adapter"]}, "blocks.7.adapter.weight:grad",
         "never called on a sampled step: blocks.7.adapter"),
        ({}, {"event": "blind", "modules": ["head"]}, "head:output",
         "hidden by torch.compile, which ran it without its hooks: head"),
        ({"exclude": ["blocks.9.*"]}, {"event": "sites"}, "blocks.9.mlp",
         "left out by install(exclude=['blocks.9.*'])"),
        ({"exclude": ["head"]}, {"event": "sites"}, "head.weight:grad",
         "left out by install(exclude=['head'])"),
        ({"include": ["blocks.*"]}, {"event": "sites"}, "head",
         "not chosen by install(include=['blocks.*'])"),
        ({}, {"event": "sites", "unsupported": {"qint8": 2}}, "head",
         "of kinds that are not supported the run has qint8"),
        ({}, {"event": "sites"}, "blocks.1.mlp:grad", "blocks.1.mlp has no grad, but output"),
    ],
)  # fmt: skip
def test_it_says_why_a_site_is_not_there_as_far_as_the_run_knows(
    call: Call, tmp_path: Path, first, said, site: str, answer: str
) -> None:
    code, out, err = call("trace", silent(tmp_path / "run", first, **said), "--site", site)
    assert (code, out) == (2, "")
    assert f"no site matches {site!r}; {answer}; nearest: blocks." in err


@pytest.mark.parametrize("first", [{}, {"include": ["*"], "exclude": []}, {"exclude": 7}])
def test_where_the_run_knows_no_reason_it_gives_none(
    call: Call, tmp_path: Path, first: dict[str, Any]
) -> None:
    path = silent(tmp_path / "run", first, event="sites", silent=["head"])
    err = call("trace", path, "--site", "blocks.7.mlp")[2]
    assert "no site matches 'blocks.7.mlp'; nearest: blocks." in err


def test_steps_without_a_sample_name_those_next_to_them(call: Call, tmp_path: Path) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.write(record(0, step) for step in (0, 10, 20, 30))
    code, _, err = call("trace", made.close().path, "--site", "*", "--steps", "12:18")
    assert code == 2
    assert "no sampled step in --steps; they reach from 0 to 30; nearest: 10 and 20" in err


def test_a_site_without_any_number_says_why(call: Call, tmp_path: Path) -> None:
    sites = tuple(Site(name, "output") for name in ("idle", "lost", "bad", "fine"))
    made = Made(tmp_path / "run", ranks=1)
    for step in range(2):
        full = record(0, step, 4)
        counts, values = full.counts.copy(), full.values.copy()
        counts[0] = 0
        counts[1] = 0
        counts[1, OBSERVED - 1] = 3  # tapped
        counts[2] = 0
        counts[2, 0] = counts[2, 1] = 8  # elements, all of them NaN
        counts[2, OBSERVED - 1] = counts[2, OBSERVED] = 1
        values[2] = [np.inf, -np.inf, 0.0, 0.0]
        made.write([replace(full, sites=sites, counts=counts, values=values)])
    code, out, err = call("trace", made.close().path, "--site", "*")
    assert code == 0
    assert len(cells(out)) == 1 + 2 * len(sites)
    why = [line.removeprefix("ddpprobe: no data of ") for line in err.splitlines()]
    assert why[0].startswith("idle:output: its module was not called at these steps")
    assert why[1].startswith("lost:output: its module was called, and no tensor arrived")
    assert why[2].startswith("bad:output: no element was finite (16 were not)")
    assert len(why) == 3


@pytest.mark.parametrize(
    ("kind", "why"),
    [("output", "its module was not called"), ("grad", "it had no gradient"),
     ("update", "it had no turn"), ("optim_state", "no optimizer held it")],
)  # fmt: skip
def test_of_a_weight_without_any_number_no_call_is_said(
    call: Call, tmp_path: Path, kind: str, why: str
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    full = record(0, 0, 1)
    sites, none = (Site("a", kind),), np.zeros_like(full.counts)
    made.write([replace(full, sites=sites, counts=none)])
    _, _, err = call("trace", made.close().path, "--site", "*")
    assert err.startswith(f"ddpprobe: no data of a:{kind}: {why}")


@pytest.mark.parametrize(
    ("terminal", "no_colour", "coloured"),
    [(True, "", True), (True, "1", False), (False, "", False), (True, None, True)],
)
def test_a_plot_is_coloured_on_a_terminal_that_wants_it(
    call: Call, run: Path, monkeypatch: pytest.MonkeyPatch, terminal, no_colour, coloured
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if no_colour is not None:
        monkeypatch.setenv("NO_COLOR", no_colour)
    assert ("\x1b[" in call("trace", run, "--plot")[1]) == coloured


def test_a_real_run_says_what_it_left_out_and_what_was_never_called(
    call: Call, tmp_path: Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body, self.spare = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    path = tmp_path / "run"
    with ddpprobe.install(model, run_dir=path, every=1, exclude=["body*"], daemon="none") as probe:
        for _ in range(3):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            probe.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    answers = {
        "body": "left out by install(exclude=['body*'])",
        "body.weight:grad": "left out by install(exclude=['body*'])",
        "spare:output": "never called on a sampled step: spare",
        "haed": "nearest: head",
    }
    for site, answer in answers.items():
        assert answer in call("trace", path, "--site", site)[2]
    head, *rows = cells(call("trace", path)[1])
    norms = ["grad_norm", "grad_norm_used", "grad_norm_local"]
    assert head == ["attempt", "step", "rank", "loss", *norms]
    assert [row[:3] for row in rows] == [["0", str(step), "0"] for step in range(3)]
    assert all(float(cell) for row in rows for cell in row[3:])


def test_growth_and_balance_of_a_real_run_are_those_of_its_tensors(
    call: Call, tmp_path: Path
) -> None:
    class Block(nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.fc, self.gain = nn.Linear(4, 4), gain

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * (x + 0.1 * self.fc(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(gain) for gain in (1.0, 3.0, 3.0))
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, loads: tuple[int, int, int]) -> Tensor:
            self.seen = []
            for block in self.blocks:
                x = block(x)
                self.seen.append(x.detach())
            parts = zip(self.experts, x.split(loads), strict=True)
            return torch.cat([expert(part) for expert, part in parts if len(part)])

    model, path = Model(), tmp_path / "run"
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    expected = []
    with ddpprobe.install(model, run_dir=path, every=1, daemon="none"):
        for loads in ((2, 2, 2), (4, 2, 0)):
            model(torch.randn(6, 4), loads).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            first, *_, last = (float(seen.square().mean().sqrt()) for seen in model.seen)
            expected.append([np.log(last / first) / 2, max(loads) / 2 - 1, loads.count(0) / 3])
    names = "output_growth", "expert_violation", "expert_idle"
    told = json.loads(call("trace", path, "--derived", "--json")[1])["derived"]
    by_name = {each["name"]: each["values"] for each in told}
    assert "grad_noise" not in by_name  # of one rank
    np.testing.assert_allclose([by_name[name] for name in names], np.transpose(expected), 1e-5)
    for dataset in (ddpprobe.open(path).to_xarray(), ddpprobe.open(path).to_xarray(chunks={})):
        assert "derived" in dataset.data_vars
        for name, values in by_name.items():
            assert dataset["derived"].sel(quantity=name).values.tolist() == values
        assert np.isnan(dataset["derived"].sel(quantity="grad_noise")).all()
    head, *rows = cells(call("trace", path, "--derived", "expert_*", "--steps", 1)[1])
    assert head == ["attempt", "step", "expert_violation", "expert_concentration", "expert_idle"]
    assert rows[0][:3] == ["0", "1", "1"]


def test_a_derived_number_that_no_step_holds_says_what_it_needs(call: Call, run: Path) -> None:
    code, _, err = call("trace", run, "--derived")
    assert (code, "the noise scale needs two ranks or more" in err) == (2, True)
    assert "choose one of grad_noise" in call("trace", run, "--derived", "grad_nosie")[2]
    assert "leave --rank away" in call("trace", run, "--derived", "--rank", 0)[2]


def test_a_derived_number_of_other_steps_names_those_next_to_them(
    call: Call, tmp_path: Path
) -> None:
    names = [name for n in range(3) for name in (f"blocks.{n}", f"blocks.{n}.mlp")]
    sites = tuple(Site(name, "output", dtype="float32") for name in names)
    made = Made(tmp_path / "run")
    made.write(record(r, step, 6, sites=sites) for step in (0, 10, 20) for r in range(2))
    path, name = made.close().path, "output_growth"
    assert ddpprobe.open(path).derived(name)[0].steps.tolist() == [0, 10, 20]
    code, _, err = call("trace", path, "--derived", name, "--steps", "11:20")
    assert (code, err.count("\n")) == (2, 1)
    assert f"no step in --steps holds what {name!r} needs; those that do reach from 0 to 20" in err
    assert "nearest: 10 and 20" in err


@pytest.mark.parametrize("steps", ["9223372036854775808:", f":{10**30}", f"{10**30}"])
def test_steps_beyond_any_number_of_a_step_are_no_error_of_the_program(
    call: Call, run: Path, steps: str
) -> None:
    wanted = ("--site", "blocks.1.mlp:output", "--steps", steps)
    code, out, err = call("trace", run, *wanted)
    if steps.startswith(":"):
        assert (code, len(cells(out))) == (0, 5)
    else:
        assert (code, "they reach from 0 to 3; nearest: 3" in err) == (2, True)
    folder = StoreWriter(RunDir(run), NODE, durable=False)
    folder.fold()
    folder.close()
    assert call("trace", run, *wanted)[:2] == (code, out)
