"""Figures of a report, made with Plotly, which is imported only for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridtrain._base.text_table import with_unit
from hybridtrain.observe.confusion import Confusion, is_confusion
from hybridtrain.observe.pictures import COLOURS, COPIES, CRITICAL, PARTS, WAITS
from hybridtrain.observe.report.record import RunRecord
from hybridtrain.schedule import (
    WORDS,
    Action,
    Spans,
    copies_of,
    critical_path,
    waits,
    window,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# for several runs, or for several curves of one run
RUN_COLOURS = (
    *("#2171b5", "#d94801", "#238b45", "#6a51a3", "#737373", "#c51b8a", "#17becf", "#bcbd22"),
    *("#8c564b", "#e377c2"),
)
_PATTERNS = {"stage": "/", "message": "x", "host": "."}
_BAR = 34  # pixels per bar


def _figure(title: str, height: int = 300, **layout: Any) -> Figure:
    from plotly.graph_objects import Figure

    return Figure(
        layout={
            "title": {"text": title, "font": {"size": 15}},
            "height": height,
            "template": "plotly_white",
            "margin": {"l": 70, "r": 16, "t": 44, "b": 44},
            "legend": {
                "orientation": "h",
                "y": 1,
                "yanchor": "bottom",
                "x": 1,
                "xanchor": "right",
                "traceorder": "normal",
            },
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            **layout,
        }
    )


def curves(records: Sequence[RunRecord]) -> list[Figure]:
    """Returns the curves for comparing runs: losses, metrics, speed and memory.

    Several runs have the colours `RUN_COLOURS`, in order; the figures have no legend for them.
    """
    tags = [tag for record in records for tag in record.curves]
    metrics = dict.fromkeys(
        t for t in tags if t.startswith("eval/") and t != "eval/loss" and not is_confusion(t)
    )
    rates = dict.fromkeys(t for t in tags if t.endswith("_per_second") or t.endswith("/mfu"))
    shown: dict[str, Sequence[str]] = {"loss": ("train/loss", "eval/loss")}
    shown |= {f"{tag.removeprefix('eval/')}, evaluation": (tag,) for tag in metrics}
    shown |= {tag.removeprefix("train/").replace("_", " "): (tag,) for tag in rates}
    shown |= {"learning rate": ("train/lr",), "gradient norm": ("train/grad_norm",)}
    return [
        _curve(title, records, tags)
        for title, tags in shown.items()
        if any(len(record.curves.get(tag, ())) > 1 for record in records for tag in tags)
    ]


def _curve(title: str, records: Sequence[RunRecord], tags: Sequence[str]) -> Figure:
    from plotly.graph_objects import Scatter

    alone = len(records) == 1
    if len(tags) > 1 and not alone:
        title = f"{title}: solid training, dotted evaluation"
    figure = _figure(title, hovermode="x unified", xaxis_title="step", showlegend=alone)
    for number, record in enumerate(records):
        for tag in tags:
            curve = record.curves.get(tag, [])
            if not curve:
                continue
            kind = tag.partition("/")[0]
            name = " ".join([*([] if alone else [record.name]), *([kind] if len(tags) > 1 else [])])
            colour = tags.index(tag) if alone else number
            figure.add_trace(
                Scatter(
                    x=[step for step, _ in curve],
                    y=[value for _, value in curve],
                    name=name,
                    showlegend=bool(name),
                    mode="lines+markers" if len(curve) < 30 else "lines",
                    line={
                        "color": RUN_COLOURS[colour % len(RUN_COLOURS)],
                        "dash": "dot" if kind == "eval" and len(tags) > 1 else "solid",
                    },
                )
            )
    return figure


def confusion(matrix: Confusion) -> Figure:
    """Returns the confusion matrix of the last evaluation, coloured by share of the row."""
    from plotly.graph_objects import Heatmap

    classes, counts = matrix
    shares = [[count / (sum(line) or 1) for count in line] for line in counts]
    figure = _figure(
        "samples: a row per true class",
        180 + _BAR * len(classes),
        showlegend=False,
    )
    names = [str(name) for name in classes]
    figure.add_trace(
        Heatmap(
            z=shares,
            x=names,
            y=names,
            zmin=0,
            zmax=1,
            text=[[f"{count:g}" if count else "" for count in line] for line in counts],
            texttemplate="%{text}",
            colorscale="Blues",
            showscale=False,
            hovertemplate="true %{y}, predicted %{x}: %{text} (%{z:.1%})<extra></extra>",
        )
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def account(bars: Mapping[str, Mapping[str, float]], title: str, legend: bool = False) -> Figure:
    """Returns one bar per device or run, divided into the parts of a step.

    Args:
        bars: the parts in milliseconds, by the name of the bar, such as a device.
        title: the title.
        legend: whether to show a legend of the colours.
    """
    from plotly.graph_objects import Bar

    height = max(280 if legend else 0, 150 + _BAR * len(bars))
    figure = _figure(
        title, height, barmode="stack", xaxis_title="ms per step", showlegend=legend,
        legend={"traceorder": "normal"},
    )  # fmt: skip
    for part, colour in PARTS.items():
        times = [parts.get(part, 0.0) for parts in bars.values()]
        if not any(times):
            continue
        shares = [
            time / (sum(parts.values()) or 1)
            for time, parts in zip(times, bars.values(), strict=True)
        ]
        figure.add_trace(
            Bar(
                x=times,
                y=list(bars),
                name=part,
                orientation="h",
                marker_color=colour,
                customdata=shares,
                hovertemplate=f"{part}: %{{x:.3f}} ms, %{{customdata:.1%}}<extra>%{{y}}</extra>",
            )
        )
    figure.update_yaxes(autorange="reversed")
    return figure


def account_over_steps(record: RunRecord) -> Figure:
    """Returns the parts of the recorded steps over the run."""
    from plotly.graph_objects import Scatter

    figure = _figure(
        "over the run", xaxis_title="step", yaxis_title="ms per step", hovermode="x unified",
        legend={"traceorder": "reversed"},
    )  # fmt: skip
    for part, colour in PARTS.items():
        times = [parts.get(part, 0.0) for _, parts in record.accounts]
        if any(times):
            figure.add_trace(
                Scatter(
                    x=[step for step, _ in record.accounts],
                    y=times,
                    name=part,
                    stackgroup="parts",
                    line={"color": colour, "width": 0},
                    fillcolor=colour,
                    hovertemplate="%{y:.3f} ms",
                )
            )
    return figure


def stages(record: RunRecord) -> list[Figure]:
    """Returns figures of the stages' times and parameters; empty if they are unknown."""
    from plotly.graph_objects import Bar

    summaries = record.summary.get("stages", [])
    if not summaries:
        return []
    names = [f"stage {number}" for number in range(len(summaries))]
    words = [f'<span style="color:{PARTS[kind]}">{kind}</span>' for kind in ("forward", "backward")]
    height = 120 + _BAR * len(summaries)
    titles = (f"ms per micro-batch: {', '.join(words)}", "parameters")
    figures = [_figure(title, height, barmode="stack", showlegend=False) for title in titles]
    bars: list[tuple[Figure, str, list[float], str]] = [
        (figures[0], kind, [stage[f"{kind}_ms"] for stage in summaries], PARTS[kind])
        for kind in ("forward", "backward")
    ]
    parameters = [stage["parameters"] for stage in summaries]
    bars.append((figures[1], "parameters", parameters, "#969696"))
    for figure, name, values, colour in bars:
        figure.add_trace(Bar(x=values, y=names, name=name, orientation="h", marker_color=colour))
        figure.update_yaxes(autorange="reversed")
    return figures


def timeline(predicted: Spans, measured: Spans, bytes_of: Mapping[Action, int]) -> Figure:
    """Returns both timelines on one axis; hovering describes each action.

    Args:
        predicted: the predicted spans of each device, in seconds.
        measured: the measured spans of each device, in seconds.
        bytes_of: the bytes that an action sends to another stage, if known.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1,
        subplot_titles=("measured", "predicted"),
    )  # fmt: skip
    rows = sum(len(spans) * (2 if copies_of(spans) else 1) for spans in (measured, predicted))
    height = 220 + 40 * rows
    figure.update_layout(_figure("", height).layout, barmode="overlay", hovermode="closest")
    figure.update_layout(legend={"y": -0.16, "yanchor": "top", "x": 0, "xanchor": "left"})
    figure.update_annotations(x=0, xanchor="left")  # subplot titles
    _add_lanes(figure, 1, measured, bytes_of, marks=True)
    _add_lanes(figure, 2, predicted, bytes_of, marks=False)
    figure.update_xaxes(title_text="ms", row=2)
    figure.update_yaxes(autorange="reversed")
    return figure


def _add_lanes(
    figure: Figure, panel: int, spans: Spans, bytes_of: Mapping[Action, int], marks: bool
) -> None:
    from plotly.graph_objects import Bar

    begin, devices = window(spans)[0], len(spans)
    critical = set(critical_path(spans)) if marks else set()

    def bar(
        name: str, lanes: Sequence[int], times: Sequence[tuple[float, float]], **how: Any
    ) -> Bar:
        return Bar(
            base=[(start - begin) * 1e3 for start, _ in times],
            x=[(end - start) * 1e3 for start, end in times],
            y=[f"device {lane}" for lane in lanes],
            orientation="h",
            name=name,
            legendgroup=name,
            showlegend=marks,
            width=0.85,
            **how,
        )

    for kind, colours in COLOURS.items():
        spans_of_kind = [
            (device, span) for device, lane in enumerate(spans) for span in lane
            if span.action.kind == kind
        ]  # fmt: skip
        if not spans_of_kind:
            continue
        shades = [
            colours[min(span.action.stage // devices, len(colours) - 1)]
            for _, span in spans_of_kind
        ]
        texts = [
            f"{WORDS[kind]} of micro-batch {span.action.microbatch}, stage {span.action.stage}"
            + (f"<br>sends {with_unit(size)}" if (size := bytes_of.get(span.action)) else "")
            + ("<br>on the critical path" if span.action in critical else "")
            for _, span in spans_of_kind
        ]
        figure.add_trace(
            bar(
                WORDS[kind],
                [device for device, _ in spans_of_kind],
                [(span.start, span.end) for _, span in spans_of_kind],
                text=[span.action.microbatch for _, span in spans_of_kind],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": "black"},
                marker={"color": shades, "line": {"width": 0}},
                customdata=texts,
                hovertemplate="%{customdata}<br>%{x:.3f} ms, from %{base:.3f}<extra></extra>",
            ),
            panel,
            1,
        )
    for back, (words, colour) in COPIES.items():
        copies = [
            (device, copy)
            for device, lane in enumerate(copies_of(spans))
            for copy in lane
            if copy.back == back
        ]
        if copies:
            trace = bar(
                words,
                [device for device, _ in copies],
                [(copy.start, copy.end) for _, copy in copies],
                marker={"color": colour, "line": {"width": 0}},
                customdata=[
                    f"{words}: micro-batch {copy.microbatch}, stage {copy.stage}"
                    for _, copy in copies
                ],
                hovertemplate="%{customdata}<br>%{x:.3f} ms, from %{base:.3f}<extra></extra>",
            )
            trace.y = [f"device {device}, copies" for device, _ in copies]
            figure.add_trace(trace, panel, 1)
    if critical:
        critical_spans = [
            (device, span) for device, lane in enumerate(spans) for span in lane
            if span.action in critical
        ]  # fmt: skip
        figure.add_trace(
            bar(
                "critical path",
                [device for device, _ in critical_spans],
                [(span.start, span.end) for _, span in critical_spans],
                marker={"color": "rgba(0,0,0,0)", "line": {"width": 2, "color": CRITICAL}},
                hoverinfo="skip",
            ),
            panel,
            1,
        )
    for reason, (words, colour, _) in WAITS.items() if marks else ():
        idle = [wait for wait in waits(spans) if wait.reason == reason]
        if idle:
            words = words if words.startswith("waits") else f"waits {words}"
            figure.add_trace(
                bar(
                    words,
                    [wait.device for wait in idle],
                    [(wait.start, wait.end) for wait in idle],
                    marker={
                        "color": "rgba(0,0,0,0)",
                        "line": {"width": 0},
                        "pattern": {"shape": _PATTERNS[reason], "fgcolor": colour, "size": 6},
                    },
                    hovertemplate=f"{words}<br>%{{x:.3f}} ms, from %{{base:.3f}}<extra></extra>",
                ),
                panel,
                1,
            )


def memory(peaks: Mapping[str, float], limits: Mapping[str, float]) -> Figure:
    """Returns one bar per device, with a line at the device's memory.

    Args:
        peaks: the peak bytes, by device.
        limits: the memory of the devices in bytes, where known.
    """
    from plotly.graph_objects import Bar, Scatter

    unit = 2**30 if max(peaks.values()) >= 2**30 else 2**20
    title = f"peak memory by device, {'GiB' if unit == 2**30 else 'MiB'}"
    figure = _figure(title, 120 + _BAR * len(peaks))
    amounts = [peak / unit for peak in peaks.values()]
    figure.add_trace(
        Bar(x=amounts, y=list(peaks), name="peak", orientation="h", marker_color="#9e9ac8")
    )
    if limits:
        figure.add_trace(
            Scatter(
                x=[limit / unit for limit in limits.values()],
                y=list(limits),
                name="device memory",
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 26, "color": "#cb181d"},
            )
        )
    figure.update_yaxes(autorange="reversed")
    return figure
