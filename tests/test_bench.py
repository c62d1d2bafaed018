"""`flash-numba bench`: shapes, ceilings, workers, rounds, tables and pictures. No speed is judged here."""

import io
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from typer.testing import CliRunner

import flash_numba
from flash_numba import cli, reference
from flash_numba.bench import (
    baselines,
    ceilings,
    command,
    driver,
    onnx_model,
    peers,
    plot,
    shapes,
    tables,
    worker,
)
from flash_numba.bench.driver import Measurement, Report
from flash_numba.bench.shapes import FULL, GRADIENT, GRADIENT_SETS, SETS, SHORT, Shape
from flash_numba.cpu.ir.registers import REGISTER_TILE

SMALL = Shape("small", 2, 6, 2, 5, 9, 4, False)
TINY = shapes.square(1, 1, 16, 64)[0]


# --- shapes


ALL = {shape for shapes in (*SETS.values(), *GRADIENT_SETS.values()) for shape in shapes}


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.name)
def test_shapes_are_well_formed(shape):
    assert min(shape[1:7]) >= 1
    assert shape.H % shape.H_kv == 0
    assert shape.causal == shape.name.removesuffix("-grad").endswith("-causal")
    assert shape.gradient == shape.name.endswith("-grad")
    assert shape.decoding == shape.name.startswith("decode-")


def test_shape_names_are_unique_and_ci_measures_some_of_all():
    names = [shape.name for shape in (*FULL, *GRADIENT)]
    assert len(set(names)) == len(names)
    assert set(SHORT) < set(FULL)
    assert {*SETS, *GRADIENT_SETS} == {member.value for member in cli.Shapes}
    assert not any(shape.gradient for shapes in SETS.values() for shape in shapes)


@pytest.mark.parametrize("shape", [shape for shape in FULL if not shape.causal], ids=lambda shape: shape.name)
def test_flops_count_two_products(shape):
    # The score product: S_q * S_kv dot products of D multiplications and D additions; the output's has as many.
    per_head = 2 * (shape.S_q * shape.S_kv * (shape.D + shape.D))
    assert shape.flops == shape.B * shape.H * per_head


def test_causal_flops_are_half_of_a_square():
    for full, causal in (shapes.square(1, 8, 1024, 64), shapes.square(2, 3, 7, 5)):
        assert 2 * causal.flops == full.flops


@pytest.mark.parametrize(("rows", "keys"), [(1, 100), (40, 100), (100, 100), (100, 40)])
def test_causal_flops_follow_the_visible_area(rows, keys):
    shape = Shape("", 2, 3, 1, rows, keys, 8, True)
    seen = int((np.arange(keys) <= np.arange(rows)[:, None] + keys - rows).sum())
    # The area under the diagonal's line leaves out half of each element that the line crosses.
    area = seen - min(rows, keys) / 2
    assert shape.flops == 4 * 2 * 3 * 8 * area


def test_a_gradient_takes_five_products_more():
    for shape in GRADIENT:
        assert 2 * shape.flops == 7 * shape._replace(gradient=False).flops


def test_inputs_fit_the_shape():
    for dtype in shapes.DTYPES.values():
        q, k, v = SMALL.inputs(dtype)
        assert q.shape == (2, 6, 5, 4)
        assert k.shape == v.shape == (2, 2, 9, 4)
        assert q.dtype == k.dtype == v.dtype == dtype
        assert SMALL.kv_bytes(dtype) == k.nbytes + v.nbytes
        assert SMALL.bytes(dtype) == 2 * q.nbytes + k.nbytes + v.nbytes
        dout = SMALL.dout(dtype)
        assert dout.shape == q.shape
        assert dout.dtype == dtype
        assert (dout != q).any()
        assert SMALL.result_bytes(dtype) == dout.nbytes
        with_gradient = SMALL._replace(gradient=True).result_bytes(dtype)
        assert with_gradient == dout.nbytes + 4 * 2 * 6 * 5 + q.nbytes + k.nbytes + v.nbytes


@pytest.mark.parametrize("shape", FULL, ids=lambda shape: shape.name)
def test_a_small_problem_is_of_the_same_kind(shape):
    small = shape.small()
    assert (small.H, small.H_kv, small.D, small.causal) == (shape.H, shape.H_kv, shape.D, shape.causal)
    assert small.decoding == shape.decoding
    assert small.flops <= 2**31
    if shape.causal:
        assert small.S_q == small.S_kv  # where libraries agree on the alignment


# --- baselines


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", [baselines.one_shot, baselines.online])
def test_baselines_agree_with_the_oracle(attend, causal):
    for shape in (SMALL, Shape("", 1, 4, 4, 70, 600, 16, causal)):
        q, k, v = shape.inputs(np.float64)
        before = [x.copy() for x in (q, k, v)]
        expected = reference.attention(q, k, v, causal=causal)
        np.testing.assert_allclose(attend(q, k, v, causal), expected, rtol=0, atol=1e-13)
        for x, copy in zip((q, k, v), before, strict=True):
            np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_baseline_agrees_with_the_oracle(causal):
    for shape in (SMALL, Shape("", 1, 4, 4, 70, 600, 16, causal)):
        q, k, v = shape.inputs(np.float64)
        dout = shape.dout(np.float64)
        out, lse = reference.attention(q, k, v, causal=causal, return_lse=True)
        exact = reference.attention_grad(dout, q, k, v, out, lse, causal=causal)
        for dx, want in zip(baselines.one_shot_grad(q, k, v, dout, causal), exact, strict=False):
            np.testing.assert_allclose(dx, want, rtol=0, atol=1e-13)


# --- ceilings


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_kernel_does_every_round_on_every_lane(dtype):
    run, chains, lanes = ceilings.fma_chains(np.dtype(dtype))
    state = np.arange(chains * lanes, dtype=dtype).reshape(chains, lanes)
    expected = state.copy()
    run(state, 9)
    for _ in range(9):
        expected = expected / 2 + dtype(0.25)
    np.testing.assert_array_equal(state, expected)


def test_fma_kernel_is_nothing_but_multiply_adds_on_registers():
    run, chains, lanes = ceilings.fma_chains(np.dtype(np.float32))
    (assembly,) = run.inspect_asm().values()
    if not REGISTER_TILE.fma or "vfmadd" not in assembly:
        pytest.skip("assembly of another CPU")
    registers = chains * lanes // REGISTER_TILE.register(numba.types.float32)
    blocks = re.split(r"\n(?=\.LBB\w+:)", assembly)
    loops = [block for block in blocks if len(re.findall(r"vfmadd\w+ps", block)) >= registers]
    assert loops
    inner = max(loops, key=lambda block: len(re.findall(r"vfmadd\w+ps", block)))
    instructions = re.findall(r"^\t([a-z]\w*)", inner, re.MULTILINE)
    assert len([word for word in instructions if not word.startswith("vfmadd")]) <= 5  # the counter and the jump
    assert "(%" not in inner  # no memory


@pytest.mark.parametrize("threads", [1, 2])
def test_fma_peak_is_physically_plausible(threads):
    # From an emulated core to a future one: 0.01 GHz with one lane, 10 GHz with 4 FMAs of 32 lanes a cycle.
    assert 0.02 < ceilings.fma_peak(threads, seconds=0.002, repeats=2) < threads * 2560


def test_read_bandwidth_is_physically_plausible():
    assert 0.01 < ceilings.read_bandwidth(2, nbytes=2**22, repeats=2) < 10_000


def test_read_sees_every_word():
    words = np.arange(1001, dtype=np.uint64)
    assert ceilings.read(words) == 500_500


def test_work_runs_once_on_each_thread():
    ran = []
    assert ceilings.run_together(ran.append, 3) > 0
    assert sorted(ran) == [0, 1, 2]


def test_machine_names_the_cpu_and_the_versions():
    about = ceilings.machine()
    assert about["cpu"]
    assert about["cores"] >= 1
    assert about["numpy"] == np.__version__
    assert about["cpu"] in ceilings.about(about)


def test_every_ceiling_is_measured_by_thread_count():
    figures = ceilings.measure(nbytes=2**20, threads=2)
    assert (
        {*figures["fma_gflops"]["float32"]} == {*figures["fma_gflops"]["float64"]} == {*figures["read_gbps"]} == {1, 2}
    )
    assert figures["read_bytes"] == 2**20


# --- the model for ONNX Runtime


def fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """Protobuf's wire format, the other way: (field number, integer or bytes)."""
    found: list[tuple[int, int | bytes]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(message):
        key = varint()
        value = varint()
        if key & 7 == 2:
            found.append((key >> 3, message[at : at + value]))
            at += value
        else:
            assert key & 7 == 0
            found.append((key >> 3, value))
    return found


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**40])
def test_integers_of_any_length(value):
    assert fields(onnx_model.field(15, value)) == [(15, value)]


def test_the_model_is_one_node_with_its_inputs_and_outputs():
    model = onnx_model.one_node(
        "MultiHeadAttention", {"q": onnx_model.FLOAT, "k": onnx_model.FLOAT}, {"out": onnx_model.FLOAT16},
        {"num_heads": 300}, "com.microsoft",
    )  # fmt: skip
    parts = fields(model)
    assert (1, onnx_model.IR_VERSION) in parts
    opsets = [dict(fields(content)) for number, content in parts if number == 8]
    assert opsets == [{1: b"", 2: 23}, {1: b"com.microsoft", 2: 1}]
    graph = fields(dict(parts)[7])
    node = fields(dict(graph)[1])
    assert [x for number, x in node if number in (1, 2)] == [b"q", b"k", b"out"]
    assert dict(node)[4] == b"MultiHeadAttention"
    assert dict(fields(dict(node)[5])) == {1: b"num_heads", 3: 300, 20: onnx_model.INT_ATTRIBUTE}
    names = [dict(fields(x))[1] for number, x in graph if number in (11, 12)]
    assert names == [b"q", b"k", b"out"]
    elements = [fields(fields(fields(x)[1][1])[0][1])[0] for number, x in graph if number in (11, 12)]
    assert elements == [(1, 1), (1, 1), (1, 10)]


# --- peers


@pytest.mark.parametrize("name", ["flash_numba", "numpy"])
def test_libraries_compute_attention(name):
    version, prepare = peers.LIBRARIES[name](1)
    assert version
    for shape, dtype in itertools.product((SMALL, TINY, shapes.decode(1, 4, 2, 33, 8)), ("float32", "float64")):
        assert worker.check(prepare, shape, dtype) < 1e-5


@pytest.mark.parametrize("name", ["flash_numba", "numpy"])
def test_libraries_compute_gradients(name):
    _, prepare = peers.LIBRARIES[name](1)
    for shape, dtype in itertools.product((SMALL, TINY), ("float32", "float64")):
        assert worker.check(prepare, shape._replace(gradient=True), dtype) < 1e-5


def test_numpy_refuses_16_bits():
    _, prepare = peers.numpy(1)
    with pytest.raises(peers.Refused, match="bfloat16"):
        prepare(SMALL, "bfloat16")


def test_a_score_matrix_larger_than_memory_is_refused():
    peers.check_memory(1)
    with pytest.raises(peers.Refused, match=r"needs .* GB"):
        peers.check_memory(2**60)


def test_pools_are_told_how_many_threads_and_to_sleep():
    environment = peers.threads_in_environment(2)
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert {environment[name] for name in environment if name.endswith(("THREADS", "NPROC"))} == {"2"}
    assert {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"} <= set(environment)
    assert "OMP_WAIT_POLICY" not in peers.threads_in_environment(2, passive=False)


# --- a worker, in this process


def library(run, version="1.0"):
    """A library whose every call is `run`."""
    return lambda threads: (version, lambda shape, dtype: peers.Call(lambda: run(shape)))


def talk(monkeypatch, of, *questions):
    """What a worker answers."""
    monkeypatch.setitem(worker.LIBRARIES, "fake", of)
    answers = io.StringIO()
    worker.serve("fake", 1, io.StringIO("".join(json.dumps(question) + "\n" for question in questions)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_worker_answers_every_question(monkeypatch):
    _, prepare = peers.numpy(1)
    version, ready, turn, errors = talk(
        monkeypatch,
        lambda threads: ("2.0", prepare),
        {"prepare": [*TINY, "float32"]},
        {"turn": None},
        {"errors": None},
    )
    assert version == {"version": "2.0"}
    assert ready["error"] < 1e-5
    assert ready["peak_bytes"] is None or ready["peak_bytes"] >= 0
    assert turn["seconds"] > 0
    assert 0 < errors["rms"] <= errors["max"] < 1e-5


def test_a_worker_says_that_its_library_is_missing(monkeypatch):
    def missing(threads):
        raise ModuleNotFoundError("No module named 'fake'")

    assert talk(monkeypatch, missing, {"turn": None}) == [{"missing": "No module named 'fake'"}]


def test_a_library_that_computes_something_else_is_refused(monkeypatch):
    _, answer = talk(monkeypatch, library(lambda shape: np.ones((1, 1, 16, 64))), {"prepare": [*TINY, "float32"]})
    assert "off by" in answer["refused"]
    nothing = library(lambda shape: np.full((1, 1, 16, 64), np.nan))
    _, answer = talk(monkeypatch, nothing, {"prepare": [*TINY, "float32"]})
    assert "off by nan" in answer["refused"]


def test_what_a_library_raises_is_the_reason_in_one_line(monkeypatch):
    def fails(shape):
        raise RuntimeError("no kernel\nfor this\nat all")

    _, answer = talk(monkeypatch, library(fails), {"prepare": [*TINY, "float32"]})
    assert answer == {"refused": "RuntimeError: no kernel"}


def test_peak_memory_is_that_of_the_call():
    if not Path("/proc/self/clear_refs").exists():
        assert worker.peak_memory(lambda: None, 0) is None
        return

    def call():
        scratch = np.ones(2**23)  # 64 MiB
        return scratch[: 2**21].copy()  # 16 MiB, the result

    peak = worker.peak_memory(call, 2**24)
    assert peak is None or 60e6 < peak < 75e6


def test_a_turn_ends_when_its_threads_sleep(monkeypatch):
    # CPU time before and after each nap: the pool spins through two of them.
    spent = iter([1.0, 1.002, 1.002, 1.004, 1.004, 1.004])
    naps = []
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, process_time=lambda: next(spent), sleep=naps.append)
    monkeypatch.setattr(worker, "time", clock)
    worker.settle()
    assert len(naps) == 3
    monkeypatch.setattr(worker, "SETTLED_WITHIN", 0.0)
    worker.settle()  # not for ever
    assert len(naps) == 3


# --- a worker in a process of its own


def test_a_worker_of_ours():
    ours = driver.Worker("flash_numba", 1)
    try:
        assert ours.version == flash_numba.__version__
        assert "error" in ours.ask("prepare", [*TINY, "float32"])
        assert ours.ask("turn")["seconds"] > 0
    finally:
        ours.close()
    assert ours.process.poll() is not None


@pytest.fixture
def fake_module(tmp_path, monkeypatch):
    """Writes a module that workers import."""

    def write(name, code):
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_what_a_library_prints_is_no_answer(fake_module):
    fake_module("openvino", "import os\nprint('noise')\nos.system('echo noise')\nraise ImportError('none here')")
    other = driver.Worker("openvino", 1)
    assert other.version is None
    assert other.missing == "none here"
    other.close()


def test_a_process_that_dies_is_named(fake_module):
    fake_module("torch", "import os\nos._exit(3)")
    other = driver.Worker("torch", 1)
    assert other.version is None
    assert other.missing == "torch's process ended with exit status 3"
    with pytest.raises(driver.WorkerError, match="torch's process"):
        other.ask("turn")
    other.close()


# --- the driver


class FakeWorker:
    """Answers by the list, and keeps a record of who was asked."""

    def __init__(self, name, log, seconds=1.0, refuses=None, dies_at=None):
        self.name, self.log, self.seconds, self.refuses, self.dies_at = name, log, seconds, refuses, dies_at
        self.turns = 0
        self.closed = False

    def ask(self, kind, about=None):
        if kind == "prepare":
            return {"refused": self.refuses} if self.refuses else {"peak_bytes": 5, "error": 1e-7}
        self.turns += 1
        self.log.append(self.name)
        if self.turns == self.dies_at:
            raise driver.WorkerError(f"{self.name} died")
        return {"seconds": self.seconds * self.turns}

    def close(self):
        self.closed = True


@pytest.fixture
def quiet_machine(monkeypatch):
    """Two threads on two cores, whose peaks are 100 and 200 GFLOP/s."""
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 * threads)


def test_libraries_take_turns_and_change_the_order(quiet_machine):
    log = []
    workers = {name: FakeWorker(name, log) for name in ("flash_numba", "a", "b")}
    result = driver.measure(workers, (TINY, "float32"), 3, driver.Rounds(2))
    assert log == ["flash_numba", "a", "b", "b", "a", "flash_numba", "flash_numba", "a", "b"]
    assert result.seconds == {name: [1.0, 2.0, 3.0] for name in workers}
    assert result.ceilings == [200.0] * 3
    assert result.peak_bytes["a"] == 5
    assert result.counted


def test_decoding_is_set_against_reading(quiet_machine, monkeypatch):
    monkeypatch.setattr(driver, "read_speed", lambda words, threads, repeats: float(words.nbytes))
    shape = shapes.decode(1, 2, 1, 64, 8)
    result = driver.measure({"flash_numba": FakeWorker("", [])}, (shape, "float16"), 2, driver.Rounds(2))
    assert result.ceilings == [shape.kv_bytes(np.float16)] * 2
    assert result.unit == "GB/s"


def test_who_refuses_takes_no_part_and_who_dies_is_out(quiet_machine):
    log = []
    workers = {
        "flash_numba": FakeWorker("flash_numba", log),
        "refusing": FakeWorker("refusing", log, refuses="not today"),
        "dying": FakeWorker("dying", log, dies_at=2),
    }
    dying = workers["dying"]
    result = driver.measure(workers, (TINY, "float32"), 3, driver.Rounds(2))
    assert list(result.seconds) == ["flash_numba"]
    assert len(result.seconds["flash_numba"]) == 3
    assert result.refused == {"refusing": "not today", "dying": "dying died"}
    assert "refusing" in workers
    assert "dying" not in workers
    assert dying.closed
    assert log.count("dying") == 2


def test_nothing_is_measured_without_us(quiet_machine):
    with pytest.raises(driver.WorkerError):
        driver.measure(
            {"flash_numba": FakeWorker("flash_numba", [], dies_at=1)}, (TINY, "float32"), 2, driver.Rounds(2)
        )


@pytest.fixture
def busy_machine(monkeypatch):
    """Gives two threads one core for so many measurements; nobody sleeps."""

    def busy_for(times):
        left = [times]

        def fma_peak(threads, **_):
            left[0] -= threads == 2
            return 100.0 if threads == 1 or left[0] >= 0 else 200.0

        monkeypatch.setattr(driver, "fma_peak", fma_peak)
        monkeypatch.setattr(driver.time, "sleep", lambda seconds: None)

    return busy_for


def test_a_round_waits_for_two_cores(busy_machine):
    busy_machine(3)
    rounds = driver.Rounds(2)
    assert rounds.begin() == 200.0
    assert rounds.dropped == 3
    assert rounds.counted


def test_a_period_with_one_core_does_not_count(busy_machine):
    busy_machine(10**9)
    with pytest.raises(driver.UncountedError, match=r"1\.7 times"):
        driver.Rounds(2, patience=4).begin()
    lenient = driver.Rounds(2, patience=4, strict=False)
    assert lenient.begin() == 100.0
    assert not lenient.counted
    assert lenient.begin() == 100.0  # without waiting again
    assert lenient.dropped == 5


def test_a_round_that_loses_its_second_core_is_taken_again(busy_machine, monkeypatch):
    busy_machine(0)
    peaks = iter([200.0, 100.0, 100.0, 200.0, 180.0])
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 if threads == 1 else next(peaks))
    rounds, turns = driver.Rounds(2), []
    assert rounds.take(lambda: turns.append(len(turns))) == (None, 190.0)
    assert turns == [0, 1]
    assert rounds.dropped == 2


def test_one_thread_has_nothing_to_wait_for(busy_machine):
    busy_machine(10**9)
    assert driver.Rounds(1).begin() == 100.0


# --- figures


def measurement(shape=TINY, dtype="float32", ceilings=(100.0, 100.0, 50.0), **seconds):
    return Measurement(shape, dtype, {name: list(taken) for name, taken in seconds.items()}, list(ceilings))


def test_figures_are_set_against_their_own_round():
    shape = shapes.square(1, 8, 1024, 64)[0]
    # The last round ran at half the clock: shares and ratios are the same in all.
    result = measurement(shape, flash_numba=(0.01, 0.01, 0.02), other=(0.03, 0.03, 0.06))
    assert result.median() == 0.01
    assert result.speed() == pytest.approx(1e-9 * shape.flops / 0.01)
    assert result.share() == pytest.approx(1e-9 * shape.flops / 0.01 / 100)
    assert result.ratio("other") == pytest.approx(3)
    assert result.spread("other") == pytest.approx(0.5)
    assert driver.interquartile([3.0]) == 0


def report(*results, versions=None, missing=None):
    return Report(list(results), versions or {"flash_numba": "1", "numpy": "2"}, missing or {})


def test_rows_and_notes_say_everything():
    result = measurement(flash_numba=(1e-3, 1e-3, 1.5e-3), numpy=(4e-3, 4e-3, 4e-3))
    result.peak_bytes = {"flash_numba": 123_456, "numpy": None}
    result.refused = {"jax": "no such format"}
    ours, other = tables.rows_of(result)
    assert ours == ["1x1x16x64", "flash_numba", "1.000", "±12 %", "", "0.1 GFLOP/s", "0 %", "0.1"]
    assert other == ["", "numpy", "4.000", "", "4.00x as fast", "0.0 GFLOP/s", "0 %", ""]
    assert len(ours) == len(tables.HEADINGS)
    assert tables.notes(report(result, missing={"torch": "No module named 'torch'"})) == [
        "torch isn't here: No module named 'torch'",
        "jax: no such format (1x1x16x64 float32)",
    ]
    result.counted = False
    assert tables.rows_of(result)[0][6] == "0 % ?"
    assert "don't count" in tables.notes(report(result))[-1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2e-6, "0.0020"), (99e-6, "0.0990"), (4.5e-3, "4.500"), (0.123, "123.0"), (3, "3000.0")]
)
def test_milliseconds_have_no_exponent(seconds, text):
    assert tables.milliseconds(seconds) == text


def test_a_table_is_never_cut(capsys):
    tables.show("title", ["a", "b"], [["x" * 90, "1"], ["", "2"], ["y", "3" * 90]], text_columns=1, group=1)
    printed = capsys.readouterr().out
    assert "x" * 90 in printed
    assert "3" * 90 in printed
    assert "…" not in printed


# --- pictures


LIMITS = {"fma_gflops": {"float32": {1: 100.0, 2: 200.0}}, "read_gbps": {1: 10.0, 2: 20.0}}


def lengths():
    return [
        measurement(shape, ceilings=[200.0] * 2, flash_numba=[shape.flops / 150e9] * 2, numpy=[shape.flops / 9e9] * 2)
        for n in (128, 1024, 512)
        for shape in shapes.square(1, 8, n, 64)
    ]


def test_lengths_of_one_problem_are_a_family():
    found = plot.families([*lengths(), measurement(flash_numba=[1.0] * 3)])
    assert [plot.title(key) for key in found] == [
        "no causal mask: batch 1, heads 8, D = 64, float32",
        "causal: batch 1, heads 8, D = 64, float32",
    ]
    assert [[m.shape.S_q for m in members] for members in found.values()] == [[128, 512, 1024]] * 2
    (alone,) = plot.families([measurement(flash_numba=[1.0] * 3)])
    assert plot.title(alone).startswith("no causal mask: batch 1, heads 1")


def test_the_roofline_is_the_slower_of_two_limits():
    prefill = measurement(shapes.square(1, 8, 4096, 64)[0], ceilings=[200.0])
    assert plot.roofline_seconds(prefill, 20.0, 100.0) == pytest.approx(1e-9 * prefill.shape.flops / 200)
    decoding = measurement(shapes.decode(1, 32, 8, 8192, 128), ceilings=[25.0])
    expected = 1e-9 * decoding.shape.bytes(np.float32) / 25
    assert plot.roofline_seconds(decoding, 20.0, 200.0) == pytest.approx(expected)


@pytest.mark.parametrize(("least", "first"), [(50.0, 50.0), (12.0, 5.0), (1.0, 1.0), (0.3, 0.2)])
def test_ticks_reach_from_the_least_share_to_all(least, first):
    ticks = plot.share_ticks(least)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= least
    assert ticks[0] == first
    assert ticks[-1] == 100


def test_every_library_has_a_colour_of_its_own():
    assert set(plot.COLOURS) == set(plot.MARKERS) == set(peers.LIBRARIES)
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)


def test_a_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    decoding = [
        measurement(shapes.decode(1, 32, 8, n, 128), ceilings=[20.0], flash_numba=[n * 1e-6]) for n in (1024, 4096)
    ]
    for results in (lengths(), decoding, [*lengths(), *decoding]):
        plot.draw(results, LIMITS, path, "a machine")
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


# --- the command


def test_peers_are_chosen_by_name():
    assert command.chosen_peers(None) == list(peers.PEERS)
    assert command.chosen_peers("none") == []
    assert command.chosen_peers("torch, numpy") == ["torch", "numpy"]
    with pytest.raises(ValueError, match=r"--peers takes numpy, .* got 'tensorflow'"):
        command.chosen_peers("numpy,tensorflow")


def test_problems_are_chosen_by_set_dtype_and_mask():
    both = command.chosen_problems("full", ["float32", "float16"], None)
    assert both == [(shape, dtype) for dtype in ("float32", "float16") for shape in (*FULL, *GRADIENT)]
    assert command.chosen_problems("gradient", ["float32"], None) == [(shape, "float32") for shape in GRADIENT]
    causal = command.chosen_problems("full", ["float32"], True)
    assert {shape.causal or shape.decoding for shape, _ in causal} == {True}
    assert command.chosen_problems("decode", ["float32"], True)
    assert not any(shape.causal for shape, _ in command.chosen_problems("main", ["float32"], False))


def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_the_command_measures_and_writes(tmp_path):
    """From end to end, in real processes; one thread, which has no second core to wait for."""
    path = tmp_path / "bench.json"
    small = ["--quick", "--rounds", 1, "--shapes", "tiny", "--no-causal", "--threads", 1]
    result = bench(*small, "--peers", "numpy", "--json", path)
    assert result.exit_code == 0, result.output
    for words in ("ceilings: FMA float32", "1x8x64x64", "numpy", "x as fast", "GFLOP/s"):
        assert words in result.stdout
    figures = json.loads(path.read_text())
    assert figures["versions"]["flash_numba"] == flash_numba.__version__
    assert figures["rounds"] == figures["threads"] == 1
    assert [x["shape"]["name"] for x in figures["results"]] == ["1x1x16x64", "1x8x64x64", "8x8x32x64"]
    for problem in figures["results"]:
        assert set(problem["libraries"]) == {"flash_numba", "numpy"}
        for of in problem["libraries"].values():
            assert of["median"] == of["seconds"][0] > 0
            assert of["share"] > 0


@pytest.fixture
def measured(monkeypatch):
    """No time is spent; what the command asked to measure."""
    asked = {}

    def measure(problems, names, effort, threads, passive, progress):
        asked.update(problems=problems, names=names, effort=effort, threads=threads, passive=passive)
        about = ceilings.machine()
        limits = {**LIMITS, "fma_gflops": {"float32": {1: 1.0}, "float64": {1: 0.5}}}
        return command.Run("2030-01-02", about, 2, effort.rounds, limits, report(*lengths()))

    monkeypatch.setattr(command, "measure", measure)
    return asked


def test_defaults_follow_what_is_asked_for(measured, tmp_path):
    assert bench().exit_code == 0
    assert measured["problems"] == [(shape, "float32") for shape in (*shapes.MAIN, *GRADIENT)]
    assert measured["names"] == list(peers.PEERS)
    assert measured["effort"] == command.FULL
    assert measured["effort"].rounds >= 7
    assert bench("--quick", "--dtype", "float16", "--dtype", "bfloat16", "--rounds", 2).exit_code == 0
    quick = (*SHORT, *GRADIENT_SETS["short"])
    assert measured["problems"] == [(shape, dtype) for dtype in ("float16", "bfloat16") for shape in quick]
    assert measured["effort"].rounds == 2
    assert measured["passive"]
    assert bench("--spin").exit_code == 0
    assert not measured["passive"]


def test_a_plot_shows_lengths(measured, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    assert bench("--plot", path, "--causal").exit_code == 0
    assert measured["problems"] == [(shape, "float32") for shape in shapes.LENGTHS if shape.causal]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_refused_before_measuring(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    for arguments, words in (
        (["--peers", "tensorflow"], "--peers takes"),
        (["--json", tmp_path / "none" / "x.json"], "can't be written"),
        (["--json", tmp_path], "can't be written"),
        (["--plot", tmp_path / "x.png"], "needs matplotlib"),
    ):
        result = bench(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("flash-numba: ")
        assert result.stderr.count("\n") == 1
        assert words in result.stderr
    assert not measured


def test_ctrl_c_ends_the_workers(monkeypatch):
    closed = []
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 * threads)
    monkeypatch.setattr(ceilings, "measure", lambda nbytes, threads: LIMITS)

    class Interrupted(FakeWorker):
        version, missing = "1", ""

        def __init__(self, name, threads, passive):
            super().__init__(name, [])

        def ask(self, kind, about=None):
            raise KeyboardInterrupt

        def close(self):
            closed.append(self.name)

    monkeypatch.setattr(driver, "Worker", Interrupted)
    result = bench("--peers", "numpy")
    assert result.exit_code == 130
    assert closed == ["flash_numba", "numpy"]


# --- apart from the library


def test_nothing_else_imports_it():
    code = """
import sys, numpy as np, flash_numba, flash_numba.cli
flash_numba.attention(*np.ones((3, 1, 1, 8, 8), np.float32))
print(sorted(name for name in sys.modules if name.startswith("flash_numba.bench")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_has_no_llvm_of_its_own():
    sources = [*Path(ceilings.__file__).parent.glob("*.py"), *Path("benchmarks").glob("*.py")]
    assert len(sources) > 10
    assert not [source for source in sources if "llvmlite" in source.read_text()]


def test_measuring_leaves_no_thread_behind():
    before = threading.active_count()
    ceilings.fma_peak(2, seconds=0.001, repeats=1)
    assert threading.active_count() == before
