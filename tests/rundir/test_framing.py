"""Frames survive the way through bytes exactly, and damage is never taken for data."""

from __future__ import annotations

import zlib
from collections import ChainMap
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.records.step import COUNTS, VALUES, Anomaly, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing, validate

names = st.text(max_size=20)  # module names are a stranger's: any text, lone surrogates too
numbers = st.floats(allow_nan=True, allow_infinity=True)

checksums = st.integers(-(2**63), 2**63 - 1)
ranks = st.integers(1, 2**600)  # a bit mask: any number of ranks
held = st.dictionaries(checksums, ranks, min_size=1, max_size=3)
digests = st.dictionaries(st.tuples(names, names), held, max_size=3)


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    n = draw(st.integers(0, 4))
    sites = tuple(Site(draw(names), "output", draw(names), dtype="float32") for _ in range(n))
    counts = np.array(draw(st.lists(st.integers(0, 2**62), min_size=7 * n, max_size=7 * n)), int)
    values = np.array(draw(st.lists(numbers, min_size=4 * n, max_size=4 * n)), float)
    bad = FirstBad(7, 1, "backward", 12, 3, draw(names), "grad_output", nan=3, numel=9)
    return StepRecord(
        attempt=2, step=7, ranks=(3,), wall_time_ns=2**61, sampled=draw(st.booleans()), sites=sites,
        counts=counts.reshape(n, len(COUNTS)), values=values.reshape(n, len(VALUES)),
        scalars={3: {"loss": draw(numbers), draw(names): 1.5}},
        first_bad=bad if draw(st.booleans()) else None, skipped=draw(st.booleans()),
        partial=draw(st.booleans()), missing=(0, 1), digests=draw(digests),
    )  # fmt: skip


@given(records())
def test_a_record_comes_back_bit_for_bit(record: StepRecord) -> None:
    back = framing.decode_record(framing.encode_record(record), tables_for(record))
    assert (back.attempt, back.step) == (2, 7)
    assert back.counts.tobytes() == record.counts.tobytes()
    assert back.values.tobytes() == record.values.tobytes()
    assert back.digests == record.digests
    assert (back.sites, back.first_bad, back.ranks) == (record.sites, record.first_bad, (3,))
    assert (back.sampled, back.skipped, back.partial, back.missing, back.wall_time_ns) == (
        record.sampled, record.skipped, record.partial, (0, 1), 2**61,
    )  # fmt: skip
    assert repr(back.scalars) == repr(dict(record.scalars))


@given(st.binary(max_size=64), st.data())
def test_a_flipped_bit_is_always_noticed(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(framing.encode_frame(framing.LIFE, 5, payload))
    at = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[at // 8] ^= 1 << at % 8
    with pytest.raises(framing.FrameError):
        framing.decode_frame(bytes(frame))


def test_a_flipped_sign_is_noticed_as_any_other_bit() -> None:
    frame = bytearray(framing.encode_frame(framing.LIFE, 5, b"x"))
    frame[framing.HEADER.size - 1] ^= 0x80  # of its number
    with pytest.raises(framing.FrameError, match="checksum mismatch at byte 0"):
        framing.decode_frame(bytes(frame))


@given(st.binary(max_size=64), st.data())
def test_a_cut_frame_is_torn_and_not_damaged(payload: bytes, data: st.DataObject) -> None:
    frame = framing.encode_frame(framing.LIFE, 5, payload)
    cut = data.draw(st.integers(0, len(frame) - 1))
    where = "header" if cut < framing.HEADER.size else "payload"
    with pytest.raises(framing.FrameError, match=f"^the stream ends inside a {where}$") as error:
        framing.decode_frame(frame[:cut])
    assert error.value.torn


def test_a_block_of_frames_is_read_to_its_end_and_no_further_than_what_is_torn() -> None:
    frames = [framing.encode_frame(framing.LIFE, seq, b"{}" * seq) for seq in range(3)]
    block = b"".join(frames)
    assert [(f.seq, f.payload) for f in framing.iter_frames(block)] == [
        (0, b""), (1, b"{}"), (2, b"{}{}"),
    ]  # fmt: skip
    assert list(framing.iter_frames(b"")) == []
    with pytest.raises(framing.FrameError, match="ends inside a payload"):
        list(framing.iter_frames(block[:-1]))


def test_the_length_of_a_frame_is_read_ahead_where_its_header_is_whole() -> None:
    data = b"before" + framing.encode_frame(framing.LIFE, 5, b"x" * 300)
    assert framing.length_at(data, 6) == 300
    assert framing.length_at(data[: 6 + framing.HEADER.size], 6) == 300
    assert framing.length_at(data[: 5 + framing.HEADER.size], 6) == framing.HEADER.size


def test_an_absurd_length_is_refused_without_reading_it() -> None:
    header = framing.HEADER.pack(framing.MAGIC, framing.LIFE, 0, 2**32 - 1, 0, 0)
    with pytest.raises(framing.FrameError, match="no frame at byte 0"):
        framing.decode_frame(header)


def test_the_longest_payload_that_there_may_be_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_PAYLOAD", 10)
    frame, _ = framing.decode_frame(framing.encode_frame(framing.LIFE, 0, b"x" * 10))
    assert frame.payload == b"x" * 10
    with pytest.raises(framing.FrameError, match="no frame at byte 0"):
        framing.decode_frame(framing.encode_frame(framing.LIFE, 0, b"x" * 11))


def test_frames_that_are_tables_are_known_and_their_sites_told() -> None:
    tables = framing.NameTables()
    for type_, payload, taken in (
        (framing.SITES, b'[["a","output","","local",true,""]]', True),
        (framing.PARAMETERS, b'[["w",""]]', True),
        (framing.LIFE, b"{}", False),
    ):
        assert tables.take(framing.Frame(type_, 0, payload)) is taken
    assert list(tables.sites()) == [Site("a", "output")]
    with pytest.raises(ValueError, match="^not a table: "):
        tables.take(framing.Frame(framing.SITES, 0, b"[1]"))


def test_a_record_without_sites_or_checksums_has_no_tables() -> None:
    plain = StepRecord(0, 4, (0,), 0)
    assert framing.tables_of(plain) == []
    assert [t.type for t in framing.tables_of(of_rank(0))] == [framing.PARAMETERS]
    back = framing.decode_record(framing.encode_record(plain), framing.NameTables())
    assert (back.sites, back.digests) == ((), {})


def test_rows_of_any_type_and_order_are_written_as_those_of_the_format() -> None:
    sites = (Site("a", "output"), Site("b", "output"))
    counts, values = np.arange(14).reshape(2, 7), np.arange(8.0).reshape(2, 4)
    for as_counts, as_values in (("<i4", "<f4"), (">i8", ">f8"), ("<u2", "<f2")):
        odd = StepRecord(
            0, 4, (0,), 0, True, sites, np.asfortranarray(counts.astype(as_counts)),
            np.asfortranarray(values.astype(as_values)),
        )  # fmt: skip
        back = framing.decode_record(framing.encode_record(odd), tables_for(odd))
        assert (back.counts.tolist(), back.values.tolist()) == (counts.tolist(), values.tolist())


def test_a_record_without_its_site_table_is_refused() -> None:
    record = StepRecord(
        0, 4, (0,), 0, True, (Site("a", "output"),), np.zeros((1, 7), int), np.zeros((1, 4))
    )
    with pytest.raises(ValueError, match="step 4 refers to an unknown site table"):
        framing.decode_record(framing.encode_record(record), framing.NameTables())


def tables_for(record: StepRecord) -> framing.NameTables:
    tables = framing.NameTables()
    for table in framing.tables_of(record):
        tables.take(framing.Frame(table.type, 0, table.payload))
    return tables


def of_rank(rank: int) -> StepRecord:
    held = {(f"w{i}", ""): {i - 2**63: 1 << rank} for i in range(100)}
    return StepRecord(0, 4, (rank,), 0, digests=held)


def test_a_record_without_its_parameter_table_is_refused() -> None:
    with pytest.raises(ValueError, match="step 4 refers to an unknown parameter table"):
        framing.decode_record(framing.encode_record(of_rank(0)), framing.NameTables())


def test_what_a_rank_writes_does_not_grow_with_the_number_of_ranks() -> None:
    small, large = (len(framing.encode_record(of_rank(rank))) for rank in (1, 16_000))
    assert large - small < 20
    assert large < 100 * 17 + 300  # and a checksum is a few bytes, without its name


def test_checksums_of_what_a_record_does_not_name_are_refused() -> None:
    record = of_rank(3)
    payload = framing.encode_record(record)
    size = int.from_bytes(payload[:4], "little")
    head = payload[4 : 4 + size]
    for made in (head.replace(b'[[3,"1"]]', b"[]"), head.replace(b"[[3,", b"[[3000000000,")):
        assert made != head
        garbled = len(made).to_bytes(4, "little") + made + payload[4 + size :]
        with pytest.raises(ValueError, match="a checksum of"):
            framing.decode_record(garbled, tables_for(record))


def test_sets_of_ranks_that_are_too_large_together_are_refused() -> None:
    record = of_rank(3)
    payload = framing.encode_record(record)
    size = int.from_bytes(payload[:4], "little")
    far = f'[{validate.MAX_RANKS - 1},"1"]'
    many = ",".join([far] * (framing.MAX_MASK_BITS // validate.MAX_RANKS))
    made = payload[4 : 4 + size].replace(b'[3,"1"]', many.encode())
    garbled = len(made).to_bytes(4, "little") + made + payload[4 + size :]
    with pytest.raises(ValueError, match="sets of ranks that are too large to be kept"):
        framing.decode_record(garbled, tables_for(record))


def test_equal_tables_are_one_object_whoever_wrote_them() -> None:
    sites = [(Site("a", "output"), Site("b", "output")) for _ in range(2)]
    counts, values = np.zeros((2, len(COUNTS)), int), np.zeros((2, len(VALUES)))
    read = [
        framing.decode_record(framing.encode_record(r), tables_for(r)).sites
        for r in (StepRecord(0, 1, (0,), 0, True, s, counts, values) for s in sites)
    ]
    assert read[0] is read[1]
    assert read[0] == sites[0]


def test_a_json_frame_must_hold_an_object() -> None:
    with pytest.raises(ValueError, match="holds list, expected a JSON object"):
        framing.Frame(framing.LIFE, 0, b"[1]").json()


def test_an_anomaly_comes_back_equal() -> None:
    anomaly = Anomaly(
        "nonfinite", "page", 4, 0, 1, "a.b", "output", "forward", True, "x", {"nan": 3}, True
    )
    assert framing.decode_anomaly(framing.encode_anomaly(anomaly)) == anomaly


def test_the_bytes_of_a_record_are_those_that_were_always_written() -> None:
    """What an older version has written is read by a newer one, and the other way round."""
    sites = (Site("a", "output", "0", "sharded", False, "float32"), Site("", "grad"))
    counts, values = np.arange(14).reshape(2, 7), np.arange(8.0).reshape(2, 4)
    bad = FirstBad(4, 1, "backward", 12, 3, None, None, nan=3, numel=9)
    record = StepRecord(
        1, 4, (3, 5), 77, sites=sites, counts=counts, values=values, scalars={3: {"loss": 0.5}},
        first_bad=bad, missing=(4,), digests={("w", "0/2"): {-9: 0b101000}, ("v", ""): {8: 1}},
        binned=np.array([1]), bins=np.arange(128)[None] % 2 * (np.arange(128) < 4),
    )  # fmt: skip
    table, other = framing.tables_of(record)
    assert (table.type, table.payload) == (
        framing.SITES,
        b'[["a","output","0","sharded",false,"float32"],["","grad","","local",true,""]]',
    )
    assert (other.type, other.payload) == (framing.PARAMETERS, b'[["w","0/2"],["v",""]]')
    assert [t.id for t in (table, other)] == [zlib.crc32(t.payload) for t in (table, other)]
    payload = framing.encode_record(record)
    size = int.from_bytes(payload[:4], "little")
    head, rows = payload[4 : 4 + size], payload[4 + size :]
    assert head.rstrip().decode() == (
        f'{{"sites":{table.id},"parameters":{other.id},"n":2,"held":[[3,"5"],[0,"1"]],'
        '"attempt":1,"step":4,"ranks":[3,5],"wall_time_ns":77,"sampled":true,'
        '"scalars":{"3":{"loss":0.5}},"first_bad":{"step":4,"micro":1,"phase":"backward",'
        '"order":12,"rank":3,"fqn":null,"kind":null,"leaf":"","nan":3,"pos_inf":0,"neg_inf":0,'
        '"numel":9},"skipped":false,"partial":false,"missing":[4],"histograms":[[1,1,[1,0,1]]]}'
    )
    held = b"".join(
        p.to_bytes(4, "little") + c.to_bytes(8, "little", signed=True) + g.to_bytes(4, "little")
        for p, c, g in ((0, -9, 0), (1, 8, 1))
    )
    assert rows == counts.astype("<i8").tobytes() + values.astype("<f8").tobytes() + held


@given(names)
def test_the_rows_of_a_record_begin_where_eight_bytes_do_and_no_later(name: str) -> None:
    payload = framing.encode_record(StepRecord(0, 4, (0,), 0, scalars={0: {name: 1.0}}))
    size = int.from_bytes(payload[:4], "little")
    head = payload[4 : 4 + size]
    assert (4 + size) % 8 == 0
    assert size - len(head.rstrip()) < 8


def test_whatever_mapping_and_number_is_written_is_plain_json() -> None:
    value = {
        "read-only": MappingProxyType({"a": np.float32(1.5)}),
        "of several": ChainMap({"b": np.int64(3)}, {"c": np.bool_(True)}),
    }
    assert framing.encode_json(value) == (b'{"read-only":{"a":1.5},"of several":{"c":true,"b":3}}')
    with pytest.raises(TypeError, match="^cannot encode set as JSON$"):
        framing.encode_json({"a": {1}})
