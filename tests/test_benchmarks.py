"""The benchmarks' own arithmetic: tables, targets, the README's section. No speed is judged here."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flash_numba
from benchmarks import ceilings, cuda, gpu, gradients, limits, processes, report, rules, table, targets, verdicts
from benchmarks.verdicts import Result, Timed
from flash_numba.bench import driver, peers, shapes
from flash_numba.bench.driver import Measurement, Report

# --- the table


GPU_FIGURES = {"device": "A GPU", "date": "2026-12-01", "commit": "0123456789ab", "rows": {"1x8x1024x64 float32": 9e-5}}


def recorded(no_cuda, figures=None):
    """What pytest-benchmark writes, as far as the table reads it."""

    def entry(shape, dtype, backend, seconds, gflops, share):
        about = {"shape": shape, "dtype": dtype, "backend": backend, "gflops": gflops, "share_of_peak": share}
        return {"extra_info": about, "stats": {"median": seconds}}

    about = {"cpu": "A CPU", "llvm_cpu": "znver3", "cores": 2, "simd": ["avx2", "fma"]}
    versions = {"python": "3.13.1", "numba": "0.68.0", "numpy": "2.4.0", "no_cuda": no_cuda}
    versions |= {"gpu": None if no_cuda else "A GPU", "recorded": figures}
    entries = [
        entry("1x8x1024x64", "float32", "NumPy one-shot", 0.0432, 12.4, 0.0681),
        entry("1x8x1024x64", "float32", "CPU serial", 0.0072, 74.6, 0.8105),
        entry("1x8x1024x64", "float32", "CPU parallel", 0.0036, 149.1, 0.8151),
        entry("1x8x1024x64", "bfloat16", "CPU parallel", 0.00004, 141.2, 0.7712),
    ]
    if not no_cuda:
        entries.append(entry("1x8x1024x64", "float32", "CUDA", 0.00012, 4473.9, None))
    return {"machine_info": {"flash_numba": {**about, **versions}}, "benchmarks": entries}


def test_detail_gives_time_speed_share_and_ratio():
    rows = table.detail(recorded("no GPU: the CUDA driver finds no device"))
    assert [len(row) for row in rows] == [len(table.DETAIL_HEADINGS)] * 6
    assert rows[0] == ["1x8x1024x64", "float32", "NumPy one-shot", "43.2", "12.4", "7 %", "1.00x"]
    assert rows[2] == ["1x8x1024x64", "float32", "CPU parallel", "3.600", "149.1", "82 %", "12.00x"]
    assert rows[3] == ["1x8x1024x64", "float32", "CUDA", "not measured", "", "", ""]
    assert rows[4] == ["1x8x1024x64", "bfloat16", "CPU parallel", "0.0400", "141.2", "77 %", ""]


def test_side_by_side_has_a_cuda_column_without_a_gpu():
    headings, rows = table.side_by_side(recorded("no GPU: the CUDA driver finds no device"))
    assert headings[2:] == ["NumPy one-shot, ms", "CPU serial, ms", "CPU parallel, ms", "CUDA, ms"]
    assert [row[-1] for row in rows] == ["not measured", "not measured"]
    assert rows[0][2:5] == ["43.2", "7.200", "3.600"]
    assert rows[1][2:5] == ["", "", "0.0400"]


def test_without_a_gpu_recorded_figures_stand_there_marked():
    report = recorded("no GPU: the CUDA driver finds no device", GPU_FIGURES)
    assert [row[-1] for row in table.side_by_side(report)[1]] == ["0.0900 (recorded)", "not measured"]
    assert [row[3] for row in table.detail(report) if row[2] == "CUDA"] == ["0.0900 (recorded)", "not measured"]
    assert "recorded on A GPU, 2026-12-01, commit 0123456789ab" in table.about(report)


def test_side_by_side_with_a_gpu():
    headings, rows = table.side_by_side(recorded(None))
    assert headings[-1] == "CUDA, ms"
    assert [row[-1] for row in rows] == ["0.120", ""]


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_table_prints_what_ci_shows(tmp_path, capsys, options):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(recorded("no GPU: the CUDA driver finds no device")))
    table.main([str(path), *options])
    printed = capsys.readouterr().out
    for words in ("A CPU (znver3), 2 cores", "1x8x1024x64", "CPU parallel", "12.00x", "82 %", "not measured"):
        assert words in printed


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ceilings_are_printed(capsys, monkeypatch, options):
    figures = {"fma_gflops": {"float32": {1: 91.25, 2: 182.5}}, "read_gbps": {1: 11.5, 2: 18.5}, "read_bytes": 2**30}
    monkeypatch.setattr(ceilings, "measure", lambda nbytes: figures)
    ceilings.main(options)
    printed = capsys.readouterr().out
    for words in ("182.5", "18.5"):
        assert words in printed


# --- verdicts


def test_results_say_whether_the_target_is_met():
    assert Result("", 65.0, "%", 65.0, True).verdict == "met"
    assert Result("", 64.9, "%", 65.0, True).verdict == "missed"
    assert Result("", 0.15, "s", 0.15, False).verdict == "met"
    assert Result("", 0.16, "s", 0.15, False).verdict == "missed"
    assert Result("", None, "%", 65.0, True, "no second core").verdict == "not measured"
    assert Result("", 3.0, "us", None, False).verdict == "reported"
    assert Result("", None, "us", None, False).verdict == "not measured"


def test_calls_are_timed_in_turn(monkeypatch):
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 * threads)
    monkeypatch.setattr(verdicts, "TURN_SECONDS", 0.0)  # once a turn
    log = []
    timed = verdicts.in_turn({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, 2, 2)
    assert log == list("aabbabba")  # two of each to warm up, then the rounds, the second the other way about
    assert {name: len(values) for name, values in timed.seconds.items()} == {"a": 2, "b": 2}
    assert timed.peaks == [200.0, 200.0]
    assert timed.reason == ""


def test_a_period_that_does_not_count_gives_no_figures(monkeypatch):
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0)
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: None)
    timed = verdicts.in_turn({"a": lambda: None}, 2, 2)
    result = timed.result("what", lambda: timed.ratios("a", "a"), "x", 1.0, True)
    assert result.verdict == "not measured"
    assert "doesn't count" in result.note


def test_a_result_is_the_median_of_the_rounds():
    timed = Timed({"a": [2.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, [200.0] * 3, dropped=4)
    result = timed.result(
        "cost", lambda: timed.ratios("a", "b"), "%", 90, False, lambda: "a note", lambda ratio: 100 * (ratio - 1)
    )
    assert result.value == 100
    assert result.note == "a note, spread 25 %, 4 rounds didn't count"


# --- targets


def test_speed_is_a_share_of_the_peak_of_its_own_round():
    cases = targets.speed_cases()
    # The second round ran at half the clock: every share is the same in both.
    seconds = {
        targets.name_of(shape, dtype): [slower * shape.flops / 100e9 for slower in (1, 2)] for shape, dtype in cases
    }
    results = targets.speed_results(Timed(seconds, [200.0, 100.0]))
    assert [result.value for result in results] == pytest.approx([50, 100, 100] * 2)
    assert [result.verdict for result in results] == ["missed", "met", "met"] * 2
    assert "67 of 150 GFLOP/s" in results[0].note


def test_speed_without_two_cores_is_not_measured():
    results = targets.speed_results(Timed({}, [], "needs 2 cores"))
    assert {result.verdict for result in results} == {"not measured"}
    assert results[0].note == "needs 2 cores"


def test_groups_are_chosen_by_name():
    assert targets.chosen("default") == targets.SETS["default"]
    assert targets.chosen("memory,limits,rules") == [
        "memory", "prefill", "decode", "small", "front", "threads", "first-call", "tails", "errors", "rules",
    ]  # fmt: skip
    assert {name for names in targets.SETS.values() for name in names} < set(targets.GROUPS)
    with pytest.raises(ValueError, match="got nothing, what"):
        targets.chosen("speed,what,nothing")


@pytest.mark.parametrize("arguments", [["--only", "what"], ["--peers", "what"], ["--rounds", "1"]])
def test_targets_refuse_what_they_do_not_know(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        targets.main(arguments)
    assert exit.value.code == 2
    assert "error: --" in capsys.readouterr().err


@pytest.fixture
def peers_restored():
    before = list(limits.PEERS)
    yield
    limits.PEERS[:] = before


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_targets_are_printed(capsys, monkeypatch, peers_restored, options):
    rows = [Result("a share", 81.0, "%", 82.0, True, "a note"), Result("a time", 3.0, "us", None, False)]
    monkeypatch.setitem(targets.GROUPS, "speed", lambda rounds: rows)
    targets.main(["--only", "speed", "--peers", "torch", *options])
    printed = capsys.readouterr().out
    assert limits.PEERS == ["torch"]
    if options:
        assert [row["met"] for row in json.loads(printed)["results"]] == [False, None]
    else:
        for words in ("a share", "81 %", "at least 82 %", "missed", "a note", "3.00 us", "reported"):
            assert words in printed


# --- rules


def test_a_window_leaves_its_share():
    for left, right in ((3, 2), (0, 0), (100, 100), (2, 100)):
        position, key = np.arange(20)[:, None], np.arange(20)
        seen = (key >= position - left) & (key <= position + right)
        assert rules.visible_share(20, left, right) == pytest.approx(seen.mean())


def test_a_stream_computes_the_same():
    inputs = shapes.Shape("", 1, 2, 2, 20, 200, 8, False).inputs()
    np.testing.assert_allclose(rules.streamed(*inputs), flash_numba.attention(*inputs), rtol=0, atol=1e-6)


def test_each_rule_has_its_targets(monkeypatch):
    """Every rule's call works, on problems that take no time; the clock's figures don't matter."""
    small = shapes.square(1, 2, 64, 8)[0]
    monkeypatch.setattr(rules, "LONG", (small,))
    monkeypatch.setattr(rules, "WIDE", small._replace(D=16))
    monkeypatch.setattr(rules, "LONGER", small._replace(S_q=128, S_kv=128))
    monkeypatch.setattr(rules, "WINDOW", 4)
    monkeypatch.setattr(rules, "STREAMS", (small,))
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 * threads)
    monkeypatch.setattr(verdicts, "TURN_SECONDS", 0.0)
    results = rules.rules(2)
    assert len(results) == 2 * len(rules.COSTS) + 4 + 1 + 1
    assert all(result.value is not None for result in results)
    assert results[-1].verdict == "met", results[-1].note  # the same bits, whatever the clock says
    assert {result.target for result in results[: len(rules.COSTS)]} == {5, 10, 18, 25, 30}


# --- limits


def measured(shape, dtype, ceiling, **milliseconds):
    """A measurement in which every round is the same."""
    seconds = {name: [1e-3 * value] * 3 for name, value in milliseconds.items()}
    return Measurement(shape, dtype, seconds, [ceiling] * 3)


def by_name(results):
    named = {result.what: result for result in results}
    assert len(named) == len(results)
    return named


def test_prefill_targets():
    results = [
        measured(shape, dtype, 200.0, flash_numba=1e3 * shape.flops / speed, torch=1e3 * shape.flops / 100e9,
                 openvino=1e3 * shape.flops / 90e9)
        for shape in shapes.MAIN
        for dtype, speed in (("float32", 180e9), ("float16", 150e9), ("bfloat16", 180e9))
    ]  # fmt: skip
    rows = by_name(limits.prefill_results(results))
    share = rows["share of the FMA peak, 1x8x4096x64, float32"]
    assert (share.value, share.target) == pytest.approx((90, 82))
    assert share.note == "180.0 of 200.0 GFLOP/s"
    assert rows["share of the FMA peak, 1x8x2048x128, float32"].target == 85
    assert rows["share of the FMA peak, 4x16x512x64, float32"].target == 78
    assert rows["share of the FMA peak, 1x8x1024x64-causal, float32"].target == 70
    assert rows["share of the FMA peak, 1x1x16384x64-causal, float32"].target == 78
    assert rows["float16 time over float32's, 1x8x4096x64"].value == pytest.approx(1.2)
    assert rows["float16 time over float32's, 1x8x4096x64"].verdict == "missed"
    assert rows["bfloat16 time over float32's, 1x8x4096x64"].verdict == "met"
    assert rows["speed over torch, 1x8x1024x64, float32"].value == pytest.approx(1.8)
    assert rows["speed over torch, geometric mean, float32, not causal"].target == 1.5
    assert rows["speed over torch, geometric mean, float32, causal"].value == pytest.approx(1.8)
    assert rows["speed over torch, geometric mean, float16"].verdict == "missed"
    assert rows["speed over torch, geometric mean, bfloat16"].verdict == "met"
    assert rows["speed over openvino, 1x1x16384x64, float32"].target == 1


def test_prefill_targets_without_torch_are_not_measured():
    results = [
        measured(shape, dtype, 200.0, flash_numba=1.0)
        for shape in shapes.MAIN
        for dtype in ("float32", "float16", "bfloat16")
    ]
    rows = by_name(limits.prefill_results(results))
    assert rows["speed over torch, 1x8x1024x64, float32"].verdict == "not measured"
    assert rows["speed over torch, geometric mean, float32, causal"].note == "not installed"


def test_decode_targets():
    results = [
        measured(shape, dtype, 20.0, flash_numba=shape.kv_bytes(shapes.DTYPES[dtype]) / 16e6, torch=1e4,
                 onnxruntime=1e-3)
        for shape in shapes.DECODE
        for dtype in ("float32", "float16", "bfloat16")
    ]  # fmt: skip
    rows = by_name(limits.decoding_results(results))
    share = rows["share of a plain read, decode-1x32/8x8192x128, float16"]
    assert (share.value, share.target) == pytest.approx((80, 75))
    assert rows["share of a plain read, decode-8x32x1024x128, float32"].target == 75
    assert rows["share of a plain read, decode-1x1x131072x64, float32"].target == 85
    over_torch = {row.target for what, row in rows.items() if what.startswith("speed over torch")}
    assert over_torch == {4, 12, 25}
    assert rows["speed over onnxruntime, decode-1x1x131072x64, float32"].verdict == "missed"


def test_small_targets():
    tiny = [shape for shape in shapes.TINY if not shape.causal]
    rows = by_name(
        limits.small_results([measured(shape, "float32", 1.0, flash_numba=0.6, torch=1.0) for shape in tiny])
    )
    assert rows["time over torch's, 8x8x32x64"].value == pytest.approx(0.6)
    assert rows["time over torch's, 8x8x32x64"].verdict == "met"
    assert rows["speed over onnxruntime, 8x8x32x64, float32"].verdict == "not measured"
    spinning = limits.spinning_results([measured(tiny[0], "float32", 1.0, flash_numba=0.6, torch=1.0, numpy=2.0)])
    assert [row.value for row in spinning] == pytest.approx([0.6, 0.3])
    assert {row.verdict for row in spinning} == {"reported"}


def test_a_machine_without_two_cores_says_so_once(monkeypatch):
    def never(*_, **__):
        raise driver.UncountedError("not today")

    monkeypatch.setattr(limits, "measure_all", never)
    for group in (limits.prefill, limits.decoding, limits.small):
        (result,) = group(2)
        assert result.verdict == "not measured"
        assert result.note == "not today"


def test_tails_and_threads_compare_speeds(monkeypatch):
    def in_turn(calls, rounds, threads):
        return Timed({name: [seconds[name]] * 2 for name in calls}, [200.0] * 2)

    pairs = [pair for own, neighbour in limits.TAILS.values() for pair in zip(own, neighbour, strict=True)]
    # Every size takes as long as its neighbour: its speed is less by what it computes less.
    seconds = dict.fromkeys((shape.name for pair in pairs for shape in pair), 1.0) | {"one": 2.0, "two": 1.0}
    monkeypatch.setattr(limits, "in_turn", in_turn)
    assert [row.value for row in limits.tails(2)] == pytest.approx([100 * a.flops / b.flops for a, b in pairs])
    monkeypatch.setattr(limits.numba, "get_num_threads", lambda: 2)
    (result,) = limits.threads(2)
    assert result.value == 2
    monkeypatch.setattr(limits.numba, "get_num_threads", lambda: 1)
    assert limits.threads(2)[0].verdict == "not measured"


def test_a_call_takes_its_own_time():
    seen_before, new = limits.front(2)
    assert seen_before.value > 0
    assert new.value > 0
    assert new.verdict == "reported"


class Erring:
    """A worker whose errors are known."""

    def __init__(self, factor, refuses=None):
        self.library, self.factor, self.refuses = "torch", factor, refuses

    def ask(self, kind, about=None):
        if kind == "prepare":
            self.shape = about
            return {"refused": self.refuses} if self.refuses else {}
        return {"max": self.factor * self.shape[4], "rms": self.factor}


def test_errors_are_compared_on_the_worst_shape():
    largest, mean = limits.errors_in("float32", Erring(1.5), Erring(1.0))
    assert largest.value == mean.value == 1.5
    assert mean.verdict == "missed"
    assert limits.errors_in("float32", Erring(1.001), Erring(1.0))[0].verdict == "met"
    (refused,) = limits.errors_in("float16", Erring(1.0), Erring(1.0, "no such format"))
    assert refused.note == "torch: no such format"


# --- gradients


def test_gradients_are_set_against_the_peak(monkeypatch):
    small = shapes.with_gradient(*shapes.square(1, 1, 32, 8))
    monkeypatch.setattr(gradients, "GRADIENT", small)

    def in_turn(calls, rounds, threads):
        assert len([call() for call in calls.values()]) == 2
        return Timed({name: [1e-6, 2e-6, 3e-6] for name in calls}, [1.0, 1.0, 1.0], "")

    monkeypatch.setattr(gradients, "in_turn", in_turn)
    plain, causal = gradients.speed(3)
    assert plain.value == pytest.approx(100 * 2.5 * 4 * 32 * 32 * 8 * 1e-9 / 2e-6)
    assert causal.value == pytest.approx(plain.value / 2)
    assert (plain.target, causal.target) == (62, 52)


def test_long_gradients_have_a_target_of_their_own(monkeypatch):
    def measured(problems, dtypes, rounds, peers):
        assert peers == ["torch"]
        return [Measurement(shape, "float32", {"flash_numba": [1.0], "torch": [1.5]}) for shape in problems]

    monkeypatch.setattr(limits, "measured", measured)
    rows = gradients.over_torch(2)
    assert [row.target for row in rows] == [1.3] * 6 + [1.8] * 2
    assert [row.verdict for row in rows] == ["met"] * 6 + ["missed"] * 2
    monkeypatch.setattr(limits, "measured", lambda *args, **peers: Result("no figure", None, "", None, True, "busy"))
    assert gradients.over_torch(2)[0].note == "busy"


def test_gradients_are_told_apart_by_their_digests(monkeypatch):
    cases = [(shape, dtype) for shape in shapes.square(2, 2, 40, 8) for dtype in ("float32", "bfloat16")]
    monkeypatch.setattr(gradients, "bit_cases", lambda: cases)
    once = gradients.digests()
    assert once == gradients.digests()
    assert len(set(once)) == len(cases)
    assert limits.errors_in("float32", Erring(1.5), Erring(1.0), gradients.ERROR_SHAPES, "error", 2.0)[0].met


# --- fresh processes


def test_a_fresh_process_prints_its_figures():
    assert processes.fresh("print('one')") == "one"
    printed = processes.cold(
        "import os\nprint(1.5)\nprint(len(os.listdir(os.environ['NUMBA_CACHE_DIR'])))\nprint('x')", 2
    )
    assert printed == [[1.5, 0.0]] * 2
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        processes.fresh("1 / 0")


def test_what_fresh_processes_run_is_python():
    codes = (processes.PEAK_MEMORY, processes.GRADIENT_PEAK_MEMORY, processes.NUMBA_START, processes.FURTHER_DTYPES)
    for code in (*codes, gradients.DIGESTS):
        compile(code, "code", "exec")
    compile(processes.FIRST_CALL.format(shape=(1, 1, 1, 1)), "code", "exec")


# --- the README's section


LIMITS = {"fma_gflops": {"float32": {1: 101.0, 2: 200.0}}, "read_gbps": {1: 12.0, 2: 20.0}}


def section(*results, picture=""):
    about = recorded(None)["machine_info"]["flash_numba"] | {"system": "Linux x86_64"}
    versions = {"flash_numba": "0.1.0", "numpy": "2.4.0", "torch": "2.13.0"}
    return report.section(Report(list(results), versions, {}), LIMITS, about, 2, 7, "2030-01-02", picture)


def test_section_is_made_of_the_measurements():
    plain, causal = shapes.square(1, 8, 1024, 64)
    unsteady = Measurement(plain, "bfloat16", {"flash_numba": [0.02, 0.02, 0.028]}, [200.0] * 3)
    text = section(
        measured(plain, "float32", 200.0, flash_numba=16, numpy=120, torch=24),
        measured(causal, "float32", 200.0, flash_numba=8, numpy=96, torch=16),
        unsteady,
        measured(shapes.decode(1, 32, 8, 8192, 128), "float32", 20.0, flash_numba=4, numpy=6),
        measured(shapes.with_gradient(causal)[0], "float32", 200.0, flash_numba=28, torch=42),
        picture="docs/speed.png",
    )
    lines = text.splitlines()
    assert "| 1x8x1024x64 | float32 | 16.0 | 134.2 | 67 % | 120.0 (7.50x) | 24.0 (1.50x) |" in lines
    assert "| 1x8x1024x64, causal | float32 | 8.000 | 134.2 | 67 % | 96.0 (12.0x) | 16.0 (2.00x) |" in lines
    assert "| 1x8x1024x64 | bfloat16 | 20.0 ±10 % | 107.4 | 54 % |  |  |" in lines
    assert "| 1x32/8x8192x128 | float32 | 4.000 | 16.8 | 84 % | 6.000 (1.50x) |  |" in lines
    assert "Geometric mean in float32, with it: 12.0x over NumPy, 2.00x over torch." in lines
    assert "| 1x8x1024x64, causal | float32 | 28.0 | 134.2 | 67 % |  | 42.0 (1.50x) |" in lines  # 7 products, not 2
    assert any(line.endswith("(docs/speed.png)") and line.startswith("![") for line in lines)
    for words in ("2030-01-02", "A CPU", "avx2 fma", "NumPy 2.4.0", "200 on 2", "20 on 2"):
        assert words in text
    assert "![" not in section(measured(plain, "float32", 200.0, flash_numba=16))


def test_everything_in_the_section_is_measured():
    assert {shape for shape, dtype in report.PREFILL if dtype == "float32"} == set(shapes.MAIN)
    assert {shape for shape, dtype in report.DECODING if dtype == "float32"} == set(shapes.DECODE)
    assert {shape for shape, _ in report.TRAINING} == set(shapes.GRADIENT)
    assert set(report.NAMES) == set(peers.PEERS)


def test_rewrite_leaves_everything_outside_the_markers():
    text = f"# Title\r\n\nbefore\n{report.BEGIN}\nold\n| a |\n{report.END}\n\nafter  \n"
    once = report.rewrite(text, "new")
    assert once == f"# Title\r\n\nbefore\n{report.BEGIN}\nnew\n{report.END}\n\nafter  \n"
    assert report.rewrite(once, "new") == once


@pytest.mark.parametrize("text", ["", report.BEGIN, report.END + report.BEGIN, 2 * (report.BEGIN + report.END)])
def test_rewrite_refuses_a_file_without_one_pair_of_markers(text):
    with pytest.raises(ValueError, match="benchmarks:begin"):
        report.rewrite(text, "new")


def test_report_refuses_before_it_measures(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("no markers here")
    with pytest.raises(ValueError, match="benchmarks:begin"):
        report.main([str(path)])
    assert path.read_text() == "no markers here"


def test_report_rewrites_the_file_and_draws_beside_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    asked = []

    def measured_section(*arguments):
        asked.append(arguments)
        return "the section"

    monkeypatch.setattr(report, "measured_section", measured_section)
    report.main([str(path), "--peers", "torch", "--picture-peers", "numpy,torch", "--rounds", "9"])
    assert path.read_text() == f"before\n{report.BEGIN}\nthe section\n{report.END}\nafter\n"
    assert asked == [(["torch"], ["numpy", "torch"], 9, tmp_path / "docs" / "speed.png", tmp_path)]
    report.main([str(path), "--print", "--no-picture"])
    assert capsys.readouterr().out == "the section\n"
    assert asked[1] == (["numpy", "torch"], ["numpy", "torch"], 7, None, tmp_path)


def test_a_report_is_measured_from_end_to_end(tmp_path, monkeypatch):
    """With workers of its own, on problems that take no time."""
    pytest.importorskip("matplotlib")
    small = shapes.square(1, 1, 16, 64)[0]
    monkeypatch.setattr(report, "PREFILL", [(small, "float32")])
    monkeypatch.setattr(report, "DECODING", [(shapes.decode(1, 2, 1, 64, 8), "float32")])
    monkeypatch.setattr(report, "TRAINING", [(shapes.with_gradient(small)[0], "float32")])
    monkeypatch.setattr(report, "PICTURE", [(small, "float32")])
    monkeypatch.setattr(driver, "fma_peak", lambda threads, **_: 100.0 * threads)
    monkeypatch.setattr(report.ceilings, "measure", lambda: LIMITS)
    picture = tmp_path / "docs" / "speed.png"
    text = report.measured_section(["numpy"], [], 2, picture, tmp_path)
    assert "| 1x1x16x64 | float32 |" in text
    assert "(docs/speed.png)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- the GPU's figures


def test_the_readme_says_what_is_recorded_of_the_gpu(tmp_path):
    """What stands in README comes from the file of figures, or says that there are none."""
    readme = (gpu.ROOT / "README.md").read_text()
    assert f"{gpu.BEGIN}\n{gpu.section(cuda.recorded())}\n{gpu.END}" in readme
    assert "not measured yet" in gpu.section(None)
    copy = tmp_path / "README.md"
    copy.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    gpu.main(["--readme-only", "--readme", str(copy), "--json", str(tmp_path / "none.json")])
    assert copy.read_text() == f"before\n{gpu.BEGIN}\n{gpu.section(None)}\n{gpu.END}\nafter\n"


def gpu_figures(torch):
    """Figures as `benchmarks.gpu` writes them, of round numbers."""

    def timed(shape, tokens, seconds, theirs):
        return {"shape": shape, "kernel": "tensor-core", "dim": 128, "tokens": tokens, "seconds": seconds,
                "torch_seconds": theirs, "flops": 4e11, "bytes": 2e9}  # fmt: skip

    return {
        "device": "A GPU", "cuda": "driver for CUDA 13.0", "torch": torch,
        "date": "2026-12-01", "commit": "0123456789ab",
        "conformance": {"passed": 1200, "left_out": 0, "kernels": {}},
        "limits": {"float32_flops": 5e13, "mma_flops": 8e14, "read_bytes": 4e12},
        "forward": [timed("4x16x4096x128", 4096, 1e-3, 9e-4 if torch else None),
                    timed("32x16x512x128", 512, 1e-3, 5e-4 if torch else None)],
        "decode": [timed("decode-1x32/8x131072x128", 131072, 1e-3, None)],
        "tile": [timed("1x16x4096x128", 4096, 2e-2, None)],
        "overhead": {"launch": 4e-6} | ({"torch_tensors": 1.2e-5} if torch else {}),
        "rows": {},
    }  # fmt: skip


def test_the_gpus_section_has_speed_shares_ratios_and_verdicts():
    text = gpu.section(gpu_figures("2.11.0"))
    for words in (
        "Measured on 2026-12-01 at commit 0123456789ab: A GPU", "1200 conformance cases",
        "against torch 2.11.0",
        "| 4x16x4096x128 | tensor-core | 1.000 | 400 | 50 % | 444 | 0.90x |",
        "| 1x32/8x131072x128 |", "| 2000 | 50 % |",
        "at least 0.90x torch (target 0.9x)", "at least 40 % of the FMA peak (target 35 %)", "12.0 us a call",
    ):  # fmt: skip
        assert words in text, words
    alone = gpu.section(gpu_figures(None))
    assert "4.0 us a call" in alone
    assert "x torch" not in alone


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(gpu, "why_no_cuda", lambda: "no GPU: none here")
    with pytest.raises(SystemExit, match=r"no GPU: none here\. GPU figures: "):
        gpu.main([])
