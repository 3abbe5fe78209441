"""Small builders over the Grafana SDK: one function per kind of panel, with this project's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from grafana_foundation_sdk.models import text as text_models

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, AMBER, RED, BLUE, GREY, PURPLE = "green", "orange", "red", "blue", "#6e6e6e", "purple"
STAT_CALC = "lastNotNull"
# Moments of the shown time at which a number looks for what was there, at most. Grafana's own are
# as many as the panel has pixels, so tiles of different width would see different ends of a run:
# it is served for 20 s, or two minutes. More would be too many samples for one query of Prometheus
# (50 million) of 8,000 ranks.
FINEST = 3000
STEPS_PER_SECOND = "suffix:steps/s"
_REFS = "ABCDEFGHIJKLMNOP"
Panel = TypeVar(
    "Panel", stat.Panel, timeseries.Panel, statetimeline.Panel, heatmap.Panel, table.Panel
)

Properties = Mapping[str, Any]  # of a field: id and value of each
Words = Mapping[int, tuple[str, str]]  # a value's word and colour


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and how its series look.

    Attributes:
        expr: the expression.
        legend: name of a series, with {{label}} replaced.
        exemplars: whether to draw the dots that lead to a step and a tensor.
        instant: only the value at the end of the shown time.
        style: properties that its series have, and not the other series of the panel.
    """

    expr: str
    legend: str = "__auto"
    exemplars: bool = False
    instant: bool = False
    style: Properties = field(default_factory=dict)


# A line that is no measurement: an alert's threshold.
THRESHOLD: Properties = {
    "color": {"mode": "fixed", "fixedColor": RED},
    "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
}
# Counts on the right axis, beside lines that are no counts.
COUNTED: Properties = {
    "color": {"mode": "fixed", "fixedColor": RED},
    "custom.axisPlacement": "right",
    "custom.drawStyle": "bars",
    "custom.fillOpacity": 25,
    "custom.lineWidth": 0,
    "custom.scaleDistribution": {"type": "linear"},
    "custom.axisSoftMax": 1,
    "min": 0,
    "decimals": 0,
}


def fixed(color: str) -> Properties:
    """Return the style of series that have one colour."""
    return {"color": {"mode": "fixed", "fixedColor": color}}


def _target(query: Query, index: int, *, as_table: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(_REFS[index]).expr(query.expr)
    target = target.datasource(DATASOURCE).legend_format(query.legend)
    if as_table:
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return target.instant() if query.instant else target.range().exemplar(query.exemplars)


def _asked(panel: Panel, queries: Sequence[Query], *, as_table: bool = False) -> Panel:
    """Return the panel with its queries, and with their styles."""
    panel = panel.datasource(DATASOURCE)
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index, as_table=as_table))
        if query.style:
            panel = panel.override_by_query(_REFS[index], _properties(query.style))
    return panel


def _properties(values: Properties) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()]


def steps(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Return absolute thresholds: (lower bound, colour), the first without a bound."""
    made = [models.Threshold(value=value, color=color) for value, color in pairs]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _mapping(words: Words) -> models.ValueMap:
    options: dict[str, models.ValueMappingResult] = {
        str(value): models.ValueMappingResult(text=word, color=color, index=index)
        for index, (value, (word, color)) in enumerate(words.items())
    }
    return models.ValueMap(options=options)


def _colours(words: Words) -> dashboard.ThresholdsConfig:
    """Return thresholds that colour each value as `words` does."""
    first, *rest = sorted(words.items())
    return steps((None, first[1][1]), *((float(value), word[1]) for value, word in rest))


def stat_panel(
    title: str,
    text: str,
    unit: str,
    queries: Sequence[Query],
    thresholds: dashboard.ThresholdsConfig | None = None,
    *,
    no_value: str = "",
    named: bool = False,
    words: Words | None = None,
    decimals: int | None = None,
) -> stat.Panel:
    """Return numbers on a coloured background: one per series; `named`: its name, not the number.

    The queries are asked for the end of the shown time alone.
    """
    mode = common_models.BigValueTextMode
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .thresholds(thresholds or (_colours(words) if words else steps((None, BLUE))))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(mode.NAME if named else mode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs([STAT_CALC]).values(False))
        .max_data_points(FINEST)
    )
    if words:
        panel = panel.mappings([_mapping(words)])
    if decimals is not None:
        panel = panel.decimals(decimals)
    queries = [replace(q, instant=True) for q in queries]
    return _asked(panel.no_value(no_value) if no_value else panel, queries)


def text_panel(title: str, text_: str, content: str) -> text.Panel:
    """Return a text in Markdown, in which variables are replaced."""
    return (
        text.Panel()
        .title(title)
        .description(text_)
        .mode(text_models.TextMode.MARKDOWN)
        .content(content)
    )


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
    no_value: str = "",
    legend: bool = True,
) -> timeseries.Panel:
    """Return lines over time (or bars for counts of events, or stacked areas for shares).

    Without a legend the tooltip names the lines: of many with long names it hides the graph.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .line_width(1)
        .fill_opacity(60 if bars else 30 if stacked else 0)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .show_legend(legend)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if log:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    else:
        panel = panel.axis_soft_min(0)
    if soft_max is not None:
        panel = panel.axis_soft_max(soft_max)
    if bars:
        panel = panel.draw_style(common_models.GraphDrawStyle.BARS)
    if no_value:
        panel = panel.no_value(no_value)
    if stacked or bars:
        stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
        panel = panel.stacking(stacking)
    return _asked(panel, queries)


def timeline_panel(
    title: str, text: str, queries: Sequence[Query], words: Words
) -> statetimeline.Panel:
    """Return bands of states over time; `words` maps a value to its word and colour."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(text)
        .unit("none")
        .mappings([_mapping(words)])
        .thresholds(_colours(words))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(merge_values=True)
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.8)
    )
    return _asked(panel, queries)


def heatmap_panel(title: str, text: str, query: Query) -> heatmap.Panel:
    """Return a row of cells per series, the first series at the top."""
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME)
    panel = (
        heatmap.Panel()
        .title(title)
        .description(text)
        .unit("none")
        .calculate(False)
        .color(color.scheme("Turbo").steps(64).reverse(False))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.AUTO))
        .cell_gap(0)
        .y_axis(heatmap.YAxisConfig().reverse(True).unit("short"))
        .cell_values(heatmap.CellValues().unit("none").decimals(2))
        .show_legend()
    )
    return _asked(panel, [query])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a label, or the value of a query.

    Attributes:
        name: the label, or the title of the value; "" of a value that is not shown.
        query: whose value it is; None: a label.
        properties: its own unit, colour, links, and whatever else a field can have.
    """

    name: str
    query: Query | None = None
    properties: Properties = field(default_factory=dict)


def table_panel(
    title: str,
    text: str,
    unit: str,
    columns: Sequence[Column],
    sort_by: str,
    *,
    ascending: bool = False,
    then_by: str = "",
    no_value: str = "",
    finest: bool = False,
) -> table.Panel:
    """Return a table of the end of the shown time; rows of several queries with equal labels are one.

    `finest`: what was there is looked for at `FINEST` moments; of few series.
    """
    queries = [c.query for c in columns if c.query is not None]
    several = len(queries) > 1
    values = {
        f"Value #{_REFS[i]}" if several else "Value": c.name
        for i, c in enumerate(c for c in columns if c.query is not None)
    }
    shown = {name: field for field, name in values.items()}
    hidden = {"Time", *(field for field, name in values.items() if not name)}
    organize: dict[str, Any] = {
        "excludeByName": dict.fromkeys(sorted(hidden), True),
        "includeByName": {},
        "indexByName": {shown.get(c.name, c.name): i for i, c in enumerate(columns)},
        "renameByName": {field: name for field, name in values.items() if name},
    }
    panel = table.Panel().title(title).description(text).unit(unit)
    if finest:
        panel = panel.max_data_points(FINEST)
    if no_value:
        panel = panel.no_value(no_value)
    panel = _asked(panel, queries, as_table=True)
    if several:
        panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel = panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options=organize)
    )
    for column in columns:
        if column.properties:
            panel = panel.override_by_name(column.name, _properties(column.properties))
    order = [name for name in (sort_by, then_by) if name]
    return panel.sort_by(
        [common.TableSortByFieldState().display_name(name).desc(not ascending) for name in order]
    )


def worded(words: Words) -> Properties:
    """Return the properties of a column whose numbers stand for words."""
    options = {
        str(value): {"text": word, "color": color, "index": index}
        for index, (value, (word, color)) in enumerate(words.items())
    }
    return {
        "mappings": [{"type": "value", "options": options}],
        "custom.cellOptions": {"type": "color-background", "mode": "basic"},
    }
