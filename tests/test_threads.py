"""Threads that live with others: OpenMP's other users, limits from outside, forks, signals, the interpreter's end.

What changes a process for good is tried in a new one.
"""

import gc
import importlib.util
import sys
import textwrap
import threading

import ml_dtypes
import numba
import numpy as np
import pytest
from test_launch import POSIX, in_new_process

import flash_numba
from flash_numba import attention, attention_grad, attention_varlen, attention_varlen_grad, prepared, rules
from flash_numba.cpu import launch

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for loaded libraries in /proc")
posix = pytest.mark.skipif(not POSIX, reason="no fork here")

Q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype("f4")
START = """
    import os, sys, gc, threading, time, signal, warnings
    import numpy as np, numba, flash_numba
    warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking with threads about
    q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype("f4")
"""


def run(code, start=START, **environment):
    """Run code in a new process, with at least two threads; its standard output."""
    environment = {"NUMBA_NUM_THREADS": "2"} | environment
    code = f"import os; [os.environ.pop(x, 0) for x in {[x for x in environment if environment[x] is None]}]\n" + (
        textwrap.dedent(start) + textwrap.dedent(code)
    )
    return in_new_process(code, **{x: value for x, value in environment.items() if value is not None}).strip()


# -- OpenMP ------------------------------------------------------------------------------------------------------------

LEVELS = """
    import ctypes
    from flash_numba.cpu import neighbours
    def levels():
        found = neighbours.openmp_libraries()
        assert found
        return {library.omp_get_max_active_levels() for library in found}
"""
BEFORE_US = {
    "nothing": "",
    "set_num_threads": "numba.set_num_threads(1); numba.set_num_threads(2)",
    "prange": "numba.njit(parallel=True)(lambda n: sum([i for i in numba.prange(n)]) if n else 0)",
    "long call": "from flash_numba.cpu import launch; launch.WATCHED_WORK = 0",
}


@linux
@pytest.mark.parametrize("before", BEFORE_US)
def test_openmp_has_one_level_after_a_call(before):
    """Nested levels, which Numba switches on, slow other users of the same library down."""
    check = f"""
        {BEFORE_US[before]}
        flash_numba.attention(q, q, q)
        assert numba.threading_layer() == "omp"
        from numba.np.ufunc import omppool
        own = ctypes.CDLL(omppool.__file__, os.RTLD_NOLOAD | os.RTLD_NOW)  # looks in what that file needs
        print(own.omp_get_max_active_levels(), levels())
    """
    assert run(textwrap.dedent(LEVELS) + textwrap.dedent(check), NUMBA_THREADING_LAYER="omp") == "1 {1}"


@linux
def test_openmp_has_the_levels_that_a_user_asks_for():
    check = "flash_numba.attention(q, q, q); print(max(levels()) > 1)"
    environment = {"NUMBA_THREADING_LAYER": "omp", "OMP_MAX_ACTIVE_LEVELS": "3"}
    assert run(textwrap.dedent(LEVELS) + check, **environment) == "True"


@linux
def test_other_threading_layers_are_left_alone():
    check = """
        neighbours.openmp_libraries = lambda: sys.exit("looked for")
        flash_numba.attention(q, q, q); print(numba.threading_layer())
    """
    assert run(textwrap.dedent(LEVELS) + textwrap.dedent(check), NUMBA_THREADING_LAYER="workqueue") == "workqueue"


@linux
@pytest.mark.interop
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the extra interop isn't installed")
@pytest.mark.parametrize("first", ["torch", "us"])
def test_openmp_of_torch_has_one_level(first):
    calls = ["import torch; torch.ones(9) @ torch.ones(9)", "flash_numba.attention(q, q, q)"]
    lines = calls if first == "torch" else calls[::-1]
    check = "\n".join([*lines, calls[1], "print(levels())"])
    assert run(textwrap.dedent(LEVELS) + check, NUMBA_THREADING_LAYER="omp") == "{1}"


# -- limits ------------------------------------------------------------------------------------------------------------

TEAMS = """
    from flash_numba.cpu import launch
    teams, original = [], launch.parallel_driver
    def spied():
        driver = original()
        def call(*arguments):
            teams.append((arguments[-1], numba.get_num_threads()))
            driver(*arguments)
        return call
    launch.parallel_driver = spied
"""


@pytest.mark.parametrize(
    ("omp", "own", "threads"),
    [
        (None, "4", 4), ("1", None, 1), ("2", None, 2), ("2,1", None, 2), (" 3 ", None, 3), ("2", "4", 4),
        ("0", None, 4), ("x", None, 4), ("-1", None, 4), ("", None, 4), ("99", None, 4),
    ],
)  # fmt: skip
def test_omp_num_threads_is_honoured_where_numba_has_no_number(omp, own, threads):
    """Dask and joblib limit their workers so. As many of Numba's threads take part, not all of them."""
    four = "import os; os.sched_getaffinity = lambda pid: range(4); os.cpu_count = lambda: 4\n"
    check = """
        expected = flash_numba.attention(q, q, q, threads=1)
        found, machine = flash_numba.info(q, q, q)["threads"], flash_numba.info()["threads"]
        assert np.array_equal(flash_numba.attention(q, q, q), expected)
        print(*teams or [(1, 1)], found.split()[0], machine, numba.get_num_threads())
    """
    got = run(
        textwrap.dedent(TEAMS) + textwrap.dedent(check),
        four + textwrap.dedent(START),
        OMP_NUM_THREADS=omp,
        NUMBA_NUM_THREADS=own,
    )
    reason = f": OMP_NUM_THREADS={threads}" if threads < 4 else ""
    assert got == f"({threads}, {threads}) {threads} {threads} of 4{reason} 4"


def test_threads_of_a_call():
    check = """
        expected = [flash_numba.attention(q, q, q, return_lse=True, threads=1) for _ in range(2)][1]
        assert teams == []
        for threads in (2, 3, 4, 5, 2**70, None) * 2:  # the second time it is remembered
            got = flash_numba.attention(q, q, q, return_lse=True, threads=threads)
            assert np.array_equal(got[0], expected[0]) and np.array_equal(got[1], expected[1])
            assert numba.get_num_threads() == 4
        numba.set_num_threads(3)
        flash_numba.attention(q, q, q, threads=4)
        launch.WATCHED_WORK = 0  # in a helper thread, which has a number of its own
        flash_numba.attention(q, q, q)
        flash_numba.attention(q, q, q, threads=2)
        print([threads for threads, team in teams], all(threads == team for threads, team in teams))
    """
    got = run(textwrap.dedent(TEAMS) + textwrap.dedent(check), NUMBA_NUM_THREADS="4", OMP_NUM_THREADS="1")
    assert got == f"{[2, 3, 4, 4, 4, 4] * 2 + [3, 3, 2]} True"


WITH_THREADS = next(rule.calls for rule in rules.RULES if rule.name == "threads")


def each_call():
    """The public calls that take `threads`."""
    x = Q[0].swapaxes(0, 1).copy()
    starts = np.array([0, 150, 400])
    out, lse = attention(Q, Q, Q, return_lse=True)
    packed, packed_lse = attention_varlen(x, x, x, starts, starts, return_lse=True)
    return {
        "attention": lambda **more: attention(Q, Q, Q, **more),
        "attention_grad": lambda **more: attention_grad(out, Q, Q, Q, out, lse, **more),
        "attention_varlen": lambda **more: attention_varlen(x, x, x, starts, starts, **more),
        "attention_varlen_grad": lambda **more: attention_varlen_grad(
            packed, x, x, x, packed, packed_lse, starts, starts, **more
        ),
    }


@pytest.mark.parametrize("name", WITH_THREADS)
def test_threads_reach_the_launch_and_change_no_bit(name, monkeypatch):
    call, seen, original = each_call()[name], [], launch.start
    monkeypatch.setattr(prepared, "_known", {})
    monkeypatch.setattr(launch, "start", lambda of, *more: seen.append(of.limit) or original(of, *more))
    first, *others = (call(threads=threads) for threads in (None, 1, 2, 7))
    assert seen == [None, 1, 2, 7]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
    for backend in ("auto", "cpu", "reference"):
        call(threads=3, backend=backend)


@pytest.mark.parametrize(
    ("threads", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError), ([1], TypeError)],
)
@pytest.mark.parametrize("name", WITH_THREADS)
def test_threads_are_checked(name, threads, error):
    call = each_call()[name]
    call(threads=1), call(threads=1)  # which equals True and 1.0, and may be remembered
    with pytest.raises(error, match="threads must be an integer of at least 1 or None, got"):
        call(threads=threads)


def test_info_says_what_limits_threads():
    found = flash_numba.info(Q, Q, Q, threads=1)["threads"]
    assert found.startswith("1 for ")
    assert "threads=1" in found
    with pytest.raises(ValueError, match="threads"):
        flash_numba.info(Q, Q, Q, threads=0)
    before = numba.get_num_threads()
    if before > 1:
        numba.set_num_threads(1)
        assert flash_numba.info()["threads"].endswith(": numba.set_num_threads")
        numba.set_num_threads(before)


# -- forks -------------------------------------------------------------------------------------------------------------

CHILD = """
    def in_child(do):
        pid = os.fork()
        if pid == 0:
            signal.alarm(100)
            try:
                do()
                sys.stdout.flush()
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    def call(threads=None):
        out = flash_numba.attention(q, q, q)
        assert np.abs(out - flash_numba.attention(q, q, q, backend="reference")).max() < 1e-5
"""
START_THREADS = {
    "a call": "call()",
    "warmup": "flash_numba.warmup()",
    "info": "flash_numba.info(); flash_numba.info(q, q, q)",
    "set_num_threads": "numba.set_num_threads(2)",
    "get_num_threads": "numba.get_num_threads()",
    "prange": "numba.njit(parallel=True)(loop)(np.zeros(100))",
}
LOOP = """
    def loop(x):
        for i in numba.prange(x.size):
            x[i] = i
"""


@posix
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
@pytest.mark.parametrize("started", START_THREADS)
def test_forked_children_run_whatever_started_threads(started, layer):
    """On one thread, for a reason that `info` gives; and theirs again."""
    check = f"""
        {START_THREADS[started]}
        in_child(call)
        in_child(lambda: in_child(call))
        in_child(lambda: print(flash_numba.info()["threads"], "|", flash_numba.info(q, q, q)["threads"]))
        call()
    """
    text = run("".join(map(textwrap.dedent, (CHILD, LOOP, check))), NUMBA_THREADING_LAYER=layer)
    machine, _, of_call = text.partition(" | ")
    if started == "info":  # starts none, so children have their own
        assert machine == "2 of 2"
        return
    reason = f"this process was forked from one that had started Numba's threads ({layer})"
    assert machine == f"1 of 2: {reason}"
    assert of_call.startswith("1 for ")
    assert reason in of_call


@linux
def test_a_child_that_imports_the_library_itself():
    """Numba's threads were started, and the child forked, before there was anything to notice it."""
    start = """
        import os, sys, signal, warnings
        import numpy as np, numba
        warnings.simplefilter("ignore", DeprecationWarning)
        q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype("f4")
    """
    check = """
        numba.njit(parallel=True)(loop)(np.zeros(100))
        def do():
            global flash_numba
            import flash_numba
            call()
            print(flash_numba.info()["threads"].split(":")[0])
        in_child(do)
    """
    got = run("".join(map(textwrap.dedent, (CHILD, LOOP, check))), start, NUMBA_THREADING_LAYER="omp")
    assert got == "1 of 2"
    check = "numba.njit(parallel=True)(loop)(np.zeros(100)); import flash_numba; print(flash_numba.info()['threads'])"
    assert run(textwrap.dedent(LOOP) + check, start) == "2 of 2"  # the same without a fork


@posix
def test_a_child_forked_while_another_thread_compiles(tmp_path):
    """It collects garbage, and compiles what it needs: the lock of the thread that did isn't held for good."""
    check = """
        from flash_numba.cpu import launch
        compiling, original = threading.Event(), launch.CFunc.compile
        def compile(self):
            compiling.set()
            time.sleep(0.3)
            original(self)
        launch.CFunc.compile = compile
        other = threading.Thread(target=call)
        other.start()
        compiling.wait()
        def do():
            assert gc.isenabled()
            flash_numba.attention(q.astype("f8"), q.astype("f8"), q.astype("f8"))
            call()
            assert gc.isenabled()
        in_child(do)
        other.join()
        other = threading.Thread(target=numba.njit(parallel=True)(loop), args=(np.zeros(9),))  # somebody else's
        other.start()
        for _ in range(3):
            in_child(do)
        other.join()
        assert gc.isenabled()
        print("done")
    """
    assert run("".join(map(textwrap.dedent, (CHILD, LOOP, check))), FLASH_NUMBA_CACHE_DIR=str(tmp_path)) == "done"


@posix
@pytest.mark.parametrize("enabled", [True, False])
def test_a_child_has_its_collector_as_the_caller_had_it(enabled):
    """Also where the lock of the CPU's kernels isn't held: kernels of GPUs are compiled with the collector paused."""
    check = f"""
        from flash_numba.cpu import launch
        paused, go_on = threading.Event(), threading.Event()
        {"gc.enable" if enabled else "gc.disable"}()
        def compile():
            with launch.collector_paused():
                paused.set()
                go_on.wait()
        other = threading.Thread(target=compile)
        other.start()
        paused.wait()
        def do():
            assert gc.isenabled() is {enabled}
        in_child(do)
        go_on.set()
        other.join()
        print(gc.isenabled())
    """
    assert run(textwrap.dedent(CHILD) + textwrap.dedent(check)) == str(enabled)


def test_the_collector_runs_again_after_threads_have_compiled():
    """In whichever order they begin and end."""
    assert gc.isenabled()
    first, second = launch.collector_paused(), launch.collector_paused()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
@pytest.mark.parametrize("interrupted_by", ["signal", "finaliser"])
def test_a_call_from_within_a_call(interrupted_by, layer):
    """From a signal handler or a finaliser, which run in the thread that they interrupt, wherever that is."""
    if interrupted_by == "signal" and not POSIX:
        pytest.skip("sends a signal to itself")
    check = f"""
        import faulthandler
        faulthandler.dump_traceback_later(100, exit=True)
        from flash_numba.cpu import launch
        expected, original = flash_numba.attention(q, q, q, threads=1), launch.parallel_driver()
        inner, outer = [], []
        class Garbage:
            def __del__(self):
                within()
        def within(*_):
            inner.append(np.array_equal(flash_numba.attention(q, q, q), expected))
        def interrupt():
            if {interrupted_by == "signal"}:
                signal.signal(signal.SIGINT, within)
                signal.raise_signal(signal.SIGINT)
            else:
                garbage = Garbage()
                garbage.itself = garbage
                del garbage
                gc.collect()
        def driver(*arguments):
            if not outer:
                outer.append(True)
                interrupt()
            original(*arguments)
        launch.parallel_driver = lambda: driver
        assert np.array_equal(flash_numba.attention(q, q, q), expected)
        assert np.array_equal(flash_numba.attention(q, q, q), expected)
        print(inner, launch._in_workqueue)
    """
    assert run(check, NUMBA_THREADING_LAYER=layer) == "[True] False"


def strided(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


def rows(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


FLOAT8 = ml_dtypes.float8_e5m2
N = 49900  # without rules, the products of that many rows of one dimension are just not watched on two threads
COSTLY = {
    "dropout": ([rows(1, N, 1)] * 3, {"dropout": 0.1, "seed": 1}),
    "softcap": ([rows(1, N, 1)] * 3, {"softcap": 5.0}),
    "ALiBi": ([rows(1, N, 1)] * 3, {"alibi_slopes": np.ones(1)}),
    "bias": ([rows(1, N, 1)] * 3, {"bias": np.broadcast_to(np.float32(0), (N, N))}),
    "no dimensions to speak of": ([rows(1, N, 1)] * 3, {}),
    "strided": ([rows(1, 1, 64), *[strided(rows(1, 2**21, 64))] * 2], {}),
    "big-endian": ([rows(1, 1, 64), *[rows(1, 2**21, 64, dtype=">f4")] * 2], {}),
    "8 bits": ([rows(1, 1, 64), *[np.broadcast_to(rows(1, 1, 64, dtype=FLOAT8), (1, 2**24, 64))] * 2], {}),
}  # fmt: skip


@pytest.fixture
def watched(monkeypatch):
    """Whether calls were watched; nothing is computed."""
    seen = []
    monkeypatch.setattr(launch, "thread_limit", lambda asked=None: 2)
    monkeypatch.setattr(launch, "parallel_driver", lambda: lambda *_: None)
    monkeypatch.setattr(launch, "run_parallel", lambda *_: seen.append(False))
    monkeypatch.setattr(launch, "run_watched", lambda *_: seen.append(True))
    return seen


@pytest.mark.parametrize("name", COSTLY)
def test_calls_are_watched_by_the_time_that_they_take(name, watched):
    """Each takes more than a tenth of a second, on two threads, and few FLOPs."""
    arrays, options = COSTLY[name]
    attention(*arrays, **options)
    assert watched == [True]


def test_gradients_are_watched_likewise(watched):
    q = rows(1, 20000, 1)
    attention_grad(q, q, q, q, q, np.zeros((1, 20000), "f4"), dropout=0.1, seed=1)
    assert watched == [True]


def test_short_calls_are_not_watched(watched):
    attention(rows(1, 8, 1024, 64), rows(1, 8, 1024, 64), rows(1, 8, 1024, 64))
    attention(Q, strided(Q), Q, dropout=0.1, seed=1, softcap=5.0, bias=rows(400, 400))
    assert watched == [False, False]


# -- where no thread can be started ------------------------------------------------------------------------------------


def no_thread(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_calls_where_no_thread_can_be_started(monkeypatch):
    expected = attention(Q, Q, Q)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    seen = []
    np.testing.assert_array_equal(attention(Q, Q, Q, progress=lambda *of: seen.append(of)), expected)
    assert seen[-1][0] == seen[-1][1] > 0
    monkeypatch.setattr(launch, "WATCHED_WORK", 0)
    np.testing.assert_array_equal(attention(Q, Q, Q), expected)


def test_an_error_of_a_call_where_no_thread_can_be_started(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(launch, "run_parallel", fail)
    monkeypatch.setattr(launch, "thread_limit", lambda asked=None: 2)
    with pytest.raises(ZeroDivisionError):
        attention(Q, Q, Q, progress=print)


def test_a_call_at_the_end_of_the_interpreter():
    """From Python 3.12 on no thread can be started there."""
    check = """
        import atexit
        expected = flash_numba.attention(q, q, q)
        def last():
            seen = []
            out = flash_numba.attention(q, q, q, progress=lambda done, total: seen.append(done == total))
            print(np.array_equal(out, expected), seen[-1])
        atexit.register(last)
    """
    assert run(check) == "True True"
