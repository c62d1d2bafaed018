"""Speed next to the machine's ceilings and next to other libraries: what `flash-numba bench` runs.

`shapes` says what is measured, `ceilings` what the machine can do at most, `peers` how each library is called, `worker`
is a library in a process of its own, `driver` asks the workers in turn, `tables` and `plot` show what came out. Nothing
of the library imports this package. It needs the extra `bench`.
"""
