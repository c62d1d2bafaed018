"""What this machine can do at most: python -m benchmarks.ceilings [--gib 1.0] [--json]"""

import argparse
import json

from flash_numba.bench.ceilings import GIB, about, machine, measure


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceilings", description=__doc__.partition(":")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the array that is read (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    of, figures = machine(), measure(int(options.gib * GIB))
    if options.json:
        print(json.dumps({"machine": of, **figures}, indent=2))
        return
    table = Table(title=about(of))
    table.add_column("ceiling")
    for count in figures["read_gbps"]:
        table.add_column(f"{count} thread" + "s" * (count > 1), justify="right")
    for dtype, peaks in figures["fma_gflops"].items():
        table.add_row(f"FMA, {dtype}, GFLOP/s", *(f"{peak:.1f}" for peak in peaks.values()))
    table.add_row(f"read {options.gib:g} GiB, GB/s", *(f"{speed:.1f}" for speed in figures["read_gbps"].values()))
    Console().print(table)


if __name__ == "__main__":
    main()
