"""Small builders over the Grafana SDK: one function per kind of panel, with this project's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, AMBER, RED, BLUE, GREY = "green", "orange", "red", "blue", "text"
STAT_CALC = "lastNotNull"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `exemplars` draws the dots that lead to a step and a tensor."""

    expr: str
    legend: str = "__auto"
    exemplars: bool = False


def _target(query: Query, index: int, *, instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id("ABCDEFGH"[index]).expr(query.expr)
    target = target.datasource(DATASOURCE).legend_format(query.legend)
    if instant:
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return target.range().exemplar(query.exemplars)


def steps(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Return absolute thresholds: (lower bound, colour), the first without a bound."""
    made = [models.Threshold(value=value, color=color) for value, color in pairs]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def stat_panel(
    title: str,
    text: str,
    unit: str,
    query: Query,
    thresholds: dashboard.ThresholdsConfig,
    *,
    no_value: str = "",
    with_name: bool = False,
) -> stat.Panel:
    """Return one number on a coloured background."""
    mode = common_models.BigValueTextMode
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .datasource(DATASOURCE)
        .with_target(_target(query, 0))
        .thresholds(thresholds)
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(mode.VALUE_AND_NAME if with_name else mode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs([STAT_CALC]).values(False))
    )
    return panel.no_value(no_value) if no_value else panel


def graph_panel(
    title: str,
    text: str,
    unit: str,
    queries: Sequence[Query],
    *,
    log: bool = False,
    stacked: bool = False,
    bars: bool = False,
    soft_max: float | None = None,
) -> timeseries.Panel:
    """Return lines over time (or bars for counts of events, or stacked areas for shares)."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .datasource(DATASOURCE)
        .line_width(1)
        .fill_opacity(60 if bars else 30 if stacked else 0)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index))
    if log:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    else:
        panel = panel.axis_soft_min(0)
    if soft_max is not None:
        panel = panel.axis_soft_max(soft_max)
    if bars:
        panel = panel.draw_style(common_models.GraphDrawStyle.BARS)
    if stacked or bars:
        stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
        panel = panel.stacking(stacking)
    return panel


def timeline_panel(
    title: str, text: str, query: Query, states: Mapping[int, tuple[str, str]]
) -> statetimeline.Panel:
    """Return bands of states over time; `states` maps a value to its word and colour."""
    options: dict[str, models.ValueMappingResult] = {
        str(value): models.ValueMappingResult(text=word, color=color, index=index)
        for index, (value, (word, color)) in enumerate(states.items())
    }
    first, *rest = sorted(states.items())
    return (
        statetimeline.Panel()
        .title(title)
        .description(text)
        .unit("none")
        .datasource(DATASOURCE)
        .with_target(_target(query, 0))
        .mappings([models.ValueMap(options=options)])
        .thresholds(steps((None, first[1][1]), *((float(v), s[1]) for v, s in rest)))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(merge_values=True)
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.8)
    )


def table_panel(
    title: str, text: str, unit: str, query: Query, columns: Sequence[str], value: str
) -> table.Panel:
    """Return a table "now", largest first: the labels `columns`, then the number named `value`."""
    organize: dict[str, Any] = {
        "excludeByName": {"Time": True},
        "includeByName": {},
        "indexByName": {name: i for i, name in enumerate([*columns, "Value"])},
        "renameByName": {"Value": value},
    }
    return (
        table.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .datasource(DATASOURCE)
        .with_target(_target(query, 0, instant=True))
        .decimals(3 if unit == "sci" else 0)
        .with_transformation(
            models.DataTransformerConfig(id_val="organize", options=organize),
        )
        .sort_by([common.TableSortByFieldState().display_name(value).desc(desc=True)])
    )
