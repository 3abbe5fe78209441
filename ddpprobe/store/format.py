"""The contract of `run.zarr`, version 1: names, dimensions, dtypes, codecs, attributes.

Everything a reader may meet is built here as plain Zarr v3 metadata, so that "is this array of the
format" is a comparison with what this file would have written. Group and array names are ids; names
of modules, hosts and ranks are data. Every codec chain ends in crc32c: Zarr's default chains hand
out flipped bits without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ddpprobe.records.step import COUNTS, KINDS, PHASES, PLACEMENTS, VALUES
from ddpprobe.rundir import paths
from ddpprobe.rundir.validate import MALFORMED

FORMAT_VERSION = paths.FORMAT_VERSION
CONVENTIONS = "CF-1.11"

# Rows per block of statistics: at 1500 sites one commit costs 60-70 ms (0.25 ms a row), and the
# tail that only the journal holds stays short.
BLOCK = 256
# One-dimensional columns are rewritten as they grow, so their chunk trades the cost of a commit
# against the number of files that opening a run has to read.
COLUMN_CHUNK = 16384
SITE_CHUNK_STEP = 64
SITE_CHUNK_MAX = 2048  # 256 x 2048 x 7 int64 = 28 MiB: zarr needs twice a shard to write it
# Sites per inner chunk of one statistic. 256 x 128 x 8 bytes fit a CPU's cache: a block of 1500
# sites is written in half the time that whole columns take, and one series reads a twelfth of it.
SITE_PART = 128
RANK_CHUNK = 64
DIGEST_CHUNK = 512  # parameters; 256 x 512 int64 are 1 MiB
SCALAR_CHUNK = 32
MAX_CHUNK_BYTES = 64 << 20  # a reader allocates no more than this for one chunk, whatever it says

ITEM_BYTES = {"int64": 8, "int32": 4, "int8": 1, "uint8": 1, "float64": 8, "string": 16}
NUMPY = {"int64": "<i8", "int32": "<i4", "int8": "i1", "uint8": "u1", "float64": "<f8"}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a group.

    Attributes:
        name: array name, an id.
        dims: dimension names; the first one is the axis along which rows are appended.
        dtype: Zarr data type.
        fill: value of what was never written; never to be taken for data.
        split: store the last dimension as one inner chunk per column inside a Zarr shard, so that
            one statistic can be read without the others.
        blocks: one-dimensional, but chunked and written once like the statistics, not rewritten as
            it grows: its strings may be long.
        optional: it is there only if something of it was written, and then in those blocks; what
            was never written is `fill`. Readers that do not know it leave it alone.
        attrs: attributes, CF where CF has a word for it.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    fill: int | str
    split: bool = False
    blocks: bool = False
    optional: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rewritten(self) -> bool:
        """Whether it is rewritten as it grows, in chunks of `COLUMN_CHUNK`."""
        return len(self.dims) == 1 and not self.blocks


def _column(name: str, dims: str, dtype: str, text: str, **attrs: Any) -> ArraySpec:  # noqa: ANN401
    fill = {"float64": "NaN", "string": ""}.get(dtype, -1 if dtype.startswith("i") else 0)
    return ArraySpec(name, tuple(dims.split()), dtype, fill, attrs={"long_name": text, **attrs})


def _flags(meanings: Sequence[str]) -> dict[str, Any]:
    return {"flag_values": list(range(len(meanings))), "flag_meanings": " ".join(meanings)}


# Kinds that came later are numbers beyond these, so that the array is what it was in version 1.
_NAMED_KINDS = KINDS[: KINDS.index("grad") + 1]
_TIME = {"units": "nanoseconds since 1970-01-01T00:00:00", "calendar": "proleptic_gregorian"}
_ON_SITES = {"coordinates": "wall_time fqn kind leaf placement primary dtype"}
_FIRST_BAD = tuple(
    _column(
        f"first_bad_{name}", "step", "int64", f"first non-finite local tensor: {text}; -1: none"
    )
    for name, text in (
        ("step", "optimizer step"),
        ("micro", "micro-batch"),
        ("order", "position in the rank's execution order"),
        ("rank", "rank"),
        ("nan", "NaN elements"),
        ("pos_inf", "+Inf elements"),
        ("neg_inf", "-Inf elements"),
        ("numel", "elements"),
    )
)
_RECORDS = (
    ArraySpec(
        "counts", ("step", "site", "count_stat"), "int64", 0, split=True,
        attrs={"long_name": "exact counts of elements", **_ON_SITES},
    ),
    ArraySpec(
        "values", ("step", "site", "value_stat"), "float64", "NaN", split=True,
        attrs={"long_name": "statistics over the finite elements", **_ON_SITES},
    ),
    ArraySpec(
        "order", ("step", "site"), "int32", -1,
        attrs={
            "long_name": "row of the site in the step's record (execution order); -1: no row",
            **_ON_SITES,
        },
    ),
    ArraySpec(
        "histograms_json", ("step",), "string", "", blocks=True, optional=True,
        attrs={"long_name": "histograms of named sites, a JSON list; empty: none"},
    ),
    _column("step", "step", "int64", "optimizer step"),
    _column("wall_time", "step", "int64", "end of the step", standard_name="time", **_TIME),
    _column("sampled", "step", "uint8", "1: statistics were taken"),
    _column("skipped", "step", "uint8", "1: the optimizer did not step (found inf)"),
    _column("partial", "step", "uint8", "1: the step never reached its end"),
    *_FIRST_BAD,
    _column("first_bad_phase", "step", "int8", "phase of it; -1: none", **_flags(PHASES)),
    _column(
        "first_bad_kind",
        "step",
        "int8",
        "kind of its site; -1: unknown",
        **_flags(_NAMED_KINDS),
    ),
    _column("first_bad_named", "step", "uint8", "1: first_bad_fqn is known"),
    _column("first_bad_fqn", "step", "string", "module or parameter path"),
    _column("first_bad_leaf", "step", "string", "path inside a structured output"),
    _column("site", "site", "string", "fqn[leaf]:kind"),
    _column("fqn", "site", "string", "module or parameter path; empty: the root module"),
    _column("kind", "site", "string", "what is observed there"),
    _column("leaf", "site", "string", "path of the tensor inside a structured output"),
    _column("placement", "site", "string", " ".join(PLACEMENTS)),
    _column("primary", "site", "uint8", "1: counted in the global value"),
    _column("dtype", "site", "string", "dtype of the tensor"),
    _column("scalar", "scalar", "string", "name of a per-rank number"),
    _column("count_stat", "count_stat", "string", "statistic, merged by addition"),
    _column("value_stat", "value_stat", "string", "statistic: min, max, and two sums"),
)  # fmt: skip
_OF_RANK = (
    _column("scalars", "step scalar", "float64", "per-rank numbers; see scalar_given"),
    _column("scalar_given", "step scalar", "uint8", "1: given, so that NaN may be a value"),
    _column("checksum", "step digest", "int64", "checksum of a parameter; see checksum_given"),
    _column("checksum_given", "step digest", "uint8", "1: given at this step"),
    _column("digest_fqn", "digest", "string", "parameter path"),
    _column("digest_shard", "digest", "string", "which shard of it; empty: the whole parameter"),
)
_OF_MERGED = (
    _column("scalars", "step rank scalar", "float64", "per-rank numbers; see scalar_given"),
    _column("scalar_given", "step rank scalar", "uint8", "1: given, so that NaN may be a value"),
    _column("delivered", "step rank", "uint8", "1: this rank is merged in"),
    _column("missing", "step rank", "uint8", "1: this rank was expected and did not deliver"),
    _column("rank", "rank", "int64", "rank"),
    ArraySpec(
        "desync_json", ("step",), "string", "", blocks=True,
        attrs={"long_name": "parameters that differ between ranks, a JSON list; empty: none"},
    ),
)  # fmt: skip
_ANOMALIES = (
    _column("detector", "anomaly", "string", "who says so"),
    _column("level", "anomaly", "string", "page, warn or info"),
    _column("anomaly_step", "anomaly", "int64", "optimizer step"),
    _column("micro", "anomaly", "int64", "micro-batch"),
    _column("rank", "anomaly", "int64", "rank; -1: no single rank is to blame"),
    _column("module", "anomaly", "string", "module or parameter path; see module_named"),
    _column("module_named", "anomaly", "uint8", "1: module is known"),
    _column("kind", "anomaly", "string", "kind of the site; empty: unknown"),
    _column("phase", "anomaly", "string", "forward, backward or step"),
    _column("first_cause", "anomaly", "uint8", "1: nothing earlier explains it"),
    _column("message", "anomaly", "string", "the verdict in words"),
    _column("values_json", "anomaly", "string", "the numbers behind it, a JSON object"),
    _column("sampled", "anomaly", "uint8", "1: the step was a sampled one"),
    _column("attempt", "anomaly", "int64", "attempt"),
    _column("wall_time", "anomaly", "int64", "end of the step", standard_name="time", **_TIME),
)
_NODE = (
    _column("sample_time", "sample", "int64", "time of the reading", **_TIME),
    _column("sample_json", "sample", "string", "host and process readings, a JSON object"),
    _column("event_source", "event", "string", "journal: rank_00003 or daemon"),
    _column("event_seq", "event", "int64", "sequence number in that journal"),
    _column("event_json", "event", "string", "what happened, a JSON object"),
)

SCHEMAS: Mapping[str, tuple[ArraySpec, ...]] = {
    "rank": _RECORDS + _OF_RANK,
    "merged": _RECORDS + _OF_MERGED,
    "anomalies": _ANOMALIES,
    "node": _NODE,
}
FIXED_LABELS = {"count_stat": COUNTS, "value_stat": VALUES}
_GROUP = re.compile(r"attempt_\d{3,}/(?:(rank)_\d{5,}|(merged)|(anomalies)|(node)_\d{4,})")


def attempt_key(attempt: int) -> str:
    """Return the name of the group of one attempt."""
    return f"attempt_{attempt:03d}"


def kind_of_group(key: str) -> str | None:
    """Return the schema of a group by its path; None if the format knows no such group."""
    match = _GROUP.fullmatch(key)
    return next(g for g in match.groups() if g) if match else None


def chunk_sizes(sites: int, ranks: int, block: int = BLOCK) -> dict[str, int]:
    """Choose the chunk of every dimension of a record group; it never changes afterwards."""
    unit = SITE_CHUNK_STEP if sites <= SITE_PART else SITE_PART
    wanted = -(-max(sites, 1) // unit) * unit
    return {
        "step": block,
        "site": min(wanted, SITE_CHUNK_MAX),
        "rank": max(1, min(ranks, RANK_CHUNK)),
        "scalar": SCALAR_CHUNK,
        "digest": DIGEST_CHUNK,
        "count_stat": len(COUNTS),
        "value_stat": len(VALUES),
    }


def array_document(
    column: ArraySpec, sizes: Mapping[str, int], chunks: Mapping[str, int]
) -> Document:
    """Return the Zarr v3 metadata of an array.

    Args:
        column: which one.
        sizes: length of every dimension.
        chunks: chunk of every dimension, for arrays that have more than one or grow by blocks.
    """
    grid = [COLUMN_CHUNK] if column.rewritten else [chunks[d] for d in column.dims]
    chain = _chain(column.dtype)
    if column.split:
        chain = [_sharded(part_of(grid), chain)]
    return {
        "shape": [sizes[d] for d in column.dims],
        "data_type": column.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": column.fill,
        "codecs": chain,
        "attributes": dict(column.attrs),
        "dimension_names": list(column.dims),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _chain(dtype: str) -> list[Document]:
    # lz4 with bitshuffle: as small as zstd on statistics, and two to four times faster (measured).
    if dtype == "string":
        return [
            {"name": "vlen-utf8"},
            {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
            {"name": "crc32c"},
        ]
    size = ITEM_BYTES[dtype]
    blosc = {
        "typesize": size, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0,
    }  # fmt: skip
    return [bytes_codec(size), {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}]


def bytes_codec(size: int) -> Document:
    """Return the codec that turns numbers of `size` bytes into little-endian bytes."""
    return {"name": "bytes", **({"configuration": {"endian": "little"}} if size > 1 else {})}


def _sharded(inner: list[int], chain: list[Document]) -> Document:
    index = [bytes_codec(8), {"name": "crc32c"}]
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": inner, "codecs": chain, "index_codecs": index, "index_location": "end",
        },
    }  # fmt: skip


def group_document(attrs: Mapping[str, Any], arrays: Mapping[str, Document] | None) -> Document:
    """Return the metadata of a group; with `arrays`, consolidated, as xarray opens it."""
    document: Document = {"attributes": dict(attrs), "zarr_format": 3, "node_type": "group"}
    if arrays is not None:
        document["consolidated_metadata"] = {
            "kind": "inline", "must_understand": False, "metadata": dict(arrays),
        }  # fmt: skip
    return document


def check_document(column: ArraySpec, document: object) -> tuple[dict[str, int], dict[str, int]]:
    """Return (sizes, chunks) of an array whose metadata the format could have written.

    Raises:
        ValueError: anything else: another dtype, codec, key, or a chunk too large to allocate.
    """
    try:
        shape = [int(n) for n in document["shape"]]  # type: ignore[index]
        grid = [int(n) for n in document["chunk_grid"]["configuration"]["chunk_shape"]]  # type: ignore[index]
    except MALFORMED:
        shape = grid = []
    sizes, chunks = (
        dict(zip(column.dims, shape, strict=False)),
        dict(zip(column.dims, grid, strict=False)),
    )
    bytes_of_chunk = ITEM_BYTES[column.dtype]
    for n in grid:
        bytes_of_chunk *= n
    if (
        not len(shape) == len(grid) == len(column.dims)
        or min(shape) < 0
        or min(grid) < 1
        or bytes_of_chunk > MAX_CHUNK_BYTES
        or document != array_document(column, sizes, chunks)
    ):
        msg = f"{column.name}: not an array that format_version {FORMAT_VERSION} allows"
        raise ValueError(msg)
    return sizes, chunks


def part_of(grid: Sequence[int]) -> list[int]:
    """Return the shape of the inner chunks of a Zarr shard (step, site, statistic)."""
    steps, sites, _ = grid
    return [steps, sites if sites % SITE_PART else SITE_PART, 1]


def grid_of(document: Document) -> list[int]:
    """Return the shape of the chunks that are files (the Zarr shards, where there are any)."""
    return list(document["chunk_grid"]["configuration"]["chunk_shape"])


def chunk_keys(
    name: str, grid: Sequence[int], start: Sequence[int], shape: Sequence[int]
) -> list[str]:
    """Return the store keys of the chunks that the region [start, start + shape) touches."""
    spans = [range(a // c, -(-(a + n) // c)) for a, n, c in zip(start, shape, grid, strict=True)]
    return ["/".join((name, "c", *map(str, at))) for at in product(*spans)]


_UNSAFE = re.compile("[\\\\\x00\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})")


def escape(text: str) -> str:
    r"""Make any Python string valid UTF-8 without NUL, reversibly: `\uXXXX`, also for a backslash.

    Module names may hold lone surrogates, which no UTF-8 codec accepts.
    """
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def unescape(text: str) -> str:
    """Undo `escape`."""
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), text) if "\\" in text else text
