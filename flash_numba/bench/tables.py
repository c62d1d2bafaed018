"""Figures as people read them: cells, tables for a terminal, tables in Markdown."""

from collections.abc import Collection

from .driver import Measurement, Report
from .peers import OURS

Rows = list[list[str]]

# From here on the spread of the rounds is worth saying.
SPREAD = 0.1


def milliseconds(seconds: float) -> str:
    """Three figures, never an exponent."""
    value = 1e3 * seconds
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def megabytes(count: int | None) -> str:
    return "" if count is None else f"{1e-6 * count:.1f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.95 else f"{ratio:.1f}x"


def spread_note(result: Measurement, library: str) -> str:
    """How far the middle half of the rounds lies from the median, where that is more than a little."""
    apart = result.spread(library)
    return f"±{50 * apart:.0f} %" if apart > SPREAD else ""


HEADINGS = ["shape", "library", "ms", "", "ours is", "speed", "of the ceiling", "extra MB"]


def rows_of(result: Measurement) -> Rows:
    """A line a library; those that took no part say why in `notes`."""
    return [
        [
            "" if number else result.shape.name,
            library,
            milliseconds(result.median(library)),
            spread_note(result, library),
            "" if library == OURS else times(result.ratio(library)) + " as fast",
            f"{result.speed(library):.1f} {result.unit}",
            percent(result.share(library)) + ("" if result.counted else " ?"),
            megabytes(result.peak_bytes.get(library)),
        ]
        for number, library in enumerate(result.seconds)
    ]


def notes(report: Report) -> list[str]:
    """What the figures leave out, and why."""
    lines = [f"{library} isn't here: {why}" for library, why in report.missing.items()]
    seen: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        for library, why in result.refused.items():
            seen.setdefault((library, why), []).append(f"{result.shape.name} {result.dtype}")
    lines += [f"{library}: {why} ({', '.join(where)})" for (library, why), where in seen.items()]
    if not all(result.counted for result in report.results):
        lines.append(
            "?: the threads had fewer cores than they are, so these figures don't count; measure on a quiet machine"
        )
    return lines


def markdown(headings: list[str], rows: Rows, text_columns: int = 1) -> str:
    """A Markdown table; all but the first columns are aligned right."""
    rule = ["---"] * text_columns + ["---:"] * (len(headings) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rule, *rows])


def show(
    title: str, headings: list[str], rows: Rows, text_columns: int, group: int = 0, left: Collection[int] = ()
) -> None:
    """Print a table on the terminal, a rule between rows that differ in the first `group` columns.

    The first `text_columns` are aligned left, and those in `left`. A row whose first cell is empty goes on with the
    problem of the one above.
    """
    from rich.console import Console
    from rich.measure import Measurement as Width
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < text_columns or column in left else "right", no_wrap=True)
    before: list[str] = []
    for row in rows:
        if before and group and row[0] and before[:group] != row[:group]:
            table.add_section()
        table.add_row(*row)
        before = row
    # A line is as long as it needs to be: a narrower one would cut figures off, and a log has no width of its own.
    unbounded = Console(width=1000)
    needed = Width.get(unbounded, unbounded.options, table).maximum
    Console(width=max(Console().width, needed)).print(table)
