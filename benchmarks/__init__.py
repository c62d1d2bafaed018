"""Speed of flash_numba: shapes, this machine's ceilings, tables, targets, and the README's figures.

From the repository's root:

    python -m benchmarks.ceilings                   what this machine can do at most
    python -m pytest benchmarks -q --benchmark-json=bench.json
    python -m benchmarks.table bench.json           the table that CI prints (--shapes=full for every shape)
    python -m benchmarks.targets                    the project's targets, each next to what was measured
    python -m benchmarks.report README.md           measure, and rewrite the README's performance section
"""
