"""LLVM IR for the CPU kernels: the one place with it. Everything else is Python on the types and functions of here.

`registers` chooses the register tile for the CPU, `lanes` is the lane type and its operators, `memory` has loads,
stores and addresses, `products` the register-tile steps that all matrix products are made of, `threads` what threads
share.
"""
