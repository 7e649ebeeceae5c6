"""The page of Dask's dashboard that shows parameter servers: shards, workers, losses, and curves.

It says what `dps top` says, from the same overview, once a second for as long as a browser shows
it. Curves of losses go back to the beginning of the training, as far as the scheduler keeps what
was reported; those of updates a second begin when the page is opened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    Div,
    HoverTool,
    Legend,
    LegendItem,
    VSpan,
)
from bokeh.palettes import Category10
from bokeh.plotting import figure
from distributed import Scheduler
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from dps.cluster.node.recorder import topic
from dps.cluster.scheduler.overview import GroupOverview, overviews
from dps.cluster.scheduler.rates import GroupRates
from dps.events import Detected
from dps.observe.sentences import sentence
from dps.observe.views import size

EVERY_MILLISECONDS = 1000
MOST_POINTS = 1000  # of each curve
MOST_NAMED = 12  # curves that a legend names; more would hide them
MOST_PIXELS = 320  # of a table that is not scrolled
COLOURS: tuple[str, ...] = Category10[10]

_ALARM = "color:#c0392b;font-weight:bold"
_STYLE = """
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 4px; text-align: left; white-space: nowrap; }
th { font-weight: normal; opacity: 0.7; border-bottom: 1px solid #bbbbbb; }
tr:nth-child(even) { background: rgba(128, 128, 128, 0.1); }
.number { text-align: right; }
"""


def serve(scheduler: Scheduler, prefix: str, page: str, plot: str) -> None:
    """Serve the page, and the same without the bar of links, and link to both from all others.

    What can fail comes first, so that nothing is served by halves.
    """
    links = template_variables(scheduler)  # which all pages share
    pages, plots = links["pages"], links["plots"]
    app = BokehApplication({f"/{page}": _page, f"/{plot}": _plot}, scheduler, prefix, links)
    app.initialize(IOLoop.current())
    app.start()
    scheduler.http_application.add_application(app)
    pages.append(page)
    plots.append({"url": plot, "name": "Parameter Servers (dps)"})


def _page(scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
    _plot(scheduler, extra, doc)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


def _plot(scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
    shown = DpsPage(scheduler)
    doc.title = "Dask: Parameter Servers"
    doc.theme = BOKEH_THEME
    doc.add_root(shown.root)
    doc.add_next_tick_callback(shown.update)
    doc.add_periodic_callback(shown.update, EVERY_MILLISECONDS)


@dataclass
class _Watched:
    """What the page remembers of a group: its last overview, rates, and curves."""

    overview: GroupOverview
    rates: GroupRates = field(default_factory=GroupRates)
    before: dict[int, tuple[float, int]] = field(default_factory=dict)
    speeds: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)
    losses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    read_to: float = 0.0
    closed: bool = False

    def look(self, overview: GroupOverview, batches: Sequence[tuple[float, Any]]) -> None:
        self.overview, self.closed = overview, False
        self.rates.look(overview)
        for shard in overview.shards:
            self._speed(f"shard {shard.shard}", shard.shard, shard.version, overview.t)
        for t, who, loss in reported_losses(batches, self.read_to):
            self.losses.setdefault(who, []).append((t, loss))
        # Each curve by itself: batches of several workers may come in an order that repeats.
        self.losses = {who: _thinned(points) for who, points in self.losses.items()}
        self.read_to = batches[-1][0] if batches else self.read_to

    def _speed(self, name: str, shard: int, version: int | None, now: float) -> None:
        """Add a point: updates since the last look; a gap where the shard does not answer."""
        points = self.speeds.setdefault(name, deque(maxlen=MOST_POINTS))
        if version is None:
            points.append((now, math.nan))
            self.before.pop(shard, None)
            return
        if shard in self.before and now > self.before[shard][0]:
            since, then = self.before[shard]
            points.append((now, max(0, version - then) / (now - since)))
        self.before[shard] = now, version


class DpsPage:
    """What one open page shows. All calls come from the scheduler's event loop.

    Parameters
    ----------
    scheduler
        The scheduler whose groups are shown.

    Attributes
    ----------
    root
        The bokeh model of the whole.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._watched: dict[str, _Watched] = {}
        self._head = Div(name="dps-head", sizing_mode="stretch_width")
        self._tables = {
            "shards": _Table("dps-shards", SHARDS, _SHARD_NUMBERS),
            "workers": _Table("dps-workers", WORKERS, _WORKER_NUMBERS),
            "recent": _Table("dps-recent", RECENT),
        }
        self._speeds = _Curves("dps-speeds", "Updates a second, by shard", from_zero=True)
        self._losses = _Curves("dps-losses", "Loss, as workers report it")
        tables = [self._tables[name].root for name in ("shards", "workers")]
        self.root = column(
            self._head,
            row(*tables, sizing_mode="stretch_width"),
            row(self._speeds.root, self._losses.root, sizing_mode="stretch_width"),
            self._tables["recent"].root,
            sizing_mode="stretch_width",
            name="dps",
        )
        self._show([])

    async def update(self) -> None:
        """Look at all groups, and show them."""
        found = await overviews(self._scheduler)
        for each in found:
            watched = self._watched.setdefault(each.group, _Watched(each))
            watched.look(each, self._scheduler.get_events(topic(each.group)))
        running = {each.group for each in found}
        for name, watched in list(self._watched.items()):
            if name in running:
                continue
            if running:  # what has ended makes room for what runs
                del self._watched[name]
            else:
                watched.closed = True
        self._show([self._watched[name] for name in sorted(self._watched)])

    def _show(self, groups: Sequence[_Watched]) -> None:
        self._head.text = "".join(map(_headline, groups)) or (
            "<p>No parameter server runs on this cluster now; "
            "one that is started is shown here at once.</p>"
        )
        several = len(groups) > 1
        self._tables["shards"].show([line for g in groups for line in _shard_lines(g)], several)
        self._tables["workers"].show([line for g in groups for line in _worker_lines(g)], several)
        recent = [line for g in groups for line in _recent_lines(g.overview)]
        self._tables["recent"].show(sorted(recent, key=lambda line: line["t"])[::-1], several)
        marks = [t for g in groups for t in _loss_times(g.overview)]
        self._speeds.show(_named(groups, "speeds", several), marks)
        self._losses.show(_named(groups, "losses", several), marks)


# -- what is said of a group -----------------------------------------------------------------------

_SHARD_NUMBERS = ("shard", "version", "updates/s", "staleness", "epoch", "size")
_WORKER_NUMBERS = ("clock", "behind", "gradients", "gradients/s", "loss")
SHARDS = (
    *("group", "shard", "state", "node", "version", "updates/s", "staleness", "epoch"),
    *("other replicas", "size"),
)
WORKERS = (
    *("group", "worker", "node", "state", "clock", "behind", "gradients", "gradients/s", "loss"),
)
RECENT = ("time", "group", "what happened")


def _headline(watched: _Watched) -> str:
    group = watched.overview
    said = [f"closed at {_moment(group.t)}" if watched.closed else "running"]
    said.append(f"{_number(watched.rates.updates)} updates")
    rates = [rate for shard in group.shards if (rate := watched.rates.of_shard(shard)) is not None]
    said += [f"{min(rates):.1f} updates a second"] if rates and not watched.closed else []
    down = sum(shard.status == "down" for shard in group.shards)
    alarms = [f"{down} of {len(group.shards)} shards down"] if down and not watched.closed else []
    alarms += [f"{group.lost:,} acknowledged updates lost"] if group.lost else []
    alarmed = "".join(f' · <span style="{_ALARM}">{each}</span>' for each in alarms)
    return (
        f'<div style="font-size:120%;margin:0.3em 0"><b>{escape(group.group)}</b>: '
        f"{' · '.join(said)}{alarmed}</div>"
    )


def _shard_lines(watched: _Watched) -> Iterable[dict[str, Any]]:
    for shard in watched.overview.shards:
        yield {
            "group": watched.overview.group,
            "shard": str(shard.shard),
            "state": "closed" if watched.closed else shard.status,
            "node": shard.replicas[0] if shard.replicas else "–",
            "version": _number(shard.version),
            "updates/s": "–" if watched.closed else _number(watched.rates.of_shard(shard), ".1f"),
            "staleness": _number(watched.rates.staleness(shard), ".1f"),
            "epoch": str(shard.epoch),
            "other replicas": ", ".join(shard.replicas[1:]) or "–",
            "size": "–" if shard.nbytes is None else size(shard.nbytes),
        }


def _worker_lines(watched: _Watched) -> Iterable[dict[str, Any]]:
    workers = watched.overview.workers
    first = max((w.clock for w in workers if w.active and w.clock is not None), default=0)
    for worker in sorted(workers, key=lambda worker: worker.worker):
        behind = first - worker.clock if worker.active and worker.clock is not None else None
        runs = worker.active and not watched.closed
        yield {
            "group": watched.overview.group,
            "worker": worker.worker,
            "node": worker.node or "–",
            "state": "running" if runs else "ended",
            "clock": _number(worker.clock),
            "behind": _number(behind),
            "gradients": _number(worker.updates),
            "gradients/s": _number(watched.rates.of_worker(worker), ".1f") if runs else "–",
            "loss": _number(worker.loss, ".4g"),
        }


def _recent_lines(group: GroupOverview) -> Iterable[dict[str, Any]]:
    for event in group.recent:
        if said := sentence(event):
            time = _moment(event.t)
            yield {"t": event.t, "time": time, "group": group.group, "what happened": said}


def _loss_times(group: GroupOverview) -> list[float]:
    return [event.t for event in group.recent if isinstance(event, Detected)]


def _named(groups: Sequence[_Watched], curves: str, several: bool) -> dict[str, Any]:
    return {
        f"{g.overview.group} {name}" if several else name: points
        for g in groups
        for name, points in sorted(getattr(g, curves).items())
    }


def reported_losses(
    batches: Sequence[tuple[float, Any]], since: float
) -> list[tuple[float, str, float]]:
    """Return the losses of batches that came after a time: when, whose, and how much."""
    first = next((i for i in range(len(batches), 0, -1) if batches[i - 1][0] <= since), 0)
    found: list[tuple[float, str, float]] = []
    for _, batch in batches[first:]:
        for event in batch:
            match event:
                case {"event": "Reported", "name": "loss", "values": [*_, value]}:
                    found.append((event["times"][-1], event["worker"], value))
                case {"event": "Evaluated", "loss": float(value)}:
                    found.append((event["t"], "evaluator", value))
    return found


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many as a curve has at most, evenly until the last."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points[(len(points) - 1) % stride :: stride] if stride > 1 else points


def _moment(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%H:%M:%S")


def _number(value: float | None, form: str = ",") -> str:
    return "–" if value is None else format(value, form)


# -- bokeh -----------------------------------------------------------------------------------------


class _Table:
    """A table, as HTML: that of bokeh 3.9 shows nothing new (github.com/bokeh/bokeh/issues/15328).

    `numbers` are the columns that are aligned to the right.
    """

    def __init__(self, name: str, columns: Sequence[str], numbers: Sequence[str] = ()) -> None:
        self._columns = tuple(columns)
        self._numbers = frozenset(numbers)
        self.root = Div(
            name=name,
            sizing_mode="stretch_width",
            styles={"overflow": "auto", "max-height": f"{MOST_PIXELS}px"},
            stylesheets=[_STYLE],
        )

    def show(self, lines: Sequence[Mapping[str, Any]], several: bool) -> None:
        """Show these lines; whose they are only if there are `several` groups."""
        shown = [name for name in self._columns if name != "group" or several]
        head = "".join(f"<th{self._classed(name)}>{escape(name)}</th>" for name in shown)
        body = "".join(
            f"<tr>{''.join(self._cell(name, line[name]) for name in shown)}</tr>" for line in lines
        )
        self.root.text = f"<table><tr>{head}</tr>{body}</table>" if lines else ""

    def _cell(self, name: str, value: str) -> str:
        alarm = f' style="{_ALARM}"' if (name, value) == ("state", "down") else ""
        return f"<td{self._classed(name)}{alarm}>{escape(value)}</td>"

    def _classed(self, name: str) -> str:
        return ' class="number"' if name in self._numbers else ""


class _Curves:
    """Curves over time, with a dashed line at each loss of a node."""

    def __init__(self, name: str, title: str, from_zero: bool = False) -> None:
        self.source = ColumnDataSource({"xs": [], "ys": [], "name": [], "colour": []}, name=name)
        self._marks = ColumnDataSource({"x": []}, name=f"{name}-marks")
        self.root = figure(
            title=title,
            x_axis_type="datetime",
            y_range=DataRange1d(start=0) if from_zero else DataRange1d(),
            height=260,
            sizing_mode="stretch_width",
            tools="pan,wheel_zoom,box_zoom,reset",
            name=f"{name}-figure",
        )
        self.root.toolbar.autohide = True
        lines = self.root.multi_line(
            "xs", "ys", source=self.source, line_color="colour", line_width=1.5
        )
        self.root.add_glyph(
            self._marks, VSpan(x="x", line_color="#c0392b", line_dash="dashed", line_width=1)
        )
        self.root.add_tools(
            HoverTool(renderers=[lines], tooltips=[("", "@name"), ("", "$data_y{0.[0000]}")])
        )
        self._legend = Legend(
            items=[], border_line_alpha=0, background_fill_alpha=0, label_text_font_size="8pt"
        )
        self.root.add_layout(self._legend, "right")
        self._lines = lines

    def show(
        self, curves: Mapping[str, Iterable[tuple[float, float]]], marks: Iterable[float]
    ) -> None:
        """Show these curves, points of (seconds since the Unix epoch, value), and marks."""
        shown = {name: list(points) for name, points in curves.items()}
        shown = {name: points for name, points in shown.items() if points}
        self.source.data = {
            "xs": [[_local(t) for t, _ in points] for points in shown.values()],
            "ys": [[y for _, y in points] for points in shown.values()],
            "name": list(shown),
            "colour": [COLOURS[i % len(COLOURS)] for i in range(len(shown))],
        }
        since = min((points[0][0] for points in shown.values()), default=math.inf)
        self._marks.data = {"x": [_local(t) for t in marks if t >= since]}
        named = list(shown) if len(shown) <= MOST_NAMED else []
        if named != [item.label.value for item in self._legend.items]:
            self._legend.items = [
                LegendItem(label=name, renderers=[self._lines], index=i)
                for i, name in enumerate(named)
            ]


def _local(t: float) -> float:
    """A moment as bokeh has it drawn at the scheduler's own time: it takes all times for UTC."""
    offset = datetime.fromtimestamp(t).astimezone().utcoffset()
    return 1e3 * (t + (offset.total_seconds() if offset else 0.0))
