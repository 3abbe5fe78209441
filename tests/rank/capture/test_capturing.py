"""Full tensors in the training process: what is kept is what was there, and training is as without.

What several ranks hold is in `tests/distributed/test_packs_of_ranks.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.errors import InstallError
from ddpprobe.rank.capture import host_copy, pack_writer
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.orders import Order
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.tensor_pack import Pack
from ddpprobe.testing import state_hash

from ...test_gpu import DEVICES, no_waiting


class Part(nn.Module):
    """What a call can have: keywords, a structured output, state, randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x, *, more=(), scale: float = 1.0):
        y = self.drop(self.act(self.norm(self.down(x))))
        return {"y": y * scale, "rest": [x + m for m in more]}


class Net(nn.Module):
    def __init__(self, remat: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.part = Part()
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.remat = remat

    def forward(self, x):
        h = self.up(x)
        if self.remat is None:
            out = self.part(h, more=[torch.ones(4), torch.zeros(1)], scale=2.0)
        else:
            out = {"y": checkpoint(lambda h: self.part(h)["y"], h, use_reentrant=self.remat)}
        return (self.tied(self.head(out["y"])) + self.frozen).square().mean()


def build(remat: bool | None = None) -> Net:
    torch.manual_seed(3)
    return Net(remat)


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, steps: int = 3, each: Callable[[int], None] = lambda _: None, lr: float = 0.1
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).backward()
        each(step)
        optimizer.step()
    return optimizer


def pack_of(run: Path, step: int) -> Pack:
    return Pack.open(RunDir(run).pack(0, "node_0000", 0, step))


def steps_of(run: Path) -> list[int]:
    return sorted(int(p.stem.removeprefix("step_")) for p in run.glob("captures/**/*.pack"))


def tensors_of(pack: Pack) -> dict[tuple[str, ...], torch.Tensor]:
    found = {}
    for i, t in enumerate(pack.tensors):
        flat = torch.from_numpy(pack.raw(i)).view(getattr(torch, t.dtype))
        found[t.module, t.kind, t.fqn, t.leaf, t.micro, t.call] = flat.reshape(t.shape)
    return found


def life_of(run: Path) -> list[dict]:
    tail = JournalTail(RunDir(run).rank_journal(0, "node_0000", 0))
    found = [frame.json() for frame in tail.poll() if frame.type == framing.LIFE]
    tail.close()
    return found


def hooks_on(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    inner = [m for m in model.modules() if m is not model]
    return sum(len(getattr(m, table)) for m in inner for table in tables)


def install(model: nn.Module, run: Path, **options) -> ddpprobe.Probe:
    return ddpprobe.install(model, run_dir=run, daemon="none", **options)


def test_a_call_can_be_made_again_from_what_is_kept(tmp_path) -> None:
    """Parameters, inputs, randomness: the output of the module called again is bit-identical."""
    model = build()
    with install(model, tmp_path, every=2, capture=["part", "head", "tied"]) as probe:
        optimizer = train(model, 3, lambda step: probe.log(indices=torch.arange(4) + step))
    mine = state_hash(model, optimizer)
    bare = build()
    assert mine == state_hash(bare, train(bare))
    assert hooks_on(model) == 0
    assert steps_of(tmp_path) == [0, 2]
    pack = pack_of(tmp_path, 2)
    found = tensors_of(pack)
    told = pack.header["modules"]["part"]
    assert (told["class"], told["training"]) == (f"{__name__}.Part", True)
    (call,) = told["calls"]
    tree = [{"tensor": "more.0"}, {"tensor": "more.1"}]
    assert call["args"] == {"tuple": [{"tensor": "0"}]}
    assert call["kwargs"] == {"dict": {"more": {"list": tree}, "scale": {"value": 2.0}}}
    assert (call["rng"], call["autocast"], call["inputs_changed"]) == ("before", {}, False)
    again = Part()
    held = {
        fqn: value for (_, kind, fqn, *_), value in found.items() if kind in ("param", "buffer")
    }
    again.load_state_dict({name: held[fqn] for name, fqn in told["state"].items()})
    torch.set_rng_state(found["part", "rng", "", "cpu", 0, 0])
    inputs = {
        leaf: found["part", "input", "part", leaf, 0, 0] for leaf in ("0", "more.0", "more.1")
    }
    out = again(inputs["0"], more=[inputs["more.0"], inputs["more.1"]], scale=2.0)
    for leaf, mine in {"y": out["y"], "rest.0": out["rest"][0], "rest.1": out["rest"][1]}.items():
        assert torch.equal(mine, found["part", "output", "part", leaf, 0, 0])
    assert pack.header["indices"] == [{"micro": 0, "samples": [2, 3, 4, 5]}]
    assert (pack.header["dropped"], pack.header["reason"]) == (0, "capture")
    # A parameter of two modules is kept once, and both say under which name.
    assert [key for key in found if key[1] == "param" and key[2].startswith(("head", "tied"))] == [
        ("head", "param", "head.weight", "", 0, 0), ("head", "param", "head.bias", "", 0, 0)
    ]  # fmt: skip
    assert pack.header["modules"]["tied"]["state"] == {"weight": "head.weight"}


def test_parameters_and_gradients_are_those_that_the_optimizer_finds(tmp_path) -> None:
    model, seen = build(), {}

    def clip(step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        seen[step] = {
            n: (p.detach().clone(), None if p.grad is None else p.grad.clone())
            for n, p in model.named_parameters()
        }

    with install(model, tmp_path, every=1, capture="*"):
        train(model, 2, clip)
    for step, want in seen.items():
        found = {key[1:3]: value for key, value in tensors_of(pack_of(tmp_path, step)).items()}
        for name, (value, gradient) in want.items():
            assert torch.equal(found["param", name], value)
            assert (("grad", name) in found) == (gradient is not None)
            assert gradient is None or torch.equal(found["grad", name], gradient)
        assert {name for kind, name in found if kind == "buffer"} == {
            "part.norm.running_mean", "part.norm.running_var", "part.norm.num_batches_tracked"
        }  # fmt: skip


def test_an_input_that_the_module_changes_is_kept_as_it_was(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    with install(model, tmp_path, every=1, capture=["0", "1", ""]):
        model(data(0)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    pack = pack_of(tmp_path, 0)
    found = tensors_of(pack)
    before, after = found["1", "input", "1", "0", 0, 0], found["1", "output", "1", "", 0, 0]
    assert before.min() < 0
    assert torch.equal(before.relu(), after)
    assert torch.equal(found["0", "output", "0", "", 0, 0], before)
    calls = {
        name: told["calls"][0]["inputs_changed"] for name, told in pack.header["modules"].items()
    }
    assert calls == {"0": False, "1": True, "": None}
    assert torch.equal(found["", "input", "", "0", 0, 0], data(0))  # the root's own, too


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_recomputes_is_kept_once_with_its_gradient(reentrant, tmp_path) -> None:
    model = build(remat=reentrant)
    with install(model, tmp_path, every=1, capture=["part"]):
        optimizer = train(model, 2)
    mine = state_hash(model, optimizer)
    bare = build(remat=reentrant)
    assert mine == state_hash(bare, train(bare, 2))
    pack = pack_of(tmp_path, 1)
    assert len(pack.header["modules"]["part"]["calls"]) == 1
    kinds = [t.kind for t in pack.tensors if t.fqn == "part"]
    assert kinds == ["input", "output", "grad_output"]


def test_several_calls_of_several_micro_batches_are_told_apart(tmp_path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return self.lin(self.lin(x)).sum()

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with install(model, tmp_path, every=1, capture="lin"):
        for micro in range(2):
            model(data(micro)).backward()
            with torch.no_grad():
                model(data(9))  # an evaluation in between is none of them
        optimizer.step()
    found = tensors_of(pack_of(tmp_path, 0))
    for micro in range(2):
        assert torch.equal(found["lin", "input", "lin", "0", micro, 0], data(micro))
        middle = found["lin", "output", "lin", "", micro, 0]
        assert torch.equal(found["lin", "input", "lin", "0", micro, 1], middle)
        ones = torch.ones(5, 3)
        assert torch.equal(found["lin", "grad_output", "lin", "", micro, 1], ones)
        assert not torch.equal(found["lin", "grad_output", "lin", "", micro, 0], ones)
    assert len([key for key in found if key[1] == "input"]) == 4


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"]
)
def test_every_dtype_keeps_its_bits(name, tmp_path) -> None:
    dtype = getattr(torch, name)

    class Cast(nn.Module):
        def forward(self, x):
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cast, self.lin = Cast(), nn.Linear(3, 1)

        def forward(self, x, y):
            self.cast(y)
            self.cast(y.t())  # not contiguous
            return self.lin(x).sum()

    g = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (32, 8, dtype.itemsize), dtype=torch.uint8, generator=g)
    # Each sign with each high part of an exponent: zeros, subnormals, infinities, NaNs with a load.
    bits[..., -1] = torch.arange(256, dtype=torch.uint8).view(32, 8)
    y = bits.view(dtype).squeeze(-1)
    model = Outer()
    with install(model, tmp_path, every=1, capture="cast"):
        model(data(0), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    pack = pack_of(tmp_path, 0)
    kept = [i for i, t in enumerate(pack.tensors) if (t.module, t.kind) == ("cast", "input")]
    raws = [pack.raw(i).tobytes() for i in kept]
    assert raws == [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (y, y.t())]
    assert {pack.tensors[i].dtype for i in kept} == {name}
    # Some are NaN, and were when they came in: what is around is kept as the culprit, all of it.
    around = [t.dtype for t in pack.tensors if (t.module, t.kind) == ("", "input")]
    assert around == ["float32", name]


def test_orders_capture_steps_that_are_not_sampled_and_end(tmp_path) -> None:
    model = build()
    with install(model, tmp_path, every=100) as probe:
        order = Order(0, "capture", 2, 4, ("part", "no.such.module"), "trigger: why not")
        probe._recorder.capturing.capture(order)
        train(model, 6)
        assert hooks_on(model) == 0
    assert steps_of(tmp_path) == [2, 3]
    pack = pack_of(tmp_path, 3)
    assert pack.header["reason"] == "trigger: why not"
    assert set(pack.header["modules"]) == {"part"}
    bare = build()
    train(bare, 6)
    assert all(map(torch.equal, model.state_dict().values(), bare.state_dict().values()))


def test_autocast_and_the_scaler_are_told_and_a_skipped_step_has_its_gradients(tmp_path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with install(model, tmp_path, every=1, capture="head"):
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(data(step))
            loss = loss * float("inf") if step == 1 else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert steps_of(tmp_path) == [0, 1, 2]
    headers = [pack_of(tmp_path, step).header for step in range(3)]
    assert [h["scaler"] for h in headers] == [64.0, 64.0, 32.0]
    assert headers[0]["modules"]["head"]["calls"][0]["autocast"] == {"cpu": "bfloat16"}
    skipped = tensors_of(pack_of(tmp_path, 1))
    assert not skipped["head", "grad", "head.weight", "", 0, 0].isfinite().all()
    taken = tensors_of(pack_of(tmp_path, 0))
    assert taken["head", "output", "head", "", 0, 0].dtype == torch.bfloat16
    assert torch.equal(
        skipped["head", "param", "head.weight", "", 0, 0],
        tensors_of(pack_of(tmp_path, 2))["head", "param", "head.weight", "", 0, 0],
    )


def test_what_has_no_room_is_dropped_and_counted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pack_writer, "MAX_BYTES", 6000)  # a state of random numbers takes 5056
    model = build()
    with install(model, tmp_path, every=1, capture=["up", "part"]):
        train(model, 1)
    pack = pack_of(tmp_path, 0)
    kept = sum(t.bytes for t in pack.tensors)
    assert 5056 <= kept <= 6000
    assert pack.header["dropped"] >= 5056
    (event,) = [e for e in life_of(tmp_path) if e["event"] == "dropped"]
    assert event["reason"] == "capture: no room"
    assert event["count"] >= 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_costs_packs_and_nothing_else(code, tmp_path, monkeypatch) -> None:
    real = os.writev

    def writev(fd, buffers):
        file = os.readlink(f"/proc/self/fd/{fd}")
        if any(f"step_{step:010d}.pack" in file for step in (0, 1)):
            raise OSError(code, os.strerror(code))
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(pack_writer, "BACK_OFF_SECONDS", 0.0)
    model = build()
    with install(model, tmp_path, every=1, capture=["part"]):
        optimizer = train(model, 4)
    mine = state_hash(model, optimizer)
    bare = build()
    assert mine == state_hash(bare, train(bare, 4))
    assert steps_of(tmp_path) == [2, 3]
    assert not list(tmp_path.glob("captures/**/.*"))  # no half-written file
    events = [e for e in life_of(tmp_path) if e["event"] == "dropped"]
    assert [e["reason"] for e in events] == [f"capture: {errno.errorcode[code]}"] * 2


def test_what_has_no_plain_bytes_is_left_out_and_said(tmp_path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.same = nn.Embedding(5, 3, sparse=True), nn.Identity()

        def forward(self, x):
            self.same(x.to_sparse())
            return self.table(x).sum()

    model = Outer()
    with install(model, tmp_path, every=1, capture="*"):
        model(torch.arange(5)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    header = pack_of(tmp_path, 0).header
    assert header["left_out"] == {"sparse_coo": 3}  # input, output, gradient


def test_a_failure_in_here_ends_captures_only(tmp_path, monkeypatch, records_of) -> None:
    monkeypatch.setenv("DDPPROBE_STRICT", "0")

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(host_copy.HostCopier, "take", fail)
    model = build()
    with install(model, tmp_path, every=1, capture="part"):
        optimizer = train(model, 3)
        assert hooks_on(model) == 0
    mine = state_hash(model, optimizer)
    bare = build()
    assert mine == state_hash(bare, train(bare))
    assert steps_of(tmp_path) == []
    assert [r.step for r in records_of(tmp_path) if r.sampled] == [0, 1, 2]
    assert ("fuse", "capture") in {(e["event"], e.get("component")) for e in life_of(tmp_path)}


def test_a_glob_that_matches_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(InstallError, match=r"capture glob 'layers\.\*' matches no module"):
        install(build(), tmp_path, capture="layers.*")


class Bad(nn.Module):
    """The logarithm of a negative number, at one step."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(1))
        self.at = -1

    def forward(self, x, *, factor: float):
        self.at -= 1
        return (self.lin(x) * factor + (-1e9 if self.at == 0 else 1e9)).log()


@pytest.mark.parametrize("captured", [(), ("bad.inner",)], ids=["alone", "in a captured step"])
def test_the_first_bad_module_is_kept_at_the_step_where_it_happens(captured, tmp_path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.bad, self.behind = nn.Linear(3, 4), Bad(), nn.Linear(4, 1)
            self.bad.inner = nn.Identity()

        def forward(self, x):
            x = self.bad.inner(self.before(x))
            return self.behind(self.bad(x, factor=0.5)).mean()

    torch.manual_seed(1)
    model = Inner()
    model.bad.at = 4  # the third forward
    with install(model, tmp_path, every=1, capture=captured) as probe:
        state = []

        def each(step: int) -> None:
            state.append({n: p.detach().clone() for n, p in model.named_parameters()})
            probe.log(indices=[step])

        train(model, 6, each)
    assert "nonfinite" not in {
        pack_of(tmp_path, s).header["reason"] for s in steps_of(tmp_path) if s != 3
    }  # what follows is bad because of it
    pack = pack_of(tmp_path, 3)
    assert pack.header["reason"] == "nonfinite"
    assert pack.header["indices"] == [{"micro": 0, "samples": [3]}]
    assert set(pack.header["modules"]) == {"bad", *captured}
    told = pack.header["modules"]["bad"]
    assert told["calls"][0]["kwargs"] == {"dict": {"factor": {"value": 0.5}}}
    assert told["calls"][0]["rng"] == "after"
    found = tensors_of(pack)
    x = model.before.weight.new_tensor(0)
    x = torch.nn.functional.linear(data(3), state[3]["before.weight"], state[3]["before.bias"])
    assert torch.equal(found["bad", "input", "bad", "0", 0, 0], x)
    assert found["bad", "output", "bad", "", 0, 0].isnan().all()
    assert torch.equal(
        found["bad", "param", "bad.lin.weight", "", 0, 0], state[3]["bad.lin.weight"]
    )
    assert torch.equal(found["bad", "buffer", "bad.shift", "", 0, 0], torch.ones(1))
    assert told["state"]["lin.weight"] == "bad.lin.weight"


def test_code_between_modules_is_kept_with_the_module_around_it(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.down((self.up(x) - 1e9).log())

    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    model = nn.Sequential(nn.Linear(3, 3), Block(), Loss())
    with install(model, tmp_path, every=1):
        train(model, 1)
    pack = pack_of(tmp_path, 0)
    assert set(pack.header["modules"]) == {"1.down", "1"}  # not "", whose input was as good
    found = tensors_of(pack)
    assert found["1.down", "input", "1.down", "0", 0, 0].isnan().all()
    assert found["1", "input", "1", "0", 0, 0].isfinite().all()
    assert ("1", "param", "1.up.weight", "", 0, 0) in found


def test_arguments_become_json_and_nothing_that_runs() -> None:
    from ddpprobe.rank.capture.structure import arguments

    class Odd(dict):
        pass

    t, deep = torch.zeros(1), [[[[[[[[1]]]]]]]]
    told = arguments(
        (t, [t, None], {"k": t, 3: 1}, Odd(a=t), "x" * 2000, 1 << 70, deep),
        {"flag": True, "nan": float("nan"), "dtype": torch.float32},
    )
    first, pair, mixed, odd, text, large, nested = told["args"]["tuple"]
    assert first == {"tensor": "0"}
    assert pair == {"list": [{"tensor": "1.0"}, {"value": None}]}
    assert (mixed, text, large) == tuple(
        {"opaque": f"builtins.{k}"} for k in ("dict", "str", "int")
    )
    assert odd["opaque"].endswith("Odd")
    assert "opaque" in str(nested)
    flags = told["kwargs"]["dict"]
    assert flags["flag"] == {"value": True}
    assert flags["nan"] == {"float": "nan"}
    assert flags["dtype"] == {"opaque": "torch.dtype"}


@pytest.mark.parametrize("device", DEVICES)
def test_copies_leave_the_device_without_anybody_waiting_and_are_right(device, tmp_path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(inplace=True), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = [data(step).to(device) for step in range(4)]
    weights = []
    with install(model, tmp_path, every=2, capture=["0", "1"]) as probe:
        with no_waiting(device):
            for x in inputs:
                weights.append(model[0].weight.detach().clone())
                model(x).sum().backward()
                probe.log(indices=torch.arange(3, device=device))
                optimizer.step()
                optimizer.zero_grad()
    for step in (0, 2):
        pack = pack_of(tmp_path, step)
        found = tensors_of(pack)
        assert torch.equal(found["0", "input", "0", "0", 0, 0], inputs[step].cpu())
        assert torch.equal(found["0", "param", "0.weight", "", 0, 0], weights[step].cpu())
        before, after = found["1", "input", "1", "0", 0, 0], found["1", "output", "1", "", 0, 0]
        assert torch.equal(before.relu(), after)
        assert ("1", "rng", "", device, 0, 0) in found
        assert pack.header["indices"] == [{"micro": 0, "samples": [0, 1, 2]}]


@pytest.mark.parametrize("indices", ["abc", 3, torch.rand(2), [1.5], [None]])
def test_indices_that_are_none_are_told_once_and_captures_go_on(
    indices: object, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with install(model, tmp_path, every=1, capture="part") as probe:
        train(model, 3, lambda step: probe.log(indices=indices if step < 2 else [7]))
    assert caplog.text.count("indices is not kept") == 1
    assert steps_of(tmp_path) == [0, 1, 2]
    assert pack_of(tmp_path, 1).header["indices"] is None
    assert pack_of(tmp_path, 2).header["indices"] == [{"micro": 0, "samples": [7]}]
