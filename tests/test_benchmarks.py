"""The benchmarks' own arithmetic: FLOPs, tables, the README's section. No speed is judged here."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import baselines, ceilings, report, shapes, table, targets
from benchmarks.shapes import FULL, SETS, SHORT, Shape
from flash_numba import reference

SMALL = Shape("small", 2, 6, 2, 5, 9, 4, False)


# --- shapes


@pytest.mark.parametrize("shape", FULL, ids=lambda shape: shape.name)
def test_shapes_are_well_formed(shape):
    assert min(shape[1:7]) >= 1
    assert shape.H % shape.H_kv == 0
    assert shape.causal == shape.name.endswith("-causal")


def test_shape_names_are_unique_and_ci_measures_some_of_all():
    names = [shape.name for shape in FULL]
    assert len(set(names)) == len(names)
    assert set(SHORT) < set(FULL)
    assert SETS == {"short": SHORT, "full": FULL}


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


def test_inputs_fit_the_shape():
    for dtype in shapes.DTYPES.values():
        q, k, v = SMALL.inputs(dtype)
        assert q.shape == (2, 6, 5, 4)
        assert k.shape == v.shape == (2, 2, 9, 4)
        assert q.dtype == k.dtype == v.dtype == dtype
        assert SMALL.kv_bytes(dtype) == k.nbytes + v.nbytes


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


# --- the table


def recorded(no_cuda):
    """What pytest-benchmark writes, as far as the table reads it."""

    def entry(shape, dtype, backend, seconds, gflops, share):
        about = {"shape": shape, "dtype": dtype, "backend": backend, "gflops": gflops, "share_of_peak": share}
        return {"extra_info": about, "stats": {"median": seconds}}

    about = {"cpu": "A CPU", "llvm_cpu": "znver3", "cores": 2, "simd": ["avx2", "fma"]}
    versions = {"python": "3.13.1", "numba": "0.68.0", "numpy": "2.4.0", "no_cuda": no_cuda}
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
    assert rows[3] == ["1x8x1024x64", "float32", "CUDA", "no GPU", "", "", ""]
    assert rows[4] == ["1x8x1024x64", "bfloat16", "CPU parallel", "0.0400", "141.2", "77 %", ""]


def test_side_by_side_has_a_cuda_column_without_a_gpu():
    headings, rows = table.side_by_side(recorded("no GPU: the CUDA driver finds no device"))
    assert headings[2:] == ["NumPy one-shot, ms", "CPU serial, ms", "CPU parallel, ms", "CUDA, ms"]
    assert [row[-1] for row in rows] == ["no GPU", "no GPU"]
    assert rows[0][2:5] == ["43.2", "7.200", "3.600"]
    assert rows[1][2:5] == ["", "", "0.0400"]


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
    for words in ("A CPU (znver3), 2 cores", "1x8x1024x64", "CPU parallel", "12.00x", "82 %", "no GPU"):
        assert words in printed


# --- targets


def test_results_say_whether_the_target_is_met():
    assert targets.Result("", 65.0, "%", 65.0, True).verdict == "met"
    assert targets.Result("", 64.9, "%", 65.0, True).verdict == "missed"
    assert targets.Result("", 0.15, "s", 0.15, False).verdict == "met"
    assert targets.Result("", 0.16, "s", 0.15, False).verdict == "missed"
    assert targets.Result("", None, "%", 65.0, True, "no second core").verdict == "not measured"


def speed_cases():
    return [(shape, dtype) for shape in shapes.LONG for dtype in ("float32", "float16", "bfloat16")]


def test_speed_is_a_share_of_the_peak_of_its_own_round():
    cases = speed_cases()
    # The second round ran at half the clock: every share is the same in both.
    times = [{(shape, dtype): slower * shape.flops / 100e9 for shape, dtype in cases} for slower in (1, 2)]
    results = targets.speed_results(cases, times, [200.0, 100.0], dropped=0)
    assert [result.value for result in results] == pytest.approx([50, 100, 100] * 2)
    assert [result.verdict for result in results] == ["missed", "met", "met"] * 2


def test_a_period_with_one_physical_core_does_not_count():
    results = targets.speed_results(speed_cases(), [], [], dropped=14)
    assert {result.verdict for result in results} == {"not measured"}
    assert "doesn't count" in results[0].note


# --- the README's section


def measurement(shape, times, ceiling):
    return report.Measurement(shape, "float32", times, dict.fromkeys(times, 0.02), ceiling)


def test_section_is_made_of_the_measurements():
    prefill, decode = shapes.square(1, 8, 1024, 64)[0], shapes.decode(1, 32, 8, 8192, 128)
    slow = report.Measurement(prefill, "bfloat16", {"flash_numba": 0.02}, {"flash_numba": 0.3}, 200.0)
    results = [
        measurement(prefill, {"flash_numba": 0.016, "NumPy": 0.12}, 200.0),
        measurement(decode, {"flash_numba": 0.004, "NumPy": 0.006}, 20.0),
        slow,
    ]
    limits = {"fma_gflops": {"float32": {1: 101.0, 2: 200.0}}, "read_gbps": {1: 12.0, 2: 20.0}}
    about = recorded(None)["machine_info"]["flash_numba"] | {"system": "Linux x86_64"}
    text = report.section(results, {"flash_numba": "0.1.0", "NumPy": "2.4.0"}, limits, about, 7, "2030-01-02")
    lines = text.splitlines()
    assert "| 1x8x1024x64 | float32 | 16.0 | 134.2 GFLOP/s | 67 % | 120.0 | 7.5x |" in lines
    assert "| decode-1x32/8x8192x128 | float32 | 4.000 | 16.8 GB/s | 84 % | 6.000 | 1.5x |" in lines
    assert "| 1x8x1024x64 | bfloat16 | 20.0 (±15 %) | 107.4 GFLOP/s | 54 % |  |  |" in lines
    for words in ("2030-01-02", "A CPU", "avx2, fma", "NumPy 2.4.0", "200 GFLOP/s on 2", "20 GB/s on 2"):
        assert words in text


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
