"""Speed of flash_numba: this machine's ceilings, tables, targets, and the README's figures.

What is measured, and how, is in `flash_numba.bench`, which `flash-numba bench` runs too. From the repository's root:

    python -m benchmarks.ceilings                   what this machine can do at most
    python -m pytest benchmarks -q --benchmark-json=bench.json
    python -m benchmarks.table bench.json           the table that CI prints (--shapes=full for every shape)
    python -m benchmarks.targets                    the project's targets, each next to what was measured
    python -m benchmarks.targets --only rules       what rules may cost (`limits`: the forward at the machine's limit)
    python -m benchmarks.report README.md           measure, and rewrite the README's performance section
    python -m benchmarks.gpu                        on a GPU: check, measure, record, and rewrite its section there
"""
