"""The plots, as PNG files. matplotlib is an extra: `ess[plot]`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ess import console
from ess.errors import not_installed

if TYPE_CHECKING:
    from ess.bench.headline.plan import Curves
    from ess.bench.locality.analysis import Locality
    from ess.sim.timeline import Span

DPI: Final = 144
OURS: Final = "#1f6feb"
THEIRS: Final = "#8b949e"
LOUD: Final = "#d1495b"
LANES: Final = {"exchange": "#a371f7", "fetch": LOUD, "store": THEIRS}


def check_folder(folder: Path | None) -> None:
    """Called before the work, so that nothing is measured for a plot that cannot be drawn."""
    console.check_folder("--plot", folder)
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise not_installed("--plot needs matplotlib, which", extra="plot")


def draw_locality(locality: Locality, folder: Path) -> None:
    layers = [*map(str, range(len(locality.within) - 1)), "MTP"]
    at = min(range(len(locality.ratios)), key=lambda place: abs(locality.ratios[place] - 0.2))
    ratio = locality.ratios[at]

    def misses(axes: Any) -> None:
        width = 0.4
        places = list(range(len(layers)))
        axes.bar([p - width / 2 for p in places], locality.lru[at], width, color=OURS, label="LRU")
        axes.bar(
            [p + width / 2 for p in places], locality.least[at], width, color=THEIRS, label="MIN"
        )
        axes.set_xticks(places, layers)
        axes.set_xlabel("layer")
        axes.set_ylabel("misses per request and step")

    def hits(axes: Any) -> None:
        asked = locality.mtp * locality.top_k
        for name, lines, color in (("LRU", locality.lru, OURS), ("MIN", locality.least, THEIRS)):
            shares = [1 - sum(line) / len(line) / asked for line in lines]
            axes.plot(locality.ratios, shares, marker="o", color=color, label=name)
        axes.set_xlabel("slots over context")
        axes.set_ylabel("hit ratio")
        axes.set_ylim(0, 1)

    def early(axes: Any) -> None:
        axes.plot(locality.warm, color=OURS, label="warmed by 32 windows")
        axes.plot(locality.cold, color=LOUD, label="not warmed")
        axes.set_xlabel("step of a new request")
        axes.set_ylabel("misses per layer")
        axes.set_ylim(bottom=0)

    def alike(axes: Any) -> None:
        axes.plot(layers, locality.within, marker="o", color=OURS, label="to the token before")
        axes.plot(layers[1:], locality.between, marker="o", color=LOUD, label="to the layer before")
        axes.set_xlabel("layer")
        axes.set_ylabel("share of the selection")
        axes.set_ylim(0, 1)

    where = f"context {locality.context:,}, mtp {locality.mtp}, top-k {locality.top_k}"
    _figure(folder / "misses-by-layer.png", f"Misses at ratio {ratio:g}, {where}", misses)
    _figure(folder / "hit-ratio.png", f"Hit ratio against sparse ratio, {where}", hits)
    _figure(folder / "warm-up.png", f"The first steps at ratio 0.2, {where}", early)
    _figure(folder / "similarity.png", f"How alike selections are, {where}", alike)


def draw_curves(curves: Curves, folder: Path, *, after: str = "") -> None:
    """`after` ends the names of the files, where a run draws several of each."""
    ways = (("with offload", curves.points, OURS), ("resident", curves.resident, THEIRS))

    def throughput(axes: Any) -> None:
        for name, points, color in ways:
            _line(axes, [(point.batch, point.tokens_per_s) for point in points], color, name)
        axes.axvline(curves.index_wall, color=LOUD, linestyle="--", label="index wall")
        axes.axvline(curves.floor_batch, color=LOUD, linestyle=":", label="slot floor")
        axes.set_xlabel("requests per GPU")
        axes.set_ylabel("tokens/s per GPU")
        axes.set_ylim(bottom=0)

    def pareto(axes: Any) -> None:
        for name, points, color in ways:
            rates = [(1e6 / point.token_us, point.tokens_per_s) for point in points]
            _line(axes, rates, color, name)
        axes.set_xlabel("tokens/s per user")
        axes.set_ylabel("tokens/s per GPU")

    _figure(
        folder / f"throughput{after}.png", f"Throughput against batch, {curves.title}", throughput
    )
    _figure(folder / f"pareto{after}.png", f"Throughput against speed, {curves.title}", pareto)


def draw_timeline(path: Path, title: str, spans: Sequence[Span], *, share: float) -> None:
    """The first `share` of a step: a whole step has too many spans for a page."""
    end_us = max(span.end_us for span in spans) * share
    shown = [span for span in spans if span.start_us < end_us]
    lanes = list(dict.fromkeys(span.lane for span in shown))
    stages = list(dict.fromkeys(span.name for span in shown if span.lane == "compute"))
    colors = {stage: f"C{place % 10}" for place, stage in enumerate(stages)}

    def timeline(axes: Any) -> None:
        named: set[str] = set()
        for span in shown:
            is_new = span.name in colors and span.name not in named
            named.add(span.name)
            axes.barh(
                lanes.index(span.lane),
                span.end_us - span.start_us,
                left=span.start_us,
                color=LANES.get(span.lane) or colors[span.name],
                label=span.name if is_new else None,
                height=0.7,
            )
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("microseconds from the start of the step")

    _figure(path, f"The first {share:.0%} of a step, {title}", timeline)


def _line(axes: Any, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=3, color=color, label=label)


def _figure(path: Path, title: str, draw: Callable[[Any], None]) -> None:
    path.parent.mkdir(exist_ok=True)
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    draw(axes)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    count = len(axes.get_legend_handles_labels()[0])
    if count > 4:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    elif count:
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    console.note(f"drawn: {path}")
