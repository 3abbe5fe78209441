"""Records as an xarray dataset, in the names and dimensions of the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray

from ddpprobe.reader.derived_series import NAMES
from ddpprobe.records.derived import DerivedNumbers
from ddpprobe.records.step import COUNTS, VALUES, StepRecord
from ddpprobe.store.columns import LabelAxis, SiteAxis, encode_rows, encode_scalars, step_columns


def to_dataset(records: Sequence[StepRecord], *, merged: bool) -> xarray.Dataset:
    """Return records of one attempt as a dataset; strings are as they are, nothing is escaped.

    Args:
        records: all of them, ascending.
        merged: whether they are of all ranks, so that `derived` follows from them.
    """
    axis, names, ranks = SiteAxis(), LabelAxis[str](), LabelAxis[int]()
    for rank in sorted({r for record in records for r in (*record.ranks, *record.missing)}):
        ranks.at(rank)
    rows = encode_rows(records, axis)
    cells = encode_scalars(records, names, ranks)
    columns = {k: v for k, v in step_columns(records).items() if not k.startswith("first_bad")}
    times = np.array(columns.pop("wall_time"), "datetime64[ns]")
    steps = columns.pop("step")
    sites = axis.sites
    dataset = xarray.Dataset(
        {
            "counts": (("step", "site", "count_stat"), rows["counts"]),
            "values": (("step", "site", "value_stat"), rows["values"]),
            "scalars": (("step", "rank", "scalar"), cells["scalars"]),
            "missing": (("step", "rank"), cells["missing"].astype(bool)),
            **{name: ("step", np.array(column, bool)) for name, column in columns.items()},
        },
        coords={
            "step": ("step", np.array(steps, np.int64)),
            "wall_time": ("step", times),
            "site": ("site", np.array([str(s) for s in sites], object)),
            "fqn": ("site", np.array([s.fqn for s in sites], object)),
            "kind": ("site", np.array([s.kind for s in sites], object)),
            "leaf": ("site", np.array([s.leaf for s in sites], object)),
            "placement": ("site", np.array([s.placement for s in sites], object)),
            "count_stat": list(COUNTS),
            "value_stat": list(VALUES),
            "scalar": ("scalar", np.array(names.labels, object)),
            "rank": ("rank", np.array(ranks.labels, np.int64)),
        },
    )
    return dataset.assign(derived=_derived(records)) if merged else dataset


def _derived(records: Sequence[StepRecord]) -> xarray.DataArray:
    """Return what follows from merged records: [step, derived], NaN where it is not known."""
    fold = DerivedNumbers()
    found = [fold.update(record) if record.sampled else {} for record in records]
    values = [[numbers.get(name, np.nan) for name in NAMES] for numbers in found]
    return xarray.DataArray(
        np.array(values, np.float64).reshape(len(records), len(NAMES)),
        dims=("step", "derived"), coords={"derived": list(NAMES)},
    )  # fmt: skip
