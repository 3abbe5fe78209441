"""Captured tensors: what the ranks held comes back as one tensor, bit for bit, or is said lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.errors import PackDamaged, StoreDamaged, TensorError
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify import captures as verify_captures
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing, tensor_pack
from ddpprobe.rundir.paths import DirectoryLock, RunDir, make_dir
from ddpprobe.store.captures import commit as capture_commit
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures import event as capture_event
from ddpprobe.store.captures import fold as capture_fold
from ddpprobe.store.captures.event import captures_key
from ddpprobe.store.captures.fold import CaptureFold
from ddpprobe.store.captures.reader import StoredEvent
from ddpprobe.store.manifest import Lost, Manifest, manifest_path
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from ... import made_packs as made
from ...made_runs import Made, tree

SITE = "layers.0.mlp.weight:param"
GROUP = "attempt_000/captures/step_0000000007"
OUT = ("layers.0.mlp", "layers.0.mlp", "output", "")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has ended, with a few records."""
    return Made(tmp_path / "run").whole(4).close()


def fold(run: RunDir, *nodes: str, final: bool = True) -> CaptureFold:
    for node in nodes or ("node_0000",):
        folder = CaptureFold(run, Root(run, durable=False), node, durable=False)
        folder.fold(0, final=final)
    return folder


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (found.shape, found.dtype, found.tobytes()) == (
        expected.shape,
        expected.dtype,
        expected.tobytes(),
    )


@st.composite
def layouts(draw):
    """A whole tensor, cut as one of the wrappers cuts it; often unevenly, often into nothing."""
    dtype = draw(st.sampled_from([n for n in tensor_pack.ITEM_SIZES if n != "complex32"]))
    kind = draw(st.sampled_from(["fsdp2", "tp", "mesh", "twice", "hsdp", "flat", "batch", "same"]))
    shape = draw(st.lists(st.integers(1, 7), min_size=2, max_size=3))
    whole = made.whole(shape, dtype, draw(st.integers(0, 9)))
    match kind:
        case "flat":
            edges = st.integers(0, 40)
            parts = made.flat(whole, draw(st.integers(1, 4)), draw(edges), draw(edges))
        case "batch":
            lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
            whole = made.whole([sum(lengths), *shape[1:]], dtype)
            parts = made.batch(whole, lengths)
        case "same":
            parts = {r: (whole, {"kind": "replicated"}) for r in range(3)}
        case _:
            mesh, dims = {
                "fsdp2": ([draw(st.integers(1, 4))], [0]),
                "tp": ([2], [1]),
                "mesh": ([2, 3], [0, 1]),
                "twice": ([2, 2], [0, 0]),
                "hsdp": ([2, 2], [None, 0]),
            }[kind]
            parts = made.sharded(whole, mesh, dims)
    return dtype, whole, parts


@settings(max_examples=30, deadline=None)
@given(case=layouts(), data=st.data())
def test_any_region_of_any_layout_comes_back_exactly_before_and_after_the_fold(
    tmp_path_factory, case, data
):
    dtype, whole, parts = case
    run = Made(tmp_path_factory.mktemp("made") / "run").close()
    made.write(run, [(made.KEY, parts)], dtype=dtype)
    ends = st.one_of(st.none(), st.integers(-8, 8))
    index = tuple(
        data.draw(
            st.one_of(
                st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1, -3])),
                *([st.integers(-n, n - 1)] if n else []),
            )
        )
        for n in whole.shape[: data.draw(st.integers(0, whole.ndim))]
    )
    for folded in (False, True):
        if folded:
            fold(run)
            assert not list((run.path / "captures").rglob("*.pack"))
        tensor = open_run(run.path).tensor(SITE, 7)
        assert same(tensor[...], whole)
        assert same(tensor[index], np.array(whole[index], copy=True))
        for rank, (local, _) in parts.items():
            assert same(tensor.rank(rank), np.asarray(local))
    assert verify(open_run(run.path)).ok


def test_complex32_comes_back_as_complex64(run):
    halves = np.array([1.5, -2.25, 65504, 6e-8], np.float16)
    parts = {0: (halves.view(np.uint32), {"kind": "batch", "dim": 0, "ranks": [0]})}
    made.write(run, [(made.KEY, parts)], dtype="complex32")
    fold(run)
    found = open_run(run.path).tensor(SITE, 7)[...]
    assert found.tolist() == [1.5 - 2.25j, complex(65504, np.float16(6e-8))]


def test_parts_with_lengths_that_have_no_common_measure_are_stacked_one_chunk_each(run):
    whole = made.whole([301, 3], "float32")
    made.write(run, [(OUT, made.batch(whole, [100, 101, 100]))])
    fold(run)
    assert same(open_run(run.path).tensor("layers.0.mlp:output", 7)[98:103], whole[98:103])
    chunks = [k for k in tree(run.store / GROUP) if "/c/" in k]
    assert len(chunks) == 3


def test_stock_zarr_and_xarray_open_what_was_captured_and_what_stands_beside_it(run):
    exact, parts = made.whole([6, 4], "float32"), made.whole([6, 4], "bfloat16")
    at = ("layers.0.mlp", "layers.0.mlp.bias", "param", "")
    made.write(run, [(made.KEY, made.sharded(exact, [2], [0]))], step=7)
    made.write(run, [(at, made.sharded(parts, [2], [0]))], step=8)
    StoreWriter(run, "node_0000", durable=False).seal()
    root = zarr.open_group(run.store, mode="r")
    assert same(root[f"{GROUP}/t00000/value"][...], exact)
    bits = root["attempt_000/captures/step_0000000008/t00000/value"]
    assert (bits.dtype, bits.attrs["ddpprobe"]["dtype"]) == (np.uint16, "bfloat16")
    assert bits[...].tobytes() == parts.tobytes()
    for where in ("attempt_000/rank_00000", f"{GROUP}/t00000"):
        with xarray.open_zarr(run.store, group=where) as opened:
            assert opened.sizes
    with xarray.open_datatree(run.store / GROUP, engine="zarr") as events:
        assert events["t00000"]["value"].dims == ("d0", "d1")
    assert {p.stat().st_mode & 0o777 for p in run.store.rglob("*") if p.is_file()} == {0o600}


def test_every_chunk_has_one_writer_and_each_node_writes_its_own_ranks(run):
    whole = made.whole([10, 4], "float32")
    copies = {r: (whole, {"kind": "replicated"}) for r in range(4)}
    named = [(made.KEY, made.sharded(whole, [4], [0])), (OUT, copies)]
    made.write(run, named, per_node=2)
    fold(run, "node_0001")
    left = [p.parent.name for p in sorted((run.path / "captures").rglob("*.pack"))]
    # What node 0 will write of the replicas is not there yet, so nobody's pack may go.
    assert left == [f"rank_0000{r}" for r in range(4)]
    assert same(open_run(run.path).tensor(SITE, 7)[...], whole)
    fold(run, "node_0000")  # the last to write deletes the packs of both
    assert not list((run.path / "captures").rglob("*.pack"))
    written = [set(m.state.files) for m in StoredEvent(run, 0, 7).manifests[1:]]
    assert [len(w) for w in written] == [3, 2]
    assert not set.intersection(*written)
    assert same(open_run(run.path).tensor(SITE, 7)[...], whole)
    assert verify(open_run(run.path)).ok


def test_nodes_that_seal_at_once_leave_no_pack_behind(run, poll):
    whole = made.whole([10, 4], "float32")
    copies = {r: (whole, {"kind": "replicated"}) for r in range(4)}
    for step in (7, 9):
        named = [(made.KEY, made.sharded(whole, [4], [0])), (OUT, copies)]
        made.write(run, named, per_node=2, step=step)
    lock = DirectoryLock(make_dir(run.path / "manifest") / "captures.lock")
    with lock.held(0.0):  # a third daemon, whose disk is slow

        def waits(pid: int) -> bool:  # it has opened the file itself, beside what a fork inherits
            opened = [os.path.realpath(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            return opened.count(str(lock.path)) == 2

        nodes = [_sealing(run, f"node_{n:04d}") for n in range(2)]
        poll(lambda: all(map(waits, nodes)))
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in nodes] == [0, 0]
    assert not list((run.path / "captures").rglob("*.pack"))
    opened = open_run(run.path)
    assert all(same(opened.tensor(SITE, step)[...], whole) for step in (7, 9))
    assert verify(opened).ok


@pytest.mark.parametrize("refusal", [OSError(28, "No space left on device"), TimeoutError("held")])
def test_a_step_that_the_disk_refuses_keeps_no_other_from_the_store(run, monkeypatch, refusal):
    whole = made.whole([4, 4], "float32")
    for step in (7, 9, 11):
        made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))], step=step)
    commit, asked = capture_fold.commit_event, []

    def refusing(to: RunDir, event: capture_event.CaptureEvent, *, durable: bool) -> None:
        asked.append(event.step)
        if event.step == 7:
            raise refusal
        commit(to, event, durable=durable)

    with monkeypatch.context() as patched:
        patched.setattr(capture_fold, "commit_event", refusing)
        with pytest.raises(type(refusal), match=str(refusal.args[-1])):
            fold(run)
    waits = isinstance(refusal, TimeoutError)  # for a lock that all steps need
    assert asked == ([7] if waits else [7, 9, 11])
    left = {p.stem for p in (run.path / "captures").rglob("*.pack")}
    assert len(left) == (3 if waits else 1)
    fold(run)
    assert not list((run.path / "captures").rglob("*.pack"))
    opened = open_run(run.path)
    assert all(same(opened.tensor(SITE, step)[...], whole) for step in (7, 9, 11))


def _sealing(run: RunDir, node: str) -> int:
    """Seal in a child, as a node's daemon does; return its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            StoreWriter(run, node, durable=False).seal()
            code = 0
        finally:
            os._exit(code)
    return child


def test_what_nodes_without_a_common_directory_hold_is_there_and_the_rest_is_said(run):
    whole = made.whole([8, 4], "float32")
    named = [(made.KEY, made.sharded(whole, [4], [0])), (OUT, made.batch(whole, [2] * 4))]
    made.write(run, named, per_node=2, only=lambda rank: rank >= 2)
    fold(run, "node_0001")
    opened = open_run(run.path)
    (captured,) = opened.captures()
    assert (captured.ranks, captured.complete) == ((2, 3), False)
    sharded = opened.tensor(SITE, 7)
    assert same(sharded[4:], whole[4:])
    with pytest.raises(TensorError, match=r"parts of ranks \[1\] were not delivered"):
        sharded[3:5]
    joined = opened.tensor("layers.0.mlp:output", 7)
    with pytest.raises(TensorError, match="rank 0 delivered no part, how long it is nobody knows"):
        joined[...]
    assert same(joined.rank(3), whole[6:])
    report = verify(opened)
    assert report.ok
    assert any("nothing came from the ranks [0, 1]" in note for note in report.notes)
    stock = zarr.open_array(run.store, path=f"{GROUP}/t00001/value", mode="r")
    assert np.isnan(stock[:4]).all()


@pytest.mark.parametrize(
    ("reason", "missed"), [("nonfinite", False), ("capture", True), ("trigger: odd", True)]
)
def test_ranks_that_kept_nothing_are_missed_only_if_they_were_to(run, reason, missed):
    named = [(OUT, {2: (made.whole([4, 4], "float32"), {"kind": "local"})})]
    made.write(run, named, world=4, only=lambda rank: rank == 2, reason=reason)
    fold(run)
    opened = open_run(run.path)
    (captured,) = opened.captures()
    assert (captured.ranks, captured.complete) == ((2,), not missed)
    report = verify(opened)
    assert report.ok
    said = [f"run.zarr/{GROUP}: nothing came from the ranks [0, 1, 3]"]
    assert report.notes == (said if missed else [])


def test_of_very_many_silent_ranks_the_first_are_named(run):
    named = [(OUT, {0: (made.whole([4, 4], "float32"), {"kind": "local"})})]
    made.write(run, named, world=1 << 19, only=lambda rank: rank == 0)
    fold(run)
    (note,) = verify(open_run(run.path)).notes
    assert note.endswith(f"31, 32] and {(1 << 19) - 33} more")


def test_an_event_of_too_many_parts_on_too_many_ranks_keeps_its_parts(run, monkeypatch):
    monkeypatch.setattr(capture_event, "MAX_LOOKS", 2 * (4 * 4 + 4 * 1024))
    whole = made.whole([8, 4], "float32")
    keys = [(*made.KEY[:1], f"w{i}", *made.KEY[2:]) for i in range(3)]
    made.write(run, [(key, made.sharded(whole, [4], [0])) for key in keys])
    for name in ("packs", "store"):
        opened = open_run(run.path)
        assert same(opened.tensor("w1:param", 7)[...], whole), name
        last = opened.tensor("w2:param", 7)
        assert last.why == "the event has too many parts on too many ranks"
        assert same(last.rank(3), whole[6:])
        if name == "packs":
            fold(run)
    assert verify(opened).ok


def test_zeros_are_stored_and_read_only_where_they_are_wanted(run, monkeypatch):
    parts = made.sharded(np.zeros([8, 4], np.float32), [4], [0])
    made.write(run, [(made.KEY, parts)])
    fold(run)
    tensor = open_run(run.path).tensor(SITE, 7)
    read: list[str] = []
    load = StoredEvent._load
    monkeypatch.setattr(StoredEvent, "_load", lambda self, key: read.append(key) or load(self, key))
    assert not tensor[2:5, 1].any()
    assert read == ["t00000/value/c/1/0", "t00000/value/c/2/0"]
    chunk = run.store / GROUP / "t00000/value/c/1/0"
    chunk.unlink()
    with pytest.raises(StoreDamaged, match="missing"):
        tensor[2:5]
    assert [lost.where for lost in verify(open_run(run.path)).damage] == [
        f"run.zarr/{GROUP}/t00000/value/c/1/0"
    ]


def test_replicas_are_stored_once_and_their_differences_are_said(run):
    whole = made.whole([3, 4], "float32")
    other = whole.copy()
    other.view(np.uint32)[1, 1] ^= 1
    said = {"kind": "replicated"}
    named = [
        (made.KEY, dict.fromkeys(range(3), (whole, said))),
        (OUT, {0: (whole, said), 1: (whole, said), 2: (other, said)}),
    ]
    made.write(run, named)
    fold(run)
    opened = open_run(run.path)
    assert [r.ranks for r in opened.tensor(SITE, 7).regions] == [(0, 1, 2)]
    differing = opened.tensor("layers.0.mlp:output", 7)
    with pytest.raises(TensorError, match="ranks 0 and 2 should hold the same bytes"):
        differing[...]
    assert same(differing.rank(2), other)
    assert [r.ranks for r in differing.regions] == [(0, 1), (2,)]


def test_pieces_of_the_batch_on_several_meshes_are_joined(run):
    whole = made.whole([6, 4], "float32")
    parts = {}
    for at, ranks in ((0, [0, 1]), (3, [2, 3])):
        piece = made.sharded(whole[at : at + 3], [2], [1])
        parts |= {ranks[r]: (x, {**lies, "ranks": ranks}) for r, (x, lies) in piece.items()}
    made.write(run, [(OUT, parts)])
    fold(run)
    assert same(open_run(run.path).tensor("layers.0.mlp:output", 7)[...], whole)


@pytest.mark.parametrize("harm", ["torn", "index", "data", "another's"])
def test_a_damaged_pack_is_lost_and_never_used(run, harm):
    whole = made.whole([8, 4], "float32")
    made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))])
    path = run.pack(0, "node_0000", 1, 7)
    data = bytearray(path.read_bytes())
    if harm == "torn":
        data = data[:-9]
    elif harm == "another's":
        data = bytearray(run.pack(0, "node_0000", 0, 7).read_bytes())
    else:
        data[5 if harm == "data" else -80] ^= 4
    path.write_bytes(data)
    for folded in (False, True):
        if folded:
            folder = fold(run)
            assert path.exists()
            assert folder.damaged
        opened = open_run(run.path)
        tensor = opened.tensor(SITE, 7)
        assert same(tensor[:4], whole[:4])
        with pytest.raises((TensorError, PackDamaged)):
            tensor[...]
        assert not verify(opened).ok


def test_a_fold_waits_for_the_other_ranks_and_keeps_what_comes_too_late(run, monkeypatch):
    whole = made.whole([8, 4], "float32")
    named = [(made.KEY, made.sharded(whole, [2], [0])), (OUT, made.batch(whole, [4, 4]))]
    made.write(run, named, only=lambda rank: rank == 0)
    fold(run, final=False)
    assert run.pack(0, "node_0000", 0, 7).exists()
    monkeypatch.setattr(capture_fold, "PATIENCE_SECONDS", 0.0)
    impatient = CaptureFold(run, Root(run, durable=False), "node_0000", durable=False, patience=0.0)
    impatient.fold(0, final=False)
    assert not run.pack(0, "node_0000", 0, 7).exists()
    made.write(run, named, only=lambda rank: rank == 1)
    impatient.fold(0, final=False)
    impatient.fold(0, final=True)
    for site in (SITE, "layers.0.mlp:output"):
        assert same(open_run(run.path).tensor(site, 7)[...], whole)
    (captured,) = open_run(run.path).captures()
    assert captured.complete
    report = verify(open_run(run.path))
    assert report.ok
    says = "the packs of ranks [1] are not in the store, they are read as they are"
    assert report.notes == [f"run.zarr/{GROUP}: {says}"]


def test_a_fold_killed_at_any_write_is_repeated_to_the_same_bytes(run, tmp_path):
    whole = made.whole([9, 4], "bfloat16")
    named = [(made.KEY, made.sharded(whole, [2], [0])), (OUT, made.batch(whole, [4, 5]))]
    made.write(run, named, dtype="bfloat16")
    packed = {p: p.read_bytes() for p in (run.path / "captures").rglob("*.pack")}
    fold(run)
    expected = tree(run.store)
    for kill_at in range(1, 60, 4):
        again = Made(tmp_path / f"{kill_at}").whole(4).close()
        for path, data in packed.items():
            new = again.path / path.relative_to(run.path)
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
        survived = not _killed_in(again, kill_at)
        assert same(open_run(again.path).tensor(SITE, 7)[...], whole)
        assert verify(open_run(again.path)).ok
        fold(again)
        assert tree(again.store) == expected
        assert not list((again.path / "captures").rglob("*.pack"))
        assert verify(open_run(again.path)).ok
        if survived:
            break
    assert survived
    assert kill_at > 12


_CHANGES = ((os, "write"), (os, "writev"), (os, "replace"), (os, "unlink"), (Path, "unlink"))


def _killed_in(run: RunDir, kill_at: int) -> bool:
    """Fold in a child that is killed before its n-th write or deletion; whether it came to that."""
    child = os.fork()
    if child == 0:
        left = [kill_at]

        def counted(call):
            def before(*arguments, **keywords):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **keywords)

            return before

        for owner, name in _CHANGES:
            setattr(owner, name, counted(getattr(owner, name)))
        fold(run)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_capsules_hold_a_call_and_the_state_whichever_rank_kept_it(run):
    whole = made.whole([6, 4], "float32")
    named = [(made.KEY, {0: (whole, {"kind": "replicated"})}), (OUT, made.batch(whole, [3, 3]))]
    root = ("", "", "output", "")
    made.write(run, [*named, (root, made.batch(whole, [3, 3]))], world=2)
    for folded in (False, True):
        if folded:
            fold(run)
        first, second = open_run(run.path).capsules(7, "layers.0.mlp")
        assert (first.rank, second.rank, second.micro, second.call) == (0, 1, 0, 0)
        assert second.about["class"] == "made.Module"
        weight = second.tensors["param", "layers.0.mlp.weight", ""]
        output = second.tensors["output", "layers.0.mlp", ""]
        assert same(weight.read(), whole)
        assert same(output.read(), whole[3:])
        assert (output.rank, output.shape, output.dtype) == (1, (3, 4), "float32")
        outer = open_run(run.path).capsules(7, "")[1]  # which contains the module of the weight
        assert set(outer.tensors) == {("output", "", ""), ("param", "layers.0.mlp.weight", "")}


def test_what_was_not_captured_is_told_with_what_was(run):
    made.write(run, [(("m", "m", "output", leaf), made.batch(np.ones([4], np.float32), [2, 2]))
                     for leaf in "ab"])  # fmt: skip
    opened = open_run(run.path)
    for arguments, text in [
        (("m:output", 7), r"several tensors: m:output\[a\], m:output\[b\]; name one"),
        (
            ("m:output[c]", 7),
            r"was not captured at this step; nearest: m:output\[[ab]\], m:output",
        ),
        (("m:output[a]", 8), r"step 8 was not captured; these steps were: \[7\]"),
        (("m:output[a]", 7, 0, 1), r"of the \(micro, call\) \[\(0, 0\)\] only"),
        (("output", 7), "write a site as fqn:kind"),
    ]:
        with pytest.raises(TensorError, match=text):
            opened.tensor(*arguments)


def test_a_tensor_is_found_by_the_name_that_statistics_of_it_are_printed_with(run):
    half = [np.full([4], value, np.float32) for value in (1, 2)]
    made.write(run, [
        ((fqn, fqn, "output", leaf), made.batch(whole, [2, 2]))
        for fqn in ("m", "") for leaf, whole in zip("ab", half, strict=True)
    ])  # fmt: skip
    opened = open_run(run.path)
    for site in ("m:output[b]", "m[b]:output", "(root)[b]:output", "(root):output[b]"):
        assert same(opened.tensor(site, 7)[:], half[1])


@pytest.mark.parametrize("lies", [
    {"kind": "flat", "start": -1, "stop": 5, "shape": [4]},
    {"kind": "batch", "dim": 9, "ranks": [0, 1]},
    {"kind": "dtensor", "ranks": [0, 1], "mesh": [1 << 40], "shape": [4], "axes": []},
    {"kind": "dtensor", "ranks": [0, 1], "mesh": [2], "shape": [8],
     "axes": [["shard", 0, 1 << 60, ""]]},
    {"kind": "dtensor"},
    {"kind": "dtensor", "ranks": [0, 1], "mesh": [2], "shape": [1 << 62],
     "axes": [["shard", 0, 1, ""]]},
])  # fmt: skip
def test_a_layout_that_makes_no_sense_costs_the_whole_but_no_part(run, lies):
    parts = {r: (np.full([4], r, np.float32), lies) for r in range(2)}
    made.write(run, [(made.KEY, parts)])
    fold(run)
    tensor = open_run(run.path).tensor(SITE, 7)
    assert tensor.shape is None
    assert tensor.rank(1).tolist() == [1, 1, 1, 1]


def test_a_pack_that_a_rank_says_it_wrote_is_missed(tmp_path):
    writing = Made(tmp_path / "run")
    for rank in range(2):
        told = {"event": "captured", "step": 7, "bytes": 1, "reason": "capture"}
        writing.writer(rank).append_json(framing.LIFE, told)
    run = writing.close()
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))])
    assert verify(open_run(run.path)).ok
    run.pack(0, "node_0000", 1, 7).unlink()
    (lost,) = verify(open_run(run.path)).damage
    why = "the packs that ranks [1] wrote are neither here nor in the store"
    assert lost == Lost("captures/000", (7, 7), why)
    fold(run)
    assert not verify(open_run(run.path)).ok


def test_an_event_with_more_metadata_than_readers_take_stays_packs(run, monkeypatch):
    whole = made.whole([8], "float32")
    made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))])
    monkeypatch.setattr(capture_commit, "MAX_EVENT_BYTES", 1000)
    assert "stays packs" in next(iter(fold(run).damaged.values()))
    assert same(open_run(run.path).tensor(SITE, 7)[...], whole)
    assert verify(open_run(run.path)).ok


def test_altered_metadata_is_believed_in_nothing(run):
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))])
    fold(run)
    path = run.store / GROUP / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b'"d0"', b'"d1"'))
    with pytest.raises(TensorError, match="not what was committed"):
        open_run(run.path).tensor(SITE, 7)
    assert not verify(open_run(run.path)).ok


def test_a_damaged_list_of_what_expired_hides_nothing(run):
    whole = made.whole([8], "float32")
    made.write(run, [(made.KEY, made.sharded(whole, [2], [0]))])
    fold(run)
    path = run.store / "attempt_000/captures/zarr.json"
    path.write_bytes(path.read_bytes().replace(b"[]", b"[7]"))
    opened = open_run(run.path)
    assert [c.step for c in opened.captures()] == [7]
    assert same(opened.tensor(SITE, 7)[...], whole)
    (lost,) = verify(opened).damage
    assert lost.where == "run.zarr/attempt_000/captures"
    assert "zarr.json" in lost.why


def test_a_damaged_line_of_the_captures_manifest_is_told_as_the_manifests(run):
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))])
    fold(run)
    log = Manifest(manifest_path(run, captures_key(0))).path
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0].replace(b'"', b"'", 1) + b"".join(lines[1:]))
    told = [lost for lost in verify(open_run(run.path)).damage if log.name in lost.where]
    assert told == [Lost(f"manifest/{log.name}", None, text) for text in Manifest(log).damage]
    assert told


def test_reading_captures_loads_neither_torch_nor_zarr(run):
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "bfloat16"), [2], [0]))])
    fold(run)
    code = (
        "import sys; from ddpprobe.reader.run import open_run\n"
        f"print(open_run({str(run.path)!r}).tensor({SITE!r}, 7)[...].dtype)\n"
        "print(*({'torch', 'zarr'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bfloat16"]


def test_every_dtype_of_a_pack_can_be_stored():
    assert all(dtypes.item_bytes(name) == size for name, size in tensor_pack.ITEM_SIZES.items())


def test_a_part_that_its_node_lost_before_it_folded_is_named_with_its_step(run):
    named = [(made.KEY, made.sharded(made.whole([8, 4], "float32"), [4], [0]))]
    made.write(run, named, per_node=2)
    fold(run, "node_0000")
    assert verify(open_run(run.path)).ok
    for rank in (2, 3):
        run.pack(0, "node_0001", rank, 7).unlink()
    assert verify(open_run(run.path)).damage == [
        Lost(f"run.zarr/{GROUP}/t00000", (7, 7), f"{SITE}: the part of ranks [{rank}] is nowhere")
        for rank in (2, 3)
    ]


def test_the_captures_of_every_attempt_are_checked(run):
    for attempt, step in ((0, 7), (0, 9), (1, 3)):
        named = [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))]
        made.write(run, named, attempt=attempt, step=step)
    assert verify_captures.captured_events(run, [0, 1]) == [(0, 7), (0, 9), (1, 3)]


@pytest.mark.parametrize("settles", [True, False])
def test_what_is_damaged_otherwise_at_every_look_is_damage_at_the_last_one(
    run, monkeypatch, settles
):
    """Each look but the last compares two readings, and a fold may move all between them."""
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))])
    readings = [Lost(str(n), (7, 7), "damaged") for n in range(2 * (verify_captures.LOOKS - 1))]
    last = [] if settles else [Lost("last", (7, 7), "damaged")]
    said = iter([*([lost] for lost in readings), last])
    monkeypatch.setattr(verify_captures, "_damage", lambda *_: next(said))
    assert verify(open_run(run.path)).damage == last
    assert next(said, None) is None


def test_a_tensor_that_was_damaged_in_its_pack_is_named_with_its_step(run):
    made.write(run, [(made.KEY, made.sharded(made.whole([8], "float32"), [2], [0]))])
    path = run.pack(0, "node_0000", 1, 7)
    data, part = path.read_bytes(), made.whole([8], "float32")[4:].tobytes()
    assert data.count(part) == 1
    path.write_bytes(data.replace(part, bytes(len(part))))
    (lost,) = verify(open_run(run.path)).damage
    assert (lost.where, lost.steps) == (str(path.relative_to(run.path)), (7, 7))


def test_a_tensor_of_one_node_that_was_lost_before_it_folded_is_named(run):
    """All that ever held any of it is gone: a stage of a pipeline, say."""
    whole = made.whole([8, 4], "float32")
    alone = {rank: (whole, {"kind": "replicated"}) for rank in (2, 3)}
    named = [(made.KEY, made.sharded(whole, [2], [0])), (OUT, alone)]
    made.write(run, named, per_node=2, world=4)
    fold(run, "node_0000")
    assert verify(open_run(run.path)).ok
    for rank in (2, 3):
        run.pack(0, "node_0001", rank, 7).unlink()
    (lost,) = verify(open_run(run.path)).damage
    assert lost.steps == (7, 7)
    assert lost.why == "layers.0.mlp:output: the part of ranks [2, 3] is nowhere"
