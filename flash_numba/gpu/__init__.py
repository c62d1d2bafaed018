"""The GPU backend: kernels for `numba.cuda`, and what launches them. LLVM IR and inline PTX are in the folder `ir/`."""

import os

# Numba's simulator, which runs a GPU's threads as Python's. From the environment, so that asking doesn't import Numba.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
