"""`info` says how a call would be done, `warmup` compiles ahead."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import flash_numba
from flash_numba.cpu import launch, plan


def arrays(queries, keys, heads=8, key_heads=2, dtype=np.float32):
    return [np.zeros((1, h, n, 64), dtype) for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))]


def test_machine():
    found = flash_numba.info()
    assert found["flash_numba"] == flash_numba.__version__
    assert "bits" in found["SIMD"]
    assert str(found).count("\n") == len(found) - 1


def test_a_call_is_described_as_it_is_run(monkeypatch):
    """The kernel that info names is the one that a call asks for."""
    asked = []
    original = launch.worker_address
    monkeypatch.setattr(launch, "worker_address", lambda name, dtype: asked.append(name) or original(name, dtype))
    for queries in (1, plan.FEW_QUERIES, plan.FEW_QUERIES + 1, 300):
        q, k, v = arrays(queries, 3000 + queries)
        described = flash_numba.info(q, k, v, causal=True, return_lse=True)
        flash_numba.attention(q, k, v, causal=True)
        assert described["kernel"].startswith(asked[-1] + ":")
    assert asked == ["decode", "decode", "forward", "forward"]


def test_splits_blocks_and_reasons():
    found = flash_numba.info(*arrays(1, 5000))
    assert "5 KV splits of 1024" in found["keys"]
    assert "1 queries x 4 heads" in found["rows"]
    assert found["k"] == "read in place"
    half = flash_numba.info(*arrays(100, 5000, dtype=ml_dtypes.bfloat16))
    assert "bfloat16" in half["k"]
    assert half["accumulates in"] == "float32"
    assert "serially" in flash_numba.info(*arrays(1, 10))["threads"]


def test_info_computes_nothing_and_checks_everything(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    flash_numba.info(*arrays(50, 100))
    with pytest.raises(ValueError, match="all of q, k and v"):
        flash_numba.info(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="window"):
        flash_numba.info(*arrays(3, 4), window=(-5, 0))


def test_warmup_fills_the_cache(tmp_path):
    code = (
        "import flash_numba; from flash_numba.cpu import kernel_cache; seen = []\n"
        "print(flash_numba.warmup(['float16'], progress=lambda done, total, name: seen.append((done, total))))\n"
        "assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)], seen\n"
        "print(sorted(line.split('-')[0] for line in kernel_cache.log))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=os.environ | {"FLASH_NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert "['threads', 'forward float32', 'decode float32']" in runs[0].stdout
    assert "['saved decode_float32', 'saved drive', 'saved forward_float32']" in runs[0].stdout
    assert "['loaded decode_float32', 'loaded drive', 'loaded forward_float32']" in runs[1].stdout


def test_warmup_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"float32.*int32"):
        flash_numba.warmup([np.int32])


def test_commands():
    from flash_numba.cli import app

    shown = CliRunner().invoke(app, ["info"])
    assert shown.exit_code == 0
    assert "kernel cache" in shown.stdout
    done = CliRunner().invoke(app, ["warmup", "--dtype", "float32"])
    assert done.exit_code == 0
    assert "forward float32" in done.stdout
    assert "backward" not in done.stdout
    done = CliRunner().invoke(app, ["warmup", "--dtype", "float32", "--gradients"])
    assert done.exit_code == 0
    assert "backward float32" in done.stdout
