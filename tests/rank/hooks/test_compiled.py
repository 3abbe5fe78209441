"""Compiled models are observed like eager ones, with two graphs and no break, or it is said."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.rank.hooks import compiled as compiled_hooks
from ddpprobe.rank.hooks import copy_safe_hook, root
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.record_op import keep_out_of_cuda_graphs
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.records.step import IN_TURN, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir
from ddpprobe.testing import state_hash

pytestmark = [
    # What torch's compiler imports is deprecated by torch itself.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not dynamo.SPEAKING, reason="its graphs are without us: test_graphs_without_us"
    ),
]

BLOCKS = 9  # one more than torch's recompile limit
Sites = dict[tuple[int, str, str, str], tuple[list[int], list[float]]]
Wrap = Callable[[nn.Module, object], Callable[..., object]]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(width, 12),
            nn.ReLU(inplace=True),
            nn.Linear(12, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).square().mean()


def whole(model: nn.Module, backend: object) -> Callable[..., object]:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: object) -> Callable[..., object]:
    model.compile(backend=backend, fullgraph=True)
    return model


def blocks_in_place(model: nn.Module, backend: object) -> Callable[..., object]:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(model: nn.Module, backend: object) -> Callable[..., object]:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def function(model: nn.Module, backend: object) -> Callable[..., object]:
    def called(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return torch.compile(called, backend=backend, fullgraph=True)


def eager(model: nn.Module, backend: object) -> Callable[..., object]:
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))


def simple_loop(model: nn.Module, wrap: Callable[[], Callable[..., object]], steps: int = 8) -> str:
    call, optimizer = wrap(), adam(model)
    for step in range(steps):
        call(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_hash(model, optimizer)


# Runs a graph as it is, without autograd's half of the compiler, which takes as long as Dynamo: for
# claims about when Dynamo compiles, and what it puts into its graphs.
AS_TRACED = "eager"


class Counter:
    """A backend that counts graphs, and reads them."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs: list[str] = []
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        # With those in it, of what is checkpointed; Python of them would take three times as long.
        inner = (m.graph for m in graph.modules() if isinstance(m, torch.fx.GraphModule))
        self.graphs.append("\n".join(map(str, inner)))
        return self._backend(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def read(path: Path) -> tuple[list[StepRecord], list[dict[str, object]]]:
    tail = JournalTail(RunDir(path).rank_journal(0, "node_0000", 0))
    frames = list(tail.poll())
    records = [
        framing.decode_record(f.payload, tail.tables) for f in frames if f.type == framing.RECORD
    ]
    return records, [json.loads(f.payload) for f in frames if f.type == framing.LIFE]


def sites(records: list[StepRecord]) -> Sites:
    """All rows but those of weights: Adam makes much of what a graph rounds otherwise."""
    return {
        (record.step, *site.key): (record.counts[i].tolist(), record.values[i].tolist())
        for record in records
        for i, site in enumerate(record.sites)
        if site.kind not in IN_TURN
    }


def assert_equal(got: Sites, want: Sites, tolerance: float = 1e-5) -> None:
    """Counts are equal; values to `tolerance` of the tensor's scale (a graph may sum otherwise)."""
    assert got.keys() == want.keys()
    for key, (counts, values) in got.items():
        counts_wanted, wanted = want[key]
        if tolerance < 1e-3 or counts[0] == 0:
            assert counts == counts_wanted, key
        scale, numel = max(map(abs, wanted[:2])), counts[0]
        bounds = np.array([scale, scale, scale * numel, scale * scale * numel]) * tolerance
        difference = np.abs(np.subtract(values, wanted))
        assert counts[0] == 0 or (difference <= bounds).all(), (key, values, wanted)


def build(wrap: Wrap, *, checkpointed: bool) -> Model:
    torch.manual_seed(0)
    return Model(2 if wrap in (whole, in_place) else BLOCKS, checkpointed=checkpointed)


# These make the same graphs as those, which is looked at, so that autograd's half of the compiler
# makes the same of them: it is passed through once.
SAME = {in_place: whole, blocks_wrapped: blocks_in_place}
GRAPHS: dict[tuple[Wrap, str, bool], list[str]] = {}  # of the first wrap that makes them


def backend_of(wrap: Wrap) -> str:
    return AS_TRACED if wrap in SAME else "aot_eager"


@functools.cache
def reference(wrap: Wrap, *, checkpointed: bool) -> str:
    """Training without a probe, under the same backend."""
    model = build(wrap, checkpointed=checkpointed)
    return simple_loop(model, lambda: wrap(model, backend_of(wrap)))


@functools.cache
def eager_sites(path: Path, wrap: Wrap, *, checkpointed: bool) -> Sites:
    if wrap in SAME:
        return eager_sites(path, SAME[wrap], checkpointed=checkpointed)
    model = build(wrap, checkpointed=checkpointed)
    path = path / f"{wrap.__name__}-{checkpointed}"
    with ddpprobe.install(model, run_dir=path, every=4, daemon="none"):
        simple_loop(model, lambda: model)
    return sites(read(path)[0])


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eager")


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrap", [whole, in_place, blocks_in_place, blocks_wrapped])
def test_two_graphs_no_break_every_value_exact_and_training_bit_identical(
    wrap: Wrap, when: str, checkpointed: bool, tmp_path: Path, shared_path: Path
) -> None:
    want = reference(wrap, checkpointed=checkpointed)
    values = eager_sites(shared_path, wrap, checkpointed=checkpointed)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, backend = build(wrap, checkpointed=checkpointed), Counter(backend_of(wrap))
    with contextlib.ExitStack() as stack:

        def probe(given: nn.Module) -> None:
            path = tmp_path / "r"
            stack.enter_context(ddpprobe.install(given, run_dir=path, every=4, daemon="none"))

        def compile_and_install() -> Callable[..., object]:
            if when == "before":
                probe(model)
            call = wrap(model, backend)
            if when == "after":
                probe(call)
            return call

        got = simple_loop(model, compile_and_install)
    assert got == want
    assert len(backend.graphs) == 2
    assert breaks() == 0
    assert ["ddpprobe.record" in graph for graph in backend.graphs] == [True, False]
    kind = (SAME.get(wrap, wrap), when, checkpointed)
    assert backend.graphs == GRAPHS.setdefault(kind, backend.graphs)
    assert_equal(sites(read(tmp_path / "r")[0]), values)
    for hook in (
        copy_safe_hook.CopySafeObserver,
        compiled_hooks.Resident,
        root._Before,
        root._After,
    ):
        # They would share one recompile limit among all modules of the process.
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
        assert entries(hook.__call__.__code__) == []


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: object = None


class Rich(nn.Module):
    """A dataclass, a dict, a tuple with None, a module called three times, one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.never = nn.LayerNorm(8), nn.Linear(2, 2)
        self.blocks = nn.ModuleList([Many(), Named()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[0](self.norm(x))["x"][1]
        out = self.blocks[1](x)
        return (out.logits + out.extra[1]).square().mean()


class Many(Block):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"x": (None, super().forward(x), "text", 3)}


class Named(Block):
    def forward(self, x: torch.Tensor) -> Output:
        y = super().forward(x)
        return Output(y.detach().mean(), y, [None, y.detach() * 2])


def accumulation_and_evaluations(model, wrap) -> None:
    call, optimizer = wrap(), adam(model)
    for step in range(5):
        for micro in range(2):
            call(batch(10 * step + micro)).backward()
            with torch.no_grad():
                call(batch(3))
            model.eval()
            with torch.inference_mode():
                call(batch(4))
            model.train()
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_before_two_backwards(model, wrap) -> None:
    call, optimizer = wrap(), adam(model)
    for step in range(5):
        losses = [call(batch(10 * step + i)) for i in range(2)]
        if step % 2:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def changing_shapes(model, wrap) -> None:
    call, optimizer = wrap(), adam(model)
    for step in range(6):
        call(batch(step, rows=3 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast(model, wrap) -> None:
    call, optimizer = wrap(), adam(model)
    for step in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [accumulation_and_evaluations, two_forwards_before_two_backwards, changing_shapes, autocast]


@pytest.mark.parametrize(("kind", "wrap"), [(Model, blocks_in_place), (Rich, whole)])
@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop_and_any_output_gives_what_the_eager_run_gives(
    loop, kind: type[nn.Module], wrap: Wrap, tmp_path: Path
) -> None:
    found = []
    for engine in (eager, wrap):
        torch.manual_seed(0)
        model, path = kind(), tmp_path / engine.__name__
        with ddpprobe.install(model, run_dir=path, every=2, daemon="none"):
            loop(model, lambda model=model, engine=engine: engine(model, Counter()))
        records, life = read(path)
        found.append(sites(records))
        assert "blind" not in [event["event"] for event in life]
    assert breaks() == 0
    assert_equal(found[1], found[0], 2e-2 if loop is autocast else 1e-5)


@pytest.mark.parametrize("wrap", [whole, in_place, blocks_in_place, blocks_wrapped])
def test_installing_after_the_first_compiled_call_compiles_anew_once_and_says_so(
    wrap: Wrap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, backend = Model(), Counter(AS_TRACED)
    twin = copy.deepcopy(model)
    call, optimizer = wrap(model, backend), adam(model)
    found = []
    for called, o in ((call, optimizer), (twin, adam(twin))):
        called(batch(9)).backward()
        o.step()
        o.zero_grad()
        path = tmp_path / str(len(found))
        with ddpprobe.install(called, run_dir=path, every=2, daemon="none"):
            for step in range(4):
                called(batch(step)).backward()
                o.step()
                o.zero_grad()
        found.append(sites(read(path)[0]))
    assert len(backend.graphs) == 3
    assert_equal(*found)
    said = [r.getMessage() for r in caplog.records if r.name == "ddpprobe"]
    assert len(said) == 1
    assert "were made without the probe: it makes them anew now, once" in said[0]
    assert "of a model that a compiled function calls, its first call has to show" in said[0]


@pytest.mark.parametrize("wrap", [whole, in_place, blocks_in_place, blocks_wrapped, function])
def test_a_model_compiled_amid_training_is_observed_at_the_next_sampled_step(
    wrap: Wrap, tmp_path: Path
) -> None:
    found = []
    for engine in (eager, wrap):
        torch.manual_seed(0)
        model, path = Model(), tmp_path / engine.__name__
        optimizer, call = adam(model), model
        with ddpprobe.install(model, run_dir=path, every=3, daemon="none"):
            for step in range(9):
                if step == 2:
                    call = engine(model, Counter(AS_TRACED))
                call(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        records, life = read(path)
        found.append((sites(records), life))
    (want, _), (got, life) = found
    unsampled = [event["step"] for event in life if event["event"] == "unsampled"]
    assert {key[0] for key in got} | set(unsampled) == {0, 3, 6}
    assert unsampled in ([], [3])
    assert_equal(got, {k: v for k, v in want.items() if k[0] not in unsampled})


def test_a_model_called_by_a_compiled_function_is_observed_from_the_second_step_on(
    tmp_path: Path,
) -> None:
    found = []
    for engine in (eager, function):
        torch.manual_seed(0)
        model, path, backend = Model(), tmp_path / engine.__name__, Counter(AS_TRACED)
        with ddpprobe.install(model, run_dir=path, every=2, daemon="none"):
            simple_loop(model, lambda m=model, e=engine, b=backend: e(m, b))
        records, life = read(path)
        found.append((sites(records), [e for e in life if e["event"] == "unsampled"]))
    (want, _), (got, unsampled) = found
    assert [event["step"] for event in unsampled] == [0]
    assert "compiled function" in unsampled[0]["reason"]
    assert_equal(got, {key: value for key, value in want.items() if key[0]})
    assert len(backend.graphs) == 3  # one before the probe was in it
    assert breaks() == 0


def test_a_probe_installed_behind_a_running_compiled_function_comes_to_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, backend = Model(), Counter(AS_TRACED)
    call = function(model, backend)
    simple_loop(model, lambda: call, steps=2)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none"):
        simple_loop(model, lambda: call, steps=10)
    assert {key[0] for key in sites(read(tmp_path / "r")[0])}
    assert "the function that calls the model" in caplog.text


def test_several_outputs_of_a_graph_have_no_gradient_rather_than_part_of_one(
    tmp_path: Path,
) -> None:
    class Two(Model):
        def forward(self, x: torch.Tensor) -> Output:
            y = self.head(self.stem(x))
            return Output(y.square().mean(), y)

    model = Two()
    call, optimizer = whole(model, Counter()), adam(model)
    with ddpprobe.install(call, run_dir=tmp_path / "r", every=1, daemon="none"):
        out = call(batch(0))
        (out.loss + out.logits.mean()).backward()
        optimizer.step()
    got = sites(read(tmp_path / "r")[0])
    for leaf in ("loss", "logits"):
        assert got[0, "", "output", leaf][0][-2:] == [1, 1]
        assert got[0, "", "grad_output", leaf][0][-2:] == [1, 0]
    assert got[0, "head", "grad_output", ""][0][-2:] == [1, 1]


def test_a_region_that_runs_unheard_is_compiled_anew_once_and_then_reported_as_blind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = reference(blocks_in_place, checkpointed=False)
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_hooks, "trace_outputs", lambda output, slot: None)
    torch.manual_seed(0)
    model, backend = Model(BLOCKS), Counter()
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none"):
        got = simple_loop(model, lambda: blocks_in_place(model, backend))
    assert got == want
    events = [event for event in read(tmp_path / "r")[1] if event["event"] == "blind"]
    assert len(events) == BLOCKS
    assert "blocks.0.up" in events[0]["modules"]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("anew now, once" in text for text in said) == 1
    assert sum("without the hooks they carry" in text for text in said) == BLOCKS


@pytest.mark.parametrize("wrap", [whole, in_place, blocks_in_place, function])
def test_close_leaves_neither_hook_nor_operator_and_pause_leaves_no_operator(
    wrap: Wrap, tmp_path: Path
) -> None:
    def run(*, probed: bool) -> tuple[str, list[list[str]]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend, new = Model(), Counter(AS_TRACED), []
        probe = (
            ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none")
            if probed else None
        )  # fmt: skip
        call, optimizer = wrap(model, backend), adam(model)
        pause = probe.pause("look") if probe else contextlib.nullcontext()

        def train(first: int) -> None:
            seen = len(backend.graphs)
            for step in range(first, first + 3):
                call(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            new.append(backend.graphs[seen:])

        train(0)
        with pause:
            train(3)
        train(6)
        if probe:
            probe.close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        torch.compiler.reset()
        train(9)
        return state_hash(model, optimizer), new

    want, _ = run(probed=False)
    got, (first, paused, resumed, fresh) = run(probed=True)
    assert got == want
    assert any("ddpprobe.record" in graph for graph in first)
    if wrap is not function:  # there the root's own events stay in the graph, unheard
        assert not any("ddpprobe" in graph for graph in paused)
    assert resumed == []
    assert fresh
    assert not any("ddpprobe" in graph for graph in fresh)
    steps = {record.step for record in read(tmp_path / "r")[0]}
    assert max(steps) == 5


def test_copies_and_pickles_of_a_compiled_model_are_silent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    blocks_in_place(model, Counter(AS_TRACED))
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        simple_loop(model, lambda: model, steps=1)
        recorder = probe._recorder
        model(batch(1)).backward()  # amid a sampled step
        rows = len(recorder._observers.rows)
        twin = copy.deepcopy(model)
        torch.save(model.state_dict(), io.BytesIO())
        twin(batch(2)).backward()
        for block in twin.blocks:
            block.compile(backend=Counter(AS_TRACED), fullgraph=True)
        twin(batch(2)).backward()
        assert len(recorder._observers.rows) == rows


def test_full_backward_hooks_stay_away_from_graphs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, backend = Model(), Counter()
    with ddpprobe.install(
        model, run_dir=tmp_path / "r", every=1, daemon="none", backward="full"
    ) as probe:
        simple_loop(model, lambda: blocks_in_place(model, backend))
        unsafe = probe._recorder._observers.full.unsafe
    assert breaks() == 0
    assert len(backend.graphs) == 1
    assert "torch.compile" in unsafe["blocks.0"]
    assert "torch.compile" in unsafe["blocks.1.up"]
    kinds = {(key[1], key[2]) for key in sites(read(tmp_path / "r")[0])}
    assert ("head", "grad_input") in kinds
    assert ("blocks.1.up", "grad_input") not in kinds


def test_an_export_amid_a_sampled_step_has_nothing_of_ours(tmp_path: Path) -> None:
    model = Model()
    blocks_in_place(model, Counter())
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        simple_loop(model, lambda: model, steps=1)
        model(batch(1))
        program = torch.export.export(model.blocks[0], (batch(2),))
    assert "ddpprobe" not in str(program.graph)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
def test_inductor_keeps_every_record_reads_no_buffer_too_late_and_splits_cuda_graphs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config, scheduler

    asked, said = scheduler.Scheduler.should_partition, []

    def should_partition(self: object, node: object) -> object:
        said.append((str(getattr(node.node, "op_overload", None)), asked(self, node)))
        return said[-1][1]

    monkeypatch.setattr(scheduler.Scheduler, "should_partition", should_partition)
    monkeypatch.setattr(config, "graph_partition", True)
    monkeypatch.setattr(config, "custom_should_partition_ops", ["theirs::op"])
    # Scalar code: what vectors this machine has takes six compiler runs to find out.
    monkeypatch.setattr(config.cpp, "simdlen", 1)
    monkeypatch.setattr(config.cpp, "vec_isa_ok", True)
    for _ in range(2):
        keep_out_of_cuda_graphs()
    assert config.custom_should_partition_ops == ["theirs::op", "ddpprobe::record"]
    found = []
    for engine in (eager, whole):
        torch.manual_seed(0)
        model, path = Model(checkpointed=True), tmp_path / engine.__name__
        backend = Counter("inductor")
        with ddpprobe.install(model, run_dir=path, every=3, daemon="none"):
            simple_loop(model, lambda m=model, e=engine, b=backend: e(m, b))
        found.append(sites(read(path)[0]))
    assert len(backend.graphs) == 2
    assert breaks() == 0
    assert_equal(found[1], found[0])
    records = [str(reason) for operator, reason in said if operator == "ddpprobe.record.default"]
    assert records
    assert all("custom partition op" in reason for reason in records)


def test_the_first_bad_tensor_inside_a_graph_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(3)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none"):
        call = whole(model, Counter())
        optimizer = adam(model)
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model.blocks[1].up.weight.fill_(torch.finfo(torch.float32).max)
            call(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    bad = read(tmp_path / "r")[0][-1].first_bad
    assert (bad.fqn, bad.kind, bad.phase) == ("blocks.1.up", "output", "forward")
    assert bad.nan + bad.pos_inf + bad.neg_inf > 0


def test_a_gradient_in_a_graph_is_of_the_micro_batch_whose_backward_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, spoiled = Model(), iter((True, False))

    def spoil(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        if next(spoiled):
            args[0].register_hook(lambda gradient: gradient * torch.nan)

    model.head.register_forward_pre_hook(spoil)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        call, optimizer = blocks_in_place(model, Counter()), adam(model)
        losses = [call(batch(micro)) for micro in range(2)]
        for loss in losses:  # in the order of the forwards, as a pipeline's schedule does
            loss.backward()
        optimizer.step()
    bad = read(tmp_path / "r")[0][-1].first_bad
    assert (bad.micro, bad.phase, bad.fqn) == (0, "backward", "blocks.1.down")


def test_an_error_inside_a_running_graph_is_contained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = reference(whole, checkpointed=False)
    torch._dynamo.reset()
    monkeypatch.setenv("DDPPROBE_STRICT", "0")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("sabotage")

    monkeypatch.setattr(EagerHooks, "traced_output", broken)
    model = build(whole, checkpointed=False)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=2, daemon="none"):
        got = simple_loop(model, lambda: whole(model, Counter()))
        assert not any(m._forward_hooks for m in model.modules())
    assert got == want
    assert [e["error"] for e in read(tmp_path / "r")[1] if e["event"] == "fuse"] == [
        "RuntimeError: sabotage"
    ]
