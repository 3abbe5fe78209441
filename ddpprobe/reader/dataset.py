"""Records as an xarray dataset, in the names and dimensions of the store."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray

from ddpprobe.reader.derived_series import NAMES
from ddpprobe.records.derived import DerivedNumbers
from ddpprobe.records.step import COUNTS, FORMULAS, VALUES, Floats, StepRecord, observed
from ddpprobe.store.columns import LabelAxis, SiteAxis, encode_rows, encode_scalars, step_columns

STATISTICS = ("nonfinite", *FORMULAS)  # each a variable [step, site]
QUANTITY = "quantity"  # dimension of `derived`: one of that name would take it for a coordinate
AGGREGATES = "aggregates"  # what the store calls `values`, which is a property of every Dataset
_RENAMED = (
    "to_xarray() calls this variable 'aggregates': a Dataset has a property `values` of its own. "
    "The old name goes with the next release"
)


class RunDataset(xarray.Dataset):  # type: ignore[no-untyped-call]  # xarray's
    """A dataset that still answers to a variable's name of the release before."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  (xarray's own overloads)
        """Return a variable, or a dataset of several."""
        if isinstance(key, str) and key == "values" and AGGREGATES in self.variables:
            warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
            return super().__getitem__(AGGREGATES).rename("values")
        return super().__getitem__(key)


def to_dataset(records: Sequence[StepRecord], *, merged: bool) -> RunDataset:
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
    counts, aggregates = rows["counts"], rows["values"]
    variables = {
        "counts": (("step", "site", "count_stat"), counts),
        AGGREGATES: (("step", "site", "value_stat"), aggregates),
        **{stat: (("step", "site"), observed(stat, counts, aggregates)) for stat in STATISTICS},
        "scalars": (("step", "rank", "scalar"), cells["scalars"]),
        "missing": (("step", "rank"), cells["missing"].astype(bool)),
    }
    dataset = labelled(variables, step_columns(records), axis, names, ranks)
    return (
        dataset.assign(derived=derived(records, [r.step for r in records])) if merged else dataset
    )


def labelled(
    variables: dict[str, tuple[tuple[str, ...], Any]],
    columns: dict[str, Any],
    axis: SiteAxis,
    names: LabelAxis[str],
    ranks: LabelAxis[int],
) -> RunDataset:
    """Return arrays as a dataset with the coordinates of these axes.

    Args:
        variables: by name, (dimensions, array); NumPy's or dask's.
        columns: as of `step_columns`, those that a dataset shows.
        axis: the sites.
        names: the scalars.
        ranks: in ascending order.
    """
    told = {k: v for k, v in columns.items() if not k.startswith("first_bad")}
    times, steps = np.array(told.pop("wall_time"), "datetime64[ns]"), told.pop("step")
    sites = axis.sites
    return RunDataset(
        {**variables, **{name: ("step", np.array(column, bool)) for name, column in told.items()}},
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


def derived(records: Iterable[StepRecord], steps: Sequence[int]) -> xarray.DataArray:
    """Return what follows from merged records: [step, quantity], NaN where it is not known.

    Args:
        records: of one attempt, ascending.
        steps: the rows, ascending.
    """
    values = derived_numbers(records, steps)
    return xarray.DataArray(values, dims=("step", QUANTITY), coords={QUANTITY: list(NAMES)})


def derived_numbers(records: Iterable[StepRecord], steps: Sequence[int]) -> Floats:
    """Return the array inside of `derived`: float64 [steps, NAMES]."""
    fold, rows = DerivedNumbers(), {step: row for row, step in enumerate(steps)}
    values = np.full((len(steps), len(NAMES)), np.nan)
    for record in records:
        numbers = fold.update(record) if record.sampled else {}
        if numbers and record.step in rows:
            values[rows[record.step]] = [numbers.get(name, np.nan) for name in NAMES]
    return values
