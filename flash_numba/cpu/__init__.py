"""The CPU backend. `launch` is its door; importing it starts Numba, so it is imported at the first call."""
