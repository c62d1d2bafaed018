"""What every benchmark of a run shares: the shapes asked for, and whether there is a GPU."""

import pytest

from benchmarks.cuda import gpu_name, recorded, why_no_cuda
from flash_numba.bench.ceilings import machine
from flash_numba.bench.shapes import SETS


def pytest_addoption(parser):
    parser.addoption(
        "--shapes",
        choices=sorted(SETS),
        default="short",
        help="short (CI's, under two minutes), full (every shape), or some",
    )


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        shapes = SETS[metafunc.config.getoption("--shapes")]
        metafunc.parametrize("shape", shapes, ids=[shape.name for shape in shapes])


@pytest.fixture(scope="session")
def no_cuda():
    """Why the CUDA rows can't run, or None."""
    return why_no_cuda()


def pytest_benchmark_update_machine_info(config, machine_info):
    # The host's name is nobody's business in a published table.
    machine_info.pop("node", None)
    machine_info["flash_numba"] = {
        **machine(),
        "no_cuda": why_no_cuda(),
        "gpu": gpu_name(),
        "recorded": recorded(),
    }
