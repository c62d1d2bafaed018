"""The `flash-numba` command. It needs typer and rich (the extra `cli`); the library needs neither, and never prints."""

import contextlib
import importlib.util
import io
import json
import math
import platform
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import ml_dtypes
import numba
import numpy as np

from . import check, diagnosis, files, interface, progress, rules
from ._version import __version__
from .backend import BackendError

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from typer.core import TyperCommand
except ImportError as missing:
    print(f'flash-numba: {missing.name} is not installed; pip install "flash_numba[cli]"', file=sys.stderr)
    raise SystemExit(2) from None

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Dtype(str, Enum):
    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def main() -> None:
    """Run the command line."""
    # As Ctrl-C does, so that temporary files go and the kernel stops; 128 + the signal's number is the shell's custom.
    for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):  # the latter two are a closed terminal's, on POSIX and on Windows
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # not where nohup has it ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be what its encoding has no characters for
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="flash-numba")
    except BackendError as error:
        typer.echo(f"flash-numba: {' '.join(str(error).split())}", err=True)
        sys.exit(2)


def fail(why: object) -> NoReturn:
    """One line on stderr, exit status 2."""
    typer.echo(f"flash-numba: {' '.join(str(why).split())}", err=True)
    raise typer.Exit(2)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flash-numba {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact attention that streams: one online-softmax recurrence compiled by Numba."""


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Any]:
    """A bar with the time left, on stderr: a callable of (done, total). None where stderr is no terminal."""
    if not Console(stderr=True).is_terminal:
        yield None
        return
    with progress.bar(title) as report:
        yield report


# ---- info, warmup


@app.command("info")
def info_command() -> None:
    """What was found on this machine: versions, SIMD width, threads, kernel cache, GPU, and what is missing for one."""
    typer.echo(str(diagnosis.info()))


@app.command("warmup")
def warmup_command(
    dtype: Annotated[list[Dtype] | None, typer.Option(help="May be repeated. Default: all.")] = None,
    backend: Annotated[str, typer.Option(help="cpu, or cuda for the kernels of the first GPU.")] = "cpu",
    head_dim: Annotated[
        list[int] | None, typer.Option(min=1, help="For a GPU. May be repeated. Default: 64 and 128.")
    ] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Those of attention_grad too (CPU).")] = False,
) -> None:
    """Compile the kernels now, or see that they are on disk, so that no later call has to. Status 1 if none can be."""
    dtypes = [np.dtype(d.value if d != Dtype.bfloat16 else ml_dtypes.bfloat16) for d in dtype or list(Dtype)]
    try:
        with progress_bar("compiling") as report, warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=diagnosis.NotKeptWarning)
            names = diagnosis.warmup(
                dtypes, backend=backend, head_dims=head_dim or (64, 128), gradients=gradients, progress=report
            )
    except (ValueError, BackendError) as error:
        fail(error)
    if why := diagnosis.not_kept():
        typer.echo(f"flash-numba: {why}", err=True)
        raise typer.Exit(1)  # a later call will have to compile
    typer.echo(f"ready: {', '.join(names)}")


# ---- check


@app.command("check")
def check_command(
    size: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length. May be repeated.")] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="May be repeated. Default: all.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dimension.")] = check.HEAD_DIM,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Measure numerical errors on this machine, each next to its tolerance band. Exit status 1 if a band is broken."""
    cases = check.cases([d.value for d in dtype or Dtype], size or check.SIZES)
    rows: list[check.Measurement] = []
    with progress_bar("checking") as report:
        for done, case in enumerate(cases, 1):
            rows += check.measure(case, seed, head_dim)
            if report:
                report(done, len(cases))
    setup = {
        "flash_numba": __version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "heads": check.HEADS,
        "head_dim": head_dim,
        "seed": seed,
    }
    ok = all(row.ok for row in rows)
    if as_json:
        typer.echo(json.dumps({**setup, "ok": ok, "measurements": [json_row(row) for row in rows]}, indent=1))
    else:
        print_table(rows, setup)
    raise typer.Exit(0 if ok else 1)


def json_row(row: check.Measurement) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    fields = {**row._asdict(), "ok": row.ok}
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in fields.items()}


def print_table(rows: list[check.Measurement], setup: dict[str, Any]) -> None:
    table = Table(title="Errors, and what is allowed where they are largest", caption=CAPTION, box=None)
    for heading in ("dtype", "keys", "logits", ""):
        table.add_column(heading)
    for heading in ("max abs", "band", "rel p50", "p99", "max", "band", "lse", "band"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        first = row.comparison == check.COMPARISONS[0]
        errors = row[4:-1]
        table.add_row(
            *((row.dtype, str(row.keys), row.logits) if first else ("", "", "")),
            row.comparison,
            *("" if x is None else f"{x:.1e}" for x in errors),
            "ok" if row.ok else "[bold red]BROKEN",
        )
    # The width is the table's own: a narrower one would cut figures off.
    console = Console(width=max(Console().width, 112))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in setup.items()), style="dim", highlight=False)
    broken = sum(not row.ok for row in rows)
    verdict = (
        f"{broken} of {len(rows)} lines break their band" if broken else f"all {len(rows)} lines within their bands"
    )
    console.print(verdict, highlight=False)


CAPTION = """online: online against one-shot softmax in NumPy, all in the dtype. kernel: compiled, against float64.
dq, dk, dv: compiled gradients, against float64. normal: standard normal q, k, v, dout. large: q times 20.
rel: relative to sum(p |v|), and to the terms of a gradient's sum. Numbers below the dtype's normal range have lost
digits, up to all: the absolute band alone judges them."""


# ---- run


class Causal(str, Enum):
    """Where the diagonal of a causal mask ends, where there are more keys than queries or fewer."""

    bottom_right = "bottom-right"
    top_left = "top-left"


class RunCommand(TyperCommand):
    """Lets `--causal` stand alone: only an alignment that follows is its value, never a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        alignments = [alignment.value for alignment in Causal]
        words: list[str] = []
        for word in args:
            if words and words[-1] == "--causal" and word in alignments:
                words[-1] = f"--causal={word}"
            else:
                words.append(word)
        return super().parse_args(ctx, ["--causal=bottom-right" if word == "--causal" else word for word in words])


@app.command("run", cls=RunCommand)
def run_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="One archive (.npz, .safetensors) with q, k and v, or three files q k v."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the output: .npy, .npz, .safetensors.")
    ],
    lse: Annotated[Path | None, typer.Option(help="Where to write the log-sum-exp of each row.")] = None,
    q: Annotated[str, typer.Option(metavar="NAME", help="Name of the queries in their archive.")] = "q",
    k: Annotated[str, typer.Option(metavar="NAME", help="Name of the keys.")] = "k",
    v: Annotated[str, typer.Option(metavar="NAME", help="Name of the values.")] = "v",
    dtype: Annotated[Dtype | None, typer.Option(help="What raw elements are: .npy can't say bfloat16.")] = None,
    causal: Annotated[
        Causal | None, typer.Option(help="Row i sees keys up to i, aligned bottom-right (if not given) or top-left.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Factor of the scores. Default: 1 / sqrt(D).")] = None,
    mask: Annotated[Path | None, typer.Option(help="File with a boolean mask, True = keep.")] = None,
    mask_name: Annotated[str, typer.Option(metavar="NAME", help="Name of the mask in its archive.")] = "mask",
    layout: Annotated[str, typer.Option(help="bhsd for (..., H, S, D), bshd for (..., S, H, D).")] = "bhsd",
    backend: Annotated[str, typer.Option(help=", ".join(rules.BACKENDS))] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use. Default: all.")] = None,
) -> None:
    """Attention on arrays in files, which are mapped and not read whole. The output appears whole or not at all."""
    rule = {Causal.bottom_right: True, Causal.top_left: "top-left", None: False}[causal]
    arguments = {"causal": rule, "scale": scale, "layout": layout, "backend": backend}
    for written in filter(None, (output, lse)):
        for read in filter(None, (*inputs, mask)):
            if written.exists() and read.exists() and written.samefile(read):
                fail(f"{written}: is an input, which would be overwritten")
    try:
        set_threads(threads)
        arrays = read_inputs(inputs, (q, k, v), dtype)
        mask_array = None if mask is None else files.read_mask(mask, mask_name)
        typer.echo(attend(inputs, arrays, {**arguments, "mask": mask_array}, output, lse))
    except files.FileError as error:
        fail(error)
    except MemoryError:
        fail("not enough memory")
    except KeyboardInterrupt:
        typer.echo("flash-numba: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


def set_threads(threads: int | None) -> None:
    if threads is not None:
        try:
            numba.set_num_threads(threads)
        except ValueError as error:
            fail(f"--threads {threads}: {error}")


def read_inputs(inputs: list[Path], names: tuple[str, ...], dtype: Dtype | None) -> list[np.ndarray]:
    """The arrays q, k and v, from one archive or from a file each."""
    if len(inputs) == 1 and inputs[0].suffix == ".npy":
        fail(f"{inputs[0]}: a .npy file holds one array; give three, for q, k and v")
    if len(inputs) not in (1, 3):
        fail(f"{len(inputs)} files; give one archive with q, k and v, or three files")
    paths = inputs * 3 if len(inputs) == 1 else inputs
    arrays = []
    for path, name in zip(paths, names, strict=True):
        arrays.append(files.read(path, name, dtype and dtype.value))
        if arrays[-1].ndim < 2:
            raise files.FileError(path, f"shape {arrays[-1].shape}; attention takes (..., S, D)")
    return arrays


def attend(inputs: list[Path], arrays: list[np.ndarray], arguments: Any, output: Path, lse: Path | None) -> str:
    """Compute the output, write it, and return a line that says so."""
    q, k, v = arrays
    dtype = q.dtype.newbyteorder("=")
    heads_and_rows = q.shape[:-1] if arguments["layout"] == "bhsd" else (*q.shape[:-3], *q.shape[-3:-1][::-1])
    if lse is not None and lse.resolve() == output.resolve():
        fail(f"{lse}: named for the output and for the log-sum-exp")
    with contextlib.ExitStack() as stack:
        # Both before the work, which would be lost if they couldn't be written.
        out_file = stack.enter_context(files.NewFile(output, "out", (*q.shape[:-1], v.shape[-1]), dtype))
        if lse is not None:
            lse_dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)
            lse_file = stack.enter_context(files.NewFile(lse, "lse", heads_and_rows, lse_dtype))
        report = stack.enter_context(progress_bar(output.name))
        try:
            # Loads the kernel or compiles it, which the time below is not about.
            interface.attention(*np.zeros((3, 512, 64), dtype), backend=arguments["backend"])
            started = time.perf_counter()
            out, row_lse = interface.attention(
                q, k, v, **arguments, out=out_file.array, return_lse=True, progress=report
            )
        except (ValueError, TypeError) as error:
            fail(f"{', '.join(map(str, inputs))}: {error}")
        except BackendError as error:
            fail(error)
        seconds = time.perf_counter() - started
        if lse is not None:
            lse_file.array[...] = row_lse
            lse_file.commit()
        out_file.commit()
    rate = flops(q, k, v, arguments) / seconds / 1e9
    return f"{output}: {out.shape} {dtype.name}, {seconds:.3g} s, {rate:.3g} GFLOP/s"


def flops(q: np.ndarray, k: np.ndarray, v: np.ndarray, arguments: Any) -> float:
    """Both products, 2 FLOPs a multiplication and addition; half of it where causal. A mask takes nothing off."""
    rows = q.size // max(q.shape[-1], 1)
    keys = k.shape[-2 if arguments["layout"] == "bhsd" else -3]
    return 2.0 * rows * keys * (q.shape[-1] + v.shape[-1]) / (2 if arguments["causal"] else 1)


# ---- bench


class Shapes(str, Enum):
    """`bench.shapes.SETS` and `GRADIENT_SETS`, which aren't imported for the other commands."""

    short = "short"
    main = "main"
    decode = "decode"
    tiny = "tiny"
    full = "full"
    lengths = "lengths"
    gradient = "gradient"


@app.command("bench")
def bench_command(
    shapes: Annotated[
        Shapes | None, typer.Option(help="Which problems. Default: main; lengths with --plot; short with --quick.")
    ] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="May be repeated. Default: float32.")] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Only with the causal mask, or only without.")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="numpy,torch,onnxruntime,openvino,jax or none. Default: those installed."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds. Default: 7, or 3 with --quick.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of every library. Default: all cores.")] = None,
    spin: Annotated[bool, typer.Option("--spin", help="Let idle threads spin, for calls of microseconds.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, small problems.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw time and share of the ceiling.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure.")] = None,
) -> None:
    """Measure the machine's ceilings, then this library next to NumPy and others, each in a process of its own."""
    from .bench import command, driver

    effort = command.QUICK if quick else command.FULL
    chosen = shapes.value if shapes else "lengths" if plot else "short" if quick else "main"
    for path in filter(None, (plot, json_file)):  # before the minutes of measuring
        if path.is_dir() or not path.resolve().parent.is_dir():
            fail(f"{path}: can't be written")
    if plot and importlib.util.find_spec("matplotlib") is None:
        fail('--plot needs matplotlib; pip install "flash_numba[bench]"')
    try:
        names = command.chosen_peers(peers)
        problems = command.chosen_problems(chosen, [d.value for d in dtype or [Dtype.float32]], causal)
        with Console(stderr=True).status("measuring") as status:
            effort = effort._replace(rounds=rounds or effort.rounds)
            run = command.measure(problems, names, effort, threads, not spin, status.update)
        command.print_run(run)
        if json_file:
            command.write_json(run, json_file)
        if plot:
            command.write_plot(run, plot)
    except (ValueError, OSError, driver.WorkerError) as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo("flash-numba: interrupted", err=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    main()
