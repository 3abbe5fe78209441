"""On a device that the host cannot look into: everything is seen, and nobody waits (see `far`)."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import ddpprobe
from ddpprobe.rank.backward import Backward
from ddpprobe.rank.hooks import gradients, lanes, peaks
from ddpprobe.rank.hooks.row_buffer import RowBuffer
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.watch import Watch
from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.stats.rows import WIDTH, reduce, reduce_far
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.devices import device_of
from ddpprobe.records.step import USED_NORM, FirstBad, Site
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.testing import state_hash

from ... import far
from ..capture.test_capturing import life_of
from .test_watch import nan_in, net

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHTS = tuple(
    getattr(torch, f"float8_{kind}")
    for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    if hasattr(torch, f"float8_{kind}")  # torch 2.6 lacks the last one
)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


class Clock:
    micro, lent, evaluating = 0, 0, False
    backward = Backward()
    without_grad = False


def watch_of(model: nn.Module) -> tuple[Watch, list[tuple[int, str]]]:
    seen: list[tuple[int, str]] = []

    def hear(bad: FirstBad, *_: object) -> None:
        seen.append((bad.step, bad.phase))

    found = Watch(describe(model), Clock(), 0, Fuse("hooks"), hear, hear)
    return found, seen


def bad_in(parts: list[tuple[int, list[float]]]) -> list[int]:
    return [
        phase for _, peaks in parts for phase, peak in enumerate(peaks) if not math.isfinite(peak)
    ]


def seen_of(*tensors: torch.Tensor) -> list[tuple[int, str]]:
    """What a watch says of root outputs, of which each is a step's."""
    watch, seen = watch_of(nn.Linear(1, 1))
    for step, tensor in enumerate(tensors):
        watch.output([tensor])
        watch.end_step(step)
    watch.poll(wait=True)
    return seen


# ---- every dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_number_is_seen_in_every_dtype_and_the_largest_good_one_is_good(
    dtype: torch.dtype, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    limits = torch.finfo(dtype)
    good = [limits.max, limits.min, limits.tiny, 0.0]
    bad = [math.nan, math.inf, -math.inf]
    tensors = [torch.tensor([0.0, value, 1.0], dtype=dtype) for value in (*good, *bad)]
    # The sum of squares of these, and their sum, would not be finite; they are.
    tensors.append(torch.full((70000,), limits.max, dtype=dtype))
    assert seen_of(*tensors) == [(step, "forward") for step in (4, 5, 6)]
    assert seen_of(*(t[1] for t in tensors)) == [(step, "forward") for step in (4, 5, 6)]


@pytest.mark.parametrize("dtype", EIGHTS, ids=str)
def test_a_nan_in_eight_bits_is_seen(dtype: torch.dtype, monkeypatch) -> None:
    far.pretend(monkeypatch)
    largest = torch.tensor([torch.finfo(dtype).max]).to(dtype)
    assert seen_of(largest, torch.tensor([1.0, math.nan]).to(dtype)) == [(1, "forward")]


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_gradient_of_complex_numbers_is_looked_at(dtype: torch.dtype, monkeypatch) -> None:
    far.pretend(monkeypatch)
    model = nn.Linear(1, 1)
    watch, seen = watch_of(model)
    largest = torch.finfo(dtype.to_real()).max
    for step, (real, imag) in enumerate([(largest, 1), (1, math.nan), (math.inf, 0)]):
        watch._arriving("weight", torch.tensor([complex(real, imag)], dtype=dtype))
        watch._arriving("weight", torch.tensor([1j], dtype=dtype).conj())
        watch.end_step(step)
    watch.poll(wait=True)
    assert seen == [(1, "backward"), (2, "backward")]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.6 has no such dtype")
@pytest.mark.parametrize("near", [True, False])
def test_numbers_that_nobody_can_read_end_no_observation(near: bool, monkeypatch) -> None:
    if not near:
        far.pretend(monkeypatch)
    four_bits = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert seen_of(four_bits, torch.zeros(2, device="meta"), torch.tensor(math.nan))[-1:] == [
        (2 if not near else -1, "forward")
    ]


def test_what_is_put_together_of_several_tensors_is_looked_at(monkeypatch) -> None:
    far.pretend(monkeypatch)
    twice = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(
        twice, torch.tensor([1.0, math.nan]), (3,), check_invariants=True
    )
    jagged = torch.nested.nested_tensor(
        [torch.ones(2), torch.full((3,), math.inf)], layout=torch.jagged
    )
    expanded = torch.tensor(math.nan).expand(1 << 40)
    with far.no_waiting() as mode:
        watch, seen = watch_of(nn.Linear(1, 1))
        for step, tensor in enumerate((sparse, jagged, expanded, torch.empty(0))):
            watch.output([tensor])
            watch.end_step(step)
        assert mode.seen
    watch.poll(wait=True)
    assert seen == [(step, "forward") for step in range(3)]


# ---- several devices


def test_the_peaks_of_devices_meet_on_the_host(monkeypatch) -> None:
    """`meta` stands in for a second device: what is computed there has no numbers."""
    lane = far.SlowLane(polls=1)
    sent: list[tuple[str, torch.Tensor]] = []

    def post(source: torch.Tensor, host: torch.Tensor) -> far.Arrival:
        sent.append((source.device.type, host))
        values = [1.0, math.nan, 0.0] if source.is_meta and len(sent) == 2 else [0.0, 2.0, 0.0]
        return far.Arrival(torch.tensor(values, dtype=torch.float64), host, 1)

    monkeypatch.setattr(lane, "post", post)
    monkeypatch.setattr(lanes, "lane_of", lambda _: lane)
    seen: list[tuple[int, int]] = []
    found = peaks.Peaks(lambda step, found, _: seen.extend((step, i) for i in bad_in(found)))
    for step in range(3):
        found.keep(1, torch.tensor(2.0, dtype=torch.float16))
        if step < 2:
            found.keep(0, torch.tensor(1.0, device="meta"))
        found.end_step(step, 0)
    assert [kind for kind, _ in sent] == ["cpu", "meta", "cpu", "meta", "cpu"]
    for _ in range(10):
        found.poll()
    assert seen == [(0, 1)]


def test_a_step_that_ends_with_nothing_kept_sends_nothing(monkeypatch) -> None:
    far.pretend(monkeypatch)
    found = peaks.Peaks(lambda *_: None)
    for step in range(3 * peaks.AHEAD):
        found.end_step(step, 0)
    assert found.lost == 0


def test_a_device_that_is_too_far_behind_costs_readings_and_they_are_counted(monkeypatch) -> None:
    far.pretend(monkeypatch, polls=10**9)
    seen: list[int] = []
    found = peaks.Peaks(lambda step, found, _: seen.extend([step] * bool(bad_in(found))))
    for step in range(peaks.AHEAD + 3):
        found.keep(0, torch.tensor(math.nan if step in (0, 5, peaks.AHEAD + 1) else 1.0))
        found.end_step(step, 0)
        found.poll()
    assert (seen, found.lost) == ([], 3)
    found.poll(wait=True)
    assert seen == [0, 5]  # the first of all, which is what matters, is among them
    found.keep(0, torch.tensor(1.0))
    found.end_step(99, 0)
    found.poll(wait=True)
    assert seen == [0, 5]  # a NaN that was not told does not come back under another number


# ---- rows


def test_rows_of_two_devices_are_joined_in_their_order(monkeypatch) -> None:
    """`meta` stands in for the GPU of the model: whoever looks at a number there fails."""
    gpu, lane = torch.device("meta"), far.SlowLane(polls=1)

    def send(source: torch.Tensor, host: torch.Tensor) -> far.Arrival:
        assert source.is_meta
        made = torch.arange(float(source.numel()), dtype=torch.float64).view_as(source)
        return far.Arrival(made, host, 1)

    monkeypatch.setattr(lane, "send", send)
    monkeypatch.setattr(lanes, "lane_of", lambda _: lane)
    rows = StepRows(gpu, 0)
    slot = rows.table.slot(Site("buffer", "output", "", "local", True, "float32"))
    word = torch.tensor([-1], dtype=torch.int64)  # as a float64 it is a NaN
    for step in range(2):
        rows.begin()
        rows.add_scalar("loss", torch.empty((), device=gpu))
        rows.add(slot, 0, torch.tensor([1.0, math.nan]))  # a buffer that stayed on the CPU
        rows.add_scalar("told", 0.5)
        rows.add(slot, 0, torch.empty(3, device=gpu))  # has no numbers: no row
        rows.add_checksum("weight", "", word)
        rows.add_scalar("late", torch.empty((), device=gpu))
        assert rows.bad
        assert not rows.are_finite()
        pending = rows.fetch()
        assert not pending.ready()
        assert pending.ready()
        result = pending.result(step, partial=True)
        assert result.scalars == {"loss": 0.0, "told": 0.5, "late": 4.0 * WIDTH}
        assert result.counts[0][:2].tolist() == [2, 1]
        assert result.unsupported == {"a meta tensor has no values": 1}
        want = torch.zeros((), dtype=torch.int64)
        checksum(word, want)
        assert result.digests == {("weight", ""): {int(want): 1}}


def test_a_buffer_grows_on_the_device_that_needs_it(monkeypatch) -> None:
    monkeypatch.setattr(lanes, "lane_of", lambda _: far.SlowLane(polls=0))
    rows = StepRows(torch.device("meta"), 0)
    slot = rows.table.slot(Site("b", "output", "", "local", True, "float32"))
    rows.begin()
    for i in range(3000):
        rows.add(slot, i, torch.tensor([float(i)]))
    result = rows.fetch().result(0, partial=True)
    assert result.counts[0][0] == 3000
    assert result.values[0][1] == 2999


def test_an_earlier_step_leaves_nothing_where_a_row_is_elsewhere(monkeypatch) -> None:
    rows = StepRows(torch.device("cpu"), 0)
    slot = rows.table.slot(Site("b", "output", "", "local", True, "float32"))
    rows.begin()
    rows.add(slot, 0, torch.tensor([math.nan]))
    rows.begin()
    monkeypatch.setattr(lanes, "is_near", lambda _: False)
    monkeypatch.setattr(lanes, "lane_of", lambda _: far.SlowLane())
    rows._note(slot, 0, RowBuffer(torch.device("meta")))
    assert rows.are_finite()
    assert not rows.bad_from(0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("dense", [(), (3,)])
def test_the_row_of_a_sparse_gradient_is_that_of_its_sums(
    dtype: torch.dtype, dense: tuple[int, ...]
) -> None:
    torch.manual_seed(4)
    indices = torch.randint(0, 5, (2, 40))
    for kind in ("plain", "bad", "positive", "none"):
        values = torch.randint(-3, 4, (40, *dense)).to(dtype)
        if kind == "positive":
            values = values * 0 + 2
        if kind == "bad" and dtype.is_floating_point:
            values.view(-1)[3], values.view(-1)[9] = math.nan, math.inf
        given = (indices, values) if kind != "none" else (indices[:, :0], values[:0])
        tensor = torch.sparse_coo_tensor(*given, (5, 5, *dense), check_invariants=True)
        want, got = torch.empty(WIDTH).double(), torch.empty(WIDTH).double()
        reduce(tensor.coalesce(), want)
        with far.no_waiting():
            reduce_far(tensor, got)
        assert got.tolist() == pytest.approx(want.tolist(), rel=1e-6)


def test_a_sparse_tensor_without_sparse_dimensions_has_a_row() -> None:
    tensor = torch.sparse_coo_tensor(
        torch.empty(0, 3, dtype=torch.int64), torch.ones(3, 2), (2,), check_invariants=True
    )
    got = torch.empty(WIDTH).double()
    reduce_far(tensor, got)
    assert got.tolist() == [2, 0, 0, 0, 0, 3, 3, 6, 18]


# ---- where a model computes


class Net(nn.Module):
    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def test_a_model_computes_on_the_first_device_that_is_none_to_wait_on() -> None:
    cpu, meta = torch.empty(2), torch.empty(2, device="meta")
    with FakeTensorMode():
        gpus = [torch.empty(2, device=f"cuda:{i}") for i in (1, 0)]
    assert describe(Net(cpu)).device == torch.device("cpu")
    assert describe(Net(meta, cpu)).device == torch.device("cpu")
    spread = Net(meta, cpu, *gpus)
    assert device_of(spread, spread) == torch.device("cuda", 1)


def test_fsdp1_that_offloads_computes_where_it_says() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(
            nn.Linear(2, 2),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
        )
        assert wrapped.compute_device == torch.device("cpu")  # the name is still there
        assert describe(wrapped).device == torch.device("cpu")
        wrapped.compute_device = torch.device("cuda", 3)
        assert describe(wrapped).device == torch.device("cuda", 3)
    finally:
        dist.destroy_process_group()


def test_a_norm_over_devices_is_taken_where_nobody_waits() -> None:
    model = Net(torch.tensor([3.0]), torch.tensor([1e100], dtype=torch.float64))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norms, rows = gradients.UsedNorms(), StepRows(torch.device("cpu"), 0)
    norms.begin_step()
    norms.add(torch.optim.SGD(model.parameters(), lr=0.1), describe(model), None)
    norms.tell(rows)
    told = rows.fetch().result(0, partial=False).scalars
    assert told == {USED_NORM: 1e100}  # no infinity by way of float32
    norm = gradients.together([torch.tensor(3.0), torch.empty((), device="meta")])
    assert norm.is_meta
    scale = torch.tensor(2.0)
    assert gradients.divided(norm, scale).is_meta
    assert gradients.divided(scale, norm).is_meta
    assert gradients.divided(scale, scale) == 1


# ---- a run


def train(
    model: nn.Module, run, steps: int, step, every: int = 100, **options
) -> torch.optim.Optimizer:
    """Train with `step(i) -> loss`, in which nothing may wait for a far device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = ddpprobe.install(model, run_dir=run, every=every, daemon="none", **options)
    near = lanes.is_near(torch.device("cpu"))
    with contextlib.nullcontext() if near else far.no_waiting() as mode:
        for i in range(steps):
            step(i).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert near or mode.seen
    probe.close()
    return optimizer


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_step_of_a_model_of_any_dtype_is_named(
    dtype: torch.dtype, tmp_path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    model = net().to(dtype)

    def step(i: int) -> torch.Tensor:
        loss = model(torch.ones(2, 4, dtype=dtype)).sum()
        return loss + nan_in(model[1].weight) if i == 3 else loss

    train(model, tmp_path / "r", 4, step, first_step=1)
    seen = [(r.step, r.first_bad.phase) for r in records_of(tmp_path / "r") if r.first_bad]
    assert seen == [(4, "backward")]
    assert not [e for e in life_of(tmp_path / "r") if e["event"] in ("fuse", "dropped")]


def test_gradients_of_a_step_that_a_scaler_skipped_are_no_page_on_a_device_either(
    tmp_path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=100, first_step=1, daemon="none"):
        for _ in range(8):
            scaler.scale(model(torch.full((2, 4), 1e3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    bad = [r for r in records_of(tmp_path / "r") if r.first_bad]
    assert scaler.get_scale() < 2.0**127
    assert bad
    assert all(r.skipped and r.first_bad.phase == "backward" for r in bad)
    told = ddpprobe.open(tmp_path / "r").anomalies()
    assert {a.level for a in told if a.detector == "nonfinite"} == {"info"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_the_micro_batch_of_a_bad_step_that_is_not_sampled_is_known(
    micro: int, phase: str, tmp_path, records_of, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=100, first_step=1, daemon="none"):
        for step in range(5):
            for number in range(3):
                due = (step, number) == (3, micro)
                loss = model(torch.full((2, 4), math.nan if due and phase == "forward" else 1.0))
                loss = loss.sum() + (nan_in(model[1].weight) if due and phase == "backward" else 0)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    bad = [r.first_bad for r in records_of(tmp_path / "r") if r.first_bad]
    assert [(b.step, b.micro, b.phase) for b in bad[:1]] == [(4, micro, phase)]


class Masked(nn.Module):
    """Returns logits, some of which are masked from a step on, as they are meant to be."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.head, self.since, self.step = nn.Linear(4, 4), since, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        mask = torch.zeros(4)
        mask[3] = -math.inf if self.step >= self.since else 0.0
        return logits + mask


@pytest.mark.parametrize("since", [0, 3])
def test_an_infinity_of_the_output_that_does_no_harm_is_told_as_on_the_host(
    since: int, tmp_path, records_of, monkeypatch
) -> None:
    def told(run: str) -> list[tuple[int, int, str]]:
        torch.manual_seed(0)
        model = Masked(since)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with ddpprobe.install(
            model, run_dir=tmp_path / run, every=100, first_step=1, daemon="none"
        ):
            for model.step in range(8):
                for _ in range(2):
                    model(torch.ones(2, 4)).softmax(-1)[:, 0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        bad = [r.first_bad for r in records_of(tmp_path / run) if r.first_bad and not r.partial]
        return [(b.step, b.micro, b.phase) for b in bad]

    near = told("near")
    far.pretend(monkeypatch)
    assert told("far") == near
    assert [step for step, _, _ in near] == ([4] if since else [])


class Between(nn.Module):
    """Its own code stands between two layers; the third is given what the second returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.bad = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x) * (math.nan if self.bad == "between" else 2.0))
        if self.bad == "c":
            self.c.bias.data.fill_(math.nan)
        return self.c(x).sum()


@pytest.mark.parametrize(
    ("bad", "named", "unread"), [("data", "a", True), ("between", "b", True), ("c", "c", False)]
)
def test_where_the_input_of_a_module_is_not_read_it_may_have_been_given_so(
    bad: str, named: str, unread: bool, tmp_path, monkeypatch
) -> None:
    far.pretend(monkeypatch)
    model = Between()

    def step(i: int) -> torch.Tensor:
        model.bad = bad if i == 1 else ""
        return model(torch.full((2, 4), math.nan if i == 1 and bad == "data" else 1.0))

    train(model, tmp_path / "r", 2, step, every=1)
    (page,) = (a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.detector == "nonfinite")
    assert (page.step, page.module, page.kind) == (1, named, "output")
    assert ("or it was given so, by the data or by code between" in page.message) is unread


def test_steps_the_watch_could_not_tell_of_are_told(tmp_path, monkeypatch) -> None:
    far.pretend(monkeypatch, polls=10**9)
    monkeypatch.setattr(peaks, "AHEAD", 3)
    model = net()
    train(model, tmp_path / "r", 8, lambda _: model(torch.ones(2, 4)).sum(), first_step=1)
    told = [e for e in life_of(tmp_path / "r") if e["event"] == "dropped"]
    assert {e["reason"] for e in told} == {"watch: the device is too far behind"}
    assert sum(e["count"] for e in told) == 5


class Words(nn.Module):
    """Sparse and dense gradients, a change in place, a structured output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.up, self.act, self.norm = nn.Linear(4, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.act(self.up(self.table(x))))).square().mean()


def words(run, **options) -> str:
    torch.manual_seed(5)
    model = Words()
    data = [torch.randint(0, 7, (9,)) for _ in range(6)]
    return state_hash(model, train(model, run, 6, lambda i: model(data[i]), every=2, **options))


def test_a_sampled_step_tells_the_same_and_nobody_waits(tmp_path, records_of, monkeypatch) -> None:
    near = words(tmp_path / "near")
    with monkeypatch.context() as patch:
        far.pretend(patch)
        assert words(tmp_path / "far") == near
    both = [[r for r in records_of(tmp_path / run) if r.sampled] for run in ("near", "far")]
    assert [[r.step for r in records] for records in both] == [[0, 2, 4]] * 2
    for a, b in zip(*both, strict=True):
        assert a.sites == b.sites
        # Whether a buffer is a mask is not known on the host before the first look has come.
        same = [i for i, site in enumerate(a.sites) if a.step or site.kind != "buffer"]
        assert a.counts[same].tolist() == b.counts[same].tolist()
        assert b.values[same] == pytest.approx(a.values[same], rel=1e-6, abs=1e-9)
        names = {"loss", "grad_norm", "grad_norm_local"}
        assert {n: b.scalars[0][n] for n in names} == pytest.approx(
            {n: a.scalars[0][n] for n in names}, rel=1e-6
        )


def test_what_a_sampled_step_has_read_the_watch_does_not_read_again(tmp_path, monkeypatch) -> None:
    far.pretend(monkeypatch)
    kept: dict[int, list[int]] = {}
    original = peaks.Peaks.keep

    def keep(self: peaks.Peaks, phase: int, peak: torch.Tensor) -> None:
        kept.setdefault(now[0], []).append(phase)
        original(self, phase, peak)

    monkeypatch.setattr(peaks.Peaks, "keep", keep)
    model, now = net(), [0]

    def step(i: int) -> torch.Tensor:
        now[0] = i
        return model(torch.ones(2, 4)).sum()

    train(model, tmp_path / "all", 4, step, every=2)
    assert kept[1] == kept[3] == [0, 1]  # the output, all gradients together
    assert kept[2] == [0]
    kept.clear()
    model = net()
    train(model, tmp_path / "some", 4, step, every=2, exclude=["2"])
    assert kept[2] == [0, 1]  # no row tells of the last one's


def test_a_rehearsal_without_any_numbers_is_no_failure(tmp_path, records_of) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path, every=2, daemon="none"):
        for _ in range(4):
            model(torch.ones(2, 4, device="meta")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [r.step for r in records_of(tmp_path) if r.sampled] == [0, 2]
    assert not [e for e in life_of(tmp_path) if e["event"] in ("fuse", "dropped")]


def test_an_operator_that_waits_is_caught_here() -> None:
    """What the tests above stand on."""
    tensor = torch.ones(3)
    twice = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(twice, torch.ones(2), (3,), check_invariants=True)
    waiting = [
        tensor.sum().item, lambda: bool(tensor.any()), tensor.nonzero, sparse.coalesce,
        lambda: tensor[tensor > 0], lambda: torch.equal(tensor, tensor), tensor.unique,
    ]  # fmt: skip
    with far.no_waiting():
        for act in waiting:
            with pytest.raises(far.Waited):
                act()
