"""The Modules dashboard: which module is not like before, where the model dies, one in depth."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from ddpprobe.records.histogram import NEAR_ZERO
from grafana.board import Placed, Row, chosen, listed, of_one_run, placed
from grafana.panels import (
    Column,
    Query,
    graph_panel,
    heatmap_panel,
    table_panel,
)
from grafana.queries import NO_DATA, NODE, ROWS, events, metric, none_of, or_none, rate

UID = "ddpprobe-modules"
# Values of the variable: ends of names of metrics. The last one is of parameters, and has no kind
# but `update`, which no other has: so a chosen kind need not be changed for it.
STATS = ("rms", "abs_max", "zero_ratio", "update_ratio")
WINDOWS = ("10m", "1m", "1h", "6h")
ABOUT_MODULES = "saturated|dead_units|grad_none_or_zero|vanishing|output_jump|coverage"
SITE = f'ddpprobe_site_$stat{{{NODE},kind=~"$kind|update"}}'
SITES = f"max by (fqn) ({SITE})"
PLACE = f"max by (fqn) ({metric('site_position', NODE)})"
# Prometheus returns series in the order of their labels. With the place in the first one, all of it
# of one length, that is the order of execution.
IN_ORDER = f'* on (fqn) group_left (at) count_values by (fqn) ("at", 10000 + {PLACE})'
OUTPUTS = NODE + ',kind!="input"'
QUANTILES = ((0.5, "half"), (0.9, "90 in 100"), (0.99, "99 in 100"))
NAME = {"custom.width": 280}
NUMBER = {"unit": "sci", "decimals": 2}


def _over_time() -> list[Placed]:
    return [
        (
            heatmap_panel(
                "$kind: log10 of $stat, by module and time",
                "Modules from top to bottom in execution order (parameters by their own names), colour by the power of ten. "
                "A row that changes its colour left its past; one that ends has no finite value any more, or fell silent. "
                "Choose activations or gradients by the kind above; update_ratio is what a step changes of each parameter, by its size: about 0.001 is usual.",
                Query(f"log10({SITES} > 0) {IN_ORDER}", "{{fqn}}"),
            ),
            24,
        )
    ]


def _now() -> list[Placed]:
    # After a NaN there are no values any more: what there was last is still shown.
    last = f"max by (fqn) (last_over_time({SITE}[$__range]))"
    recent = f"max by (fqn) (last_over_time({SITE}[$window]))"
    before = f"max by (fqn) (last_over_time({SITE}[$window] offset $window))"
    most = f"topk({ROWS}, abs(log2({recent} / {before})) < Inf)"
    # Of a past run nothing says that a site has left its slot: the newest one holds.
    newest = f"topk by (slot) (1, timestamp({metric('outlier_info', NODE)}))"
    score = f"max by (slot) (abs({metric('outlier_score', NODE)}))"
    outliers = (
        f"max by (fqn, kind) ({score} * on (slot) group_left (fqn, kind) ({newest} > bool 0))"
    )
    return [
        (
            table_panel(
                "Largest",
                f"The {ROWS} modules with the largest $stat of $kind, over all ranks: now, or where nothing is finite any more what there was last. "
                "Near 65504 in float16 an overflow follows.",
                "none",
                [
                    Column("fqn", properties=NAME),
                    Column("value", Query(f"topk({ROWS}, {last})"), NUMBER),
                ],
                "value",
            ),
            8,
        ),
        (
            table_panel(
                "Changed most",
                f"The {ROWS} modules whose $stat is furthest from what it was $window before, in doublings or halvings. "
                "Who is far above the others blows up or dies. Empty until the run is older than that, and where nothing is finite any more.",
                "none",
                [
                    Column("fqn", properties=NAME),
                    Column("doublings", Query(most), {"decimals": 1}),
                    Column(
                        "times",
                        Query(f"{recent} / {before} and on (fqn) {most}"),
                        {"unit": "sci", "decimals": 1},
                    ),
                ],
                "doublings",
                no_value="nothing to compare: the run is younger than $window, over, or not finite",
            ),
            8,
        ),
        (
            table_panel(
                "Left their past",
                "The sites whose rms is furthest from its own mean over about 16 sampled steps, in powers of ten, in the newest step: of all sites, also of those that the cap of series leaves out. "
                "ddpprobe trace shows one over the steps. Within one power of ten is usual.",
                "none",
                [
                    Column("fqn", properties=NAME),
                    Column("kind"),
                    Column("powers of ten", Query(outliers), {"decimals": 1}),
                ],
                "powers of ten",
                no_value="nothing to compare: no site has a past yet, the run is over, or not finite",
            ),
            8,
        ),
    ]


def _dead() -> list[Placed]:
    zeros = f"last_over_time({metric('site_zero_ratio', OUTPUTS)}[$__range])"
    found = events("anomalies_total", f'{NODE},detector=~"{ABOUT_MODULES}"')
    share = {"color": {"mode": "continuous-GrYlRd"}, "decimals": 1, "min": 0, "max": 1}
    gauge = {"custom.cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
    last = f"max by (fqn) (last_over_time({SITE}[$__range]))"
    until = f"max by (fqn) (max_over_time(timestamp({SITE})[$__range:$__interval]))"
    gone = f"({last} unless {SITES})"
    newest = f"1000 * max(max_over_time(timestamp({SITE})[$__range:$__interval]))"
    told = f"round(max by (detector) ({found})) > 0"
    return [
        (
            table_panel(
                "Without a finite value now",
                "Modules that had a value in the shown time and have none any more: all of it is NaN or infinite, or it did not report. "
                "The first to end stand above; those between two scrapes in no order: the verdict of Run says in which it began. None is good.",
                "none",
                [
                    Column(
                        "until",
                        Query(or_none(f"1000 * {until} and on (fqn) {gone}", newest, "fqn")),
                        {"unit": "dateTimeAsIsoNoDateIfToday"},
                    ),
                    Column("fqn", properties=NAME),
                ],
                "until",
                ascending=True,
                no_value="no data: no module had a value in the shown time",
            ),
            8,
        ),
        (
            table_panel(
                "Most zeros",
                f"The {ROWS} sites with the largest share of zeros, now or when they were last finite. Half is what a ReLU does; near all at an output: its units are dead; near all at a gradient: "
                "nothing is learned there.",
                "percentunit",
                [
                    Column("fqn", properties=NAME),
                    Column("kind"),
                    Column(
                        "zeros", Query(f"topk({ROWS}, max by (fqn, kind) ({zeros}))"), share | gauge
                    ),
                ],
                "zeros",
            ),
            8,
        ),
        (
            graph_panel(
                "Verdicts on modules",
                "Dead units, gradients that are absent, zero or vanish along the depth, outputs that jump, modules that fell silent. "
                "ddpprobe anomalies names the module. None is good.",
                "none",
                [Query(told, "{{detector}}"), none_of(told)],
                bars=True,
                no_value=NO_DATA,
            ),
            8,
        ),
    ]


def _one() -> list[Placed]:
    def over_time(stat: str) -> list[Query]:
        one = metric(f"site_{stat}", f'{NODE},fqn="$module"')
        return [Query(f"max by (kind) ({one})", "{{kind}}")]

    return [
        (
            graph_panel(
                "$module: rms",
                "Root mean square of the finite values, by kind. Compare the output with the gradient: one that grows alone is the cause.",
                "sci",
                over_time("rms"),
                log=True,
            ),
            8,
        ),
        (
            graph_panel(
                "$module: largest absolute value",
                "Of the finite values, by kind. Near the dtype's maximum (65504 in float16) overflow follows.",
                "sci",
                over_time("abs_max"),
                log=True,
            ),
            8,
        ),
        (
            graph_panel(
                "$module: share of zeros",
                "By kind. Rising towards 1 at the output: its units die.",
                "percentunit",
                over_time("zero_ratio"),
                soft_max=1,
            ),
            8,
        ),
    ]


def _values() -> list[Placed]:
    mine = f'{NODE},fqn="$module",kind="$kind"'
    buckets = f"sum by (le) ({rate('site_magnitude_bucket', mine)})"
    near, every = (
        rate("site_magnitude_bucket", f'{mine},le="{le}"') for le in (repr(NEAR_ZERO), "+Inf")
    )
    near_zero = f"sum({near}) / sum({every})"
    return [
        (
            graph_panel(
                "$module: where magnitudes of $kind lie",
                "Half, nine in ten and 99 in 100 of the elements are below these, right to a factor of four or sixteen (the buckets); 0 where they are zero. Of modules that install(histograms=...) names. "
                "Empty without DDPPROBE_HISTOGRAMS=1 at the daemon: run.histograms() has them then. Falling towards 1e-8 in a float16 gradient: it is about to vanish.",
                "sci",
                [Query(f"histogram_quantile({q}, {buckets})", name) for q, name in QUANTILES],
                no_value="DDPPROBE_HISTOGRAMS=1 shows what histograms= names",
            ),
            12,
        ),
        (
            graph_panel(
                "$module: share near zero, $kind",
                "Share of elements with a magnitude below 1/16 (the fastai near_zero is 0.05). Near 1 at an output: it hardly says anything; at an input of a ReLU that is usual. Empty where the panel beside it is.",
                "percentunit",
                [Query(near_zero, "below 1/16")],
                soft_max=1,
                no_value="DDPPROBE_HISTOGRAMS=1 shows what histograms= names",
            ),
            12,
        ),
    ]


ROWS_OF_PANELS = (
    Row("", 13, False, _over_time),
    Row("Now", 9, False, _now),
    Row("Not finite, dead", 9, False, _dead),
    Row("One module", 7, False, _one),
    Row("Where its values lie", 7, False, _values),
)


def build() -> dashboard.Dashboard:
    """Return the whole dashboard."""
    text = (
        "The modules of one run, over all its ranks: who left the past, who died, and one in depth."
    )
    made = of_one_run(UID, "modules", text, by_rank=False)
    kinds = f"label_values(ddpprobe_site_rms{{{NODE}}}, kind)"
    modules = f"label_values(ddpprobe_site_rms{{{NODE}}}, fqn)"
    output = models.VariableOption(text="output", value="output")
    made = made.with_variable(listed("stat", "Statistic", STATS))
    made = made.with_variable(chosen("kind", "Kind", kinds).current(output))
    made = made.with_variable(listed("window", "Compare with", WINDOWS))
    made = made.with_variable(chosen("module", "Module", modules))
    return placed(made, ROWS_OF_PANELS)
