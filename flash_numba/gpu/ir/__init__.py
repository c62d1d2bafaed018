"""What Numba has no word for, as LLVM IR and inline PTX: the only files of `gpu/` with either."""
