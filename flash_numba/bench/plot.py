"""Time and share of the ceiling against sequence length, as a PNG. Needs matplotlib."""

import importlib
import math
import statistics
from pathlib import Path
from typing import Any

from .driver import Measurement
from .peers import OURS, PEERS
from .shapes import DTYPES, Shape

# Okabe and Ito's palette, which people who see fewer colours tell apart; ours is the black one.
COLOURS = {OURS: "#000000"} | dict(zip(PEERS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=True))
MARKERS = {OURS: "o"} | dict(zip(PEERS, "svD^P", strict=True))

Family = tuple[int, int, int, int, bool, bool, str]


def family(shape: Shape, dtype: str) -> Family:
    """What lengths of one problem have in common."""
    return shape.B, shape.H, shape.H_kv, shape.D, shape.decoding, shape.causal, dtype


def families(results: list[Measurement]) -> dict[Family, list[Measurement]]:
    """Results by problem, each at growing lengths; problems with more than one length, where there are any."""
    found: dict[Family, list[Measurement]] = {}
    for result in results:
        found.setdefault(family(result.shape, result.dtype), []).append(result)
    for members in found.values():
        members.sort(key=lambda result: result.shape.S_kv)
    several = {key: members for key, members in found.items() if len(members) > 1}
    return several or found


def title(key: Family) -> str:
    B, H, H_kv, D, decoding, causal, dtype = key
    heads = f"{H}/{H_kv}" if H_kv < H else f"{H}"
    kind = "decoding" if decoding else "causal" if causal else "no causal mask"
    return f"{kind}: batch {B}, heads {heads}, D = {D}, {dtype}"


def roofline_seconds(result: Measurement, read_gbps: float, fma_gflops: float) -> float:
    """The least time that the machine allows: its multiply-adds, or reading and writing every array once.

    By the ceiling of the same rounds where there is one.
    """
    own = statistics.median(result.ceilings)
    read_gbps, fma_gflops = (own, fma_gflops) if result.shape.decoding else (read_gbps, own)
    moved = 1e-9 * result.shape.bytes(DTYPES[result.dtype]) / read_gbps
    return max(moved, 1e-9 * result.shape.flops / fma_gflops)


def share_ticks(least: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from below the least share to 100 per cent."""
    powers = range(math.floor(math.log10(min(least, 1.0))), 2)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)] + [100.0]
    return [tick for tick in ticks if tick > least / 2.5]


def draw(results: list[Measurement], ceilings: dict[str, Any], path: Path, subtitle: str = "") -> None:
    """Write a picture: a column of two panels for each problem, time above, share of the ceiling below.

    Args:
        results: What was measured.
        ceilings: From `ceilings.measure`, for the roofline.
        path: The PNG.
        subtitle: The machine and the date.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    # The figure alone, without pyplot's windows and global state.
    new_figure = importlib.import_module("matplotlib.figure").Figure
    columns = families(results)
    figure = new_figure(figsize=(1.5 + 4.9 * len(columns), 7.6), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row", height_ratios=(3, 2))
    read_gbps = max(ceilings["read_gbps"].values())
    fma_gflops = max(ceilings["fma_gflops"]["float32"].values())
    ticks = share_ticks(min(100 * result.share(library) for result in results for library in result.seconds))
    for (above, below), (key, members) in zip(axes.T, columns.items(), strict=True):
        lengths = [result.shape.S_kv for result in members]
        least = [1e3 * roofline_seconds(result, read_gbps, fma_gflops) for result in members]
        above.plot(lengths, least, color="0.6", linestyle="--", linewidth=1.5, label="roofline")
        below.axhline(100, color="0.6", linestyle="--", linewidth=1.5)
        libraries = dict.fromkeys(library for result in members for library in result.seconds)
        for library in sorted(libraries, key=lambda name: name == OURS):  # ours on top
            took_part = [result for result in members if library in result.seconds]
            at = [result.shape.S_kv for result in took_part]
            style: dict[str, Any] = {
                "color": COLOURS[library],
                "marker": MARKERS[library],
                "markersize": 5,
                "linewidth": 2.2 if library == OURS else 1.3,
                "label": library,
            }
            above.plot(at, [1e3 * result.median(library) for result in took_part], **style)
            below.plot(at, [100 * result.share(library) for result in took_part], **style)
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(True, which="major", color="0.9")
            axis.spines[["top", "right"]].set_visible(False)
        above.set_title(title(key), fontsize=10)
        below.set_xticks(lengths, [str(length) for length in lengths], rotation=45 if len(lengths) > 6 else 0)
        below.minorticks_off()
        below.set_xlabel("keys" if key[4] else "sequence length")
        above.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        below.set_ylim(0.8 * ticks[0], 130)
        below.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes[0, 0].set_ylabel("time a call, ms")
    kinds = {result.shape.decoding for result in results}
    of = "ceiling" if len(kinds) > 1 else "read bandwidth" if kinds == {True} else "FMA peak"
    axes[1, 0].set_ylabel(f"share of the {of}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, 0].legend(handles[::-1], labels[::-1], frameon=False)
    figure.suptitle(subtitle, fontsize=9, color="0.35")
    figure.savefig(path, dpi=130)
