"""The page of `sync.report`: one HTML file with plotly's program inside, that loads nothing."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from hipress.errors import MissingDependencyError
from hipress.snapshots import slowest

if TYPE_CHECKING:
    from hipress.session.report import LayerRow, Report

COLORS = {
    "compute": "#4c78a8",
    "wait": "#e45756",
    "encode": "#f2a33a",
    "wire": "#8c9bb0",
    "decode": "#54a24b",
}
MEANINGS = {
    "compute": "the step without the wait: forward, backward, optimizer, data",
    "wait": "from the last gradient of a step to the end of its exchange; training stands still",
    "encode": "time of the exchange in which gradients are encoded",
    "wire": "time of the exchange in which no codec works: messages are under way, or awaited",
    "decode": "time of the exchange in which frames are decoded and merged",
}
MAX_BARS = 40
"""Layers in the chart of residuals; the table has all of them."""
_SIDES = {"l": 60, "r": 20, "b": 50}
"""Margins of a chart, in pixels."""

_STYLE = """
body { margin: 0; background: #f6f7f9; color: #1d2733; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 8px 0 2px; } h2 { font-size: 19px; margin: 0 0 8px; }
section { background: #fff; border: 1px solid #e2e6ec; border-radius: 8px; padding: 18px 22px;
  margin-top: 18px; }
.sub { color: #5b6775; margin: 0 0 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { background: #fff; border: 1px solid #e2e6ec; border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 22px; } .tile span { color: #5b6775; font-size: 13px; }
.scroll { max-height: 520px; overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { position: sticky; top: 0; background: #fff; text-align: left; color: #5b6775;
  border-bottom: 2px solid #e2e6ec; } th, td { padding: 5px 12px 5px 0; vertical-align: top; }
td { border-bottom: 1px solid #eef1f4; overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.scroll td:first-child { white-space: nowrap; } .chosen td { font-weight: 600; }
dl { display: grid; grid-template-columns: 90px 1fr; margin: 0; font-size: 13.5px; }
dt { font-weight: 600; } dd { margin: 0; color: #5b6775; }
"""
# The browser refuses whatever the page would load from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def check() -> None:
    """Raises MissingDependencyError if plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise MissingDependencyError("plotly", "report")


def render(report: Report) -> str:
    """Returns the page."""
    check()
    from plotly.offline import get_plotlyjs

    hosts = len({row.host for row in report.ranks})
    about = (
        f"step {report.step}, {_count(len(report.ranks), 'rank')} on {_count(hosts, 'host')}, "
        f"{report.mode}; HiPress {report.version}, {report.made_at}"
    )
    sections = [
        _section("Where the time went", _ranks(report)),
        _section("Step time over the run", _history(report)),
        _section("The plan, and why", _plan(report)),
        _section("Layers", _layers(report.layers)),
        _section("Residual norms", _residuals(report.layers)),
        _section("Decisions", _decisions(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.program)}: HiPress run</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>"
        f'<h1>{escape(report.program)}</h1><p class="sub">{escape(about)}</p>'
        f"{_tiles(report)}{''.join(sections)}</main></body></html>\n"
    )


# --- sections -------------------------------------------------------------------------------------


def _tiles(report: Report) -> str:
    split = report.ranks[0].split
    tiles = [(str(report.step), "steps finished")]
    if split is not None:
        share = split.wait_s / split.step_s if split.step_s else 0.0
        tiles += [
            (_time(split.step_s), "a step"),
            (f"{100 * share:.0f} %", "of it waits for the exchange"),
            (_bytes(split.sent_bytes), "sent in a step by rank 0"),
            (f"{split.ratio:.1f} x", "fewer than a plain all-reduce"),
        ]
    tiles.append((_time(report.ranks[0].setup_s), "of set-up, not counted"))
    inside = (f'<div class="tile"><b>{a}</b><span>{b}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{"".join(inside)}</div>'


def _ranks(report: Report) -> str:
    rows = [(row, row.split) for row in report.ranks if row.split is not None]
    if not rows:
        return _sub("No step has been finished besides those in which exchanges were set up.")
    text = "Means of a step on each rank. The exchange overlaps with computing."
    late = slowest([row.split for row in report.ranks])
    if late is not None:
        text += f" Rank {late} computes longest, and the others wait for it."
    labels = [f"rank {row.rank}" for row, _ in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": [labels, [what] * len(labels)],
            "x": [1e3 * getattr(split, f"{part}_s") for _, split in rows],
            "marker": {"color": COLORS[part]},
            "hovertemplate": "%{x:.2f} ms " + part + "<extra></extra>",
        }
        for what, parts in (
            ("step", ("compute", "wait")),
            ("exchange", ("encode", "wire", "decode")),
        )
        for part in parts
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"t": 50, **_SIDES},
    }
    table = _table(
        ("rank", "host", "#steps", "#step", *(f"#{part}" for part in COLORS), "#sent", "#x fewer",
         "#set-up", "#memory"),
        [
            (row.rank, row.host, split.num_steps, _time(split.step_s),
             *(_time(getattr(split, f"{part}_s")) for part in COLORS), _bytes(split.sent_bytes),
             f"{split.ratio:.1f}", _time(row.setup_s), _bytes(row.state_bytes))
            for row, split in rows
        ],
    )  # fmt: skip
    meanings = "".join(f"<dt>{a}</dt><dd>{b}</dd>" for a, b in MEANINGS.items())
    height = 130 + 56 * len(rows)
    return _sub(text) + _figure(data, layout, height) + table + f"<br><dl>{meanings}</dl>"


def _history(report: Report) -> str:
    if not report.points:
        return _sub("No step has been finished besides those in which exchanges were set up.")
    steps = [step for step, _ in report.points]
    data: list[dict[str, Any]] = []
    for part in COLORS:
        in_step = part in ("compute", "wait")
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": part if in_step else f"{part} (exchange)",
                "x": steps,
                "y": [1e3 * getattr(split, f"{part}_s") for _, split in report.points],
                "line": {"color": COLORS[part], "width": 0.5 if in_step else 1.5},
                **({"stackgroup": "step"} if in_step else {"visible": "legendonly"}),
                "hovertemplate": "%{y:.2f} ms " + part + "<extra></extra>",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"t": 50, **_SIDES},
    }
    text = "Rank 0. Click a name above the chart to show or hide it."
    if len(steps) > 1 and steps[-1] - steps[-2] > 1:
        text += f" Each point is the mean of {steps[-1] - steps[-2]} steps."
    return _sub(text) + _figure(data, layout, 340)


def _plan(report: Report) -> str:
    parts = [f"<p><b>{escape(report.plan)}</b><br>{escape(report.why)}.</p>"]
    if report.trials:
        rows = [
            (trial.label, _time(trial.step_s), trial.num_steps,
             "-" if trial.predicted_s is None else _time(trial.predicted_s),
             "chosen" if trial.is_chosen else "")
            for trial in report.trials
        ]  # fmt: skip
        parts.append(_sub("Step times that auto has measured, and what it had predicted."))
        header = ("plan", "#measured", "#steps", "#predicted", "")
        chosen = [trial.is_chosen for trial in report.trials]
        parts.append(_table(header, rows, chosen))
    ways = Counter((layer.codec, layer.strategy) for layer in report.layers)
    kinds = []
    for (codec, strategy), count in ways.most_common():
        members = [x for x in report.layers if (x.codec, x.strategy) == (codec, strategy)]
        whole, frames = (
            sum(getattr(x, name) for x in members) for name in ("gradient_bytes", "frame_bytes")
        )
        ratio = f"{whole / max(frames, 1):.1f}"
        kinds.append((codec, strategy, count, _bytes(whole), _bytes(frames), ratio))
    titles = ("codec", "strategy", "#layers", "#gradients", "#encoded", "#x smaller")
    parts.append("<br>" + _table(titles, kinds))
    return "".join(parts)


def _layers(layers: Sequence[LayerRow]) -> str:
    text = (
        "The largest first. Encoded is what one rank sends of a layer. Codec time is that of rank "
        "0 in a step, shared out by elements where layers travel together; exchange is from the "
        "start to the end of theirs."
    )
    rows = [
        (
            layer.name,
            f"{layer.numel:,}",
            layer.codec,
            layer.strategy,
            _bytes(layer.frame_bytes),
            f"{layer.gradient_bytes / max(layer.frame_bytes, 1):.1f}",
            "-" if layer.coding_s is None else _time(layer.coding_s),
            "-" if layer.under_way_s is None else _time(layer.under_way_s),
            "-" if layer.residual is None else f"{layer.residual:.3g}",
            layer.reason or layer.accuracy,
        )
        for layer in layers
    ]
    header = ("layer", "#elements", "codec", "strategy", "#encoded", "#x smaller", "#codec time",
              "#exchange", "#residual", "why uncompressed, or what the guard measured")  # fmt: skip
    return _sub(text) + f'<div class="scroll">{_table(header, rows)}</div>'


def _residuals(layers: Sequence[LayerRow]) -> str:
    known = [layer for layer in layers if layer.residual is not None][:MAX_BARS]
    if not known:
        return _sub("No codec of this run keeps a residual.")
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [escape(layer.name) for layer in known],
            "x": [layer.residual for layer in known],
            "marker": {"color": COLORS["compute"]},
            "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
        }
    ]
    layout = {
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "xaxis": {"title": {"text": "norm"}, "rangemode": "tozero"},
        "bargap": 0.35,
        "margin": {"t": 10, **_SIDES},
    }
    text = "What a rank holds back of each layer for later steps: the root mean square over ranks."
    return _sub(text) + _figure(data, layout, 90 + 30 * len(known))


def _decisions(report: Report) -> str:
    text = _sub(report.guard)
    if not report.events:
        return text + _sub("Nothing has been decided during the run.")
    rows = [(event.step, event.kind, event.text) for event in report.events]
    return text + f'<div class="scroll">{_table(("#step", "by", "what"), rows)}</div>'


# --- parts ----------------------------------------------------------------------------------------


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>"


def _sub(text: str) -> str:
    return f'<p class="sub">{escape(text)}</p>'


def _table(
    header: Sequence[str], rows: Iterable[Sequence[object]], marked: Sequence[bool] = ()
) -> str:
    """Returns a table; a column whose header begins with # holds numbers."""
    kinds = [' class="n"' if title.startswith("#") else "" for title in header]
    head = "".join(
        f"<th{kind}>{escape(title.lstrip('#'))}</th>"
        for title, kind in zip(header, kinds, strict=True)
    )
    body = []
    for place, row in enumerate(rows):
        cells = "".join(
            f"<td{kind}>{escape(str(cell))}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        is_marked = place < len(marked) and marked[place]
        body.append(f'<tr class="chosen">{cells}</tr>' if is_marked else f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _figure(data: list[dict[str, Any]], layout: dict[str, Any], height: int) -> str:
    import plotly.graph_objects as go
    import plotly.io as pio

    figure = go.Figure(data)
    figure.update_layout(template="plotly_white", height=height, font={"size": 13}, **layout)
    config = {"displaylogo": False, "displayModeBar": False, "responsive": True}
    return str(pio.to_html(figure, config=config, full_html=False, include_plotlyjs=False))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
