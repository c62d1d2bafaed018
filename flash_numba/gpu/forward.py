"""The attention forward on any GPU: one tile of query rows against the keys that they see, a block of them at a time.

The twin of `cpu/forward.py`, for every format and every rule. A thread block of `threads_y` x `threads_x` threads
holds a tile of queries in shared memory and streams K and V through it in pieces. Both matrix products are the same
step (`products.py`): each thread multiplies several rows by several keys (or columns) out of shared memory, 16 bytes a
load, and keeps its part of the scores and of the output in registers:

    S[row, key]  = sum_t Q[row, t] * K[key, t]
    O[row, c]    = alpha[row] * O[row, c] + sum_j P[row, j] * V[j, c]

A thread's rows stand `threads_y` apart, its keys `threads_x` apart, and its columns in vectors that stand `threads_x`
vectors apart, so that neighbours read different banks of shared memory. Weights reach all threads of their row through
shared memory, and a row's maximum over its threads too. The scheme is FlashAttention-2's (Dao 2023, arXiv:2307.08691,
algorithm 1), on CUDA cores.
"""

from math import inf

import numpy as np
from numba import cuda, types

from .. import geometry, recurrence, scores
from . import SIMULATED
from .compile import Kernel
from .ir.memory import local_array, put, take
from .ir.ptx import fresh
from .operands import locate, of_head, operands, quotient
from .primitives import lane, larger, scalar
from .stages import dropout_stage, key_product, term_of, term_stages, value_product, writer
from .threads import SHARED_ALIGNMENT, barrier, barrier_or, block_index, thread_index
from .tiles import quickness, tile_loader
from .tiling import Shape, Tiling, accumulator_of, cut, shared_limit

int32, int64 = types.int32, types.int64


def build(tiling, formats):
    """The kernel for a tiling and for the usual formats of q, k and v, which are read in vectors."""
    accumulator, (rows, keys, threads_y, threads_x) = tiling.accumulator, tiling.shape
    real, vector, highest = accumulator.real, accumulator.vector, accumulator.highest
    block_q, block_k, dim, piece, padded = tiling.block_q, tiling.block_k, tiling.dim, tiling.piece, tiling.padded
    q_stride, k_stride, p_stride = tiling.q_stride, tiling.k_stride, tiling.p_stride
    kv_at, p_at, partial_at = tiling.kv_at, tiling.p_at, tiling.partial_at
    whole = dim == padded
    # sizes of a thread's own arrays: Numba wants them as one constant each
    n_scores, n_columns = rows * keys, tiling.parts * tiling.vectors * vector
    n_outputs = n_columns * rows
    is_quick_q, is_quick_k = (quickness(accumulator, form, dim) for form in formats[:2])
    is_quick_v = quickness(accumulator, formats[2], tiling.value_dim)
    load_queries = tile_loader(accumulator, formats[0], block_q, piece, q_stride, tiling.threads)
    load_keys = tile_loader(accumulator, formats[1], block_k, piece, k_stride, tiling.threads)
    multiply_keys = key_product(tiling)
    load_term, apply_term, mark_hidden = term_stages(tiling)
    drop_weights = dropout_stage(tiling)
    absorb_values = value_product(tiling, formats[2], mark_hidden)
    write_rows = writer(tiling)

    def attend(p):
        shared = cuda.shared.array(0, real, alignment=SHARED_ALIGNMENT)
        t = int64(thread_index())
        ty, tx = t // threads_x, t % threads_x
        b, h, first_row = locate(p, int64(block_index()), block_q)
        q_at, k_at, v_at, _, _, bias_at, mask_at, queries, total_keys, shift, row_index = operands(p, b, h)
        own_rows = max(0, min(block_q, queries - first_row))
        slope = real(of_head(p.slopes, p.slope_batch, p.slope_head, b, h, 0.0))
        scale = p.scale * of_head(p.k_scales, p.k_scale_batch, p.k_scale_head, b, quotient(h, p.k_group), 1.0)
        scale = real(max(-highest, min(highest, scale)))
        cap, inverse_cap = real(0.0), real(0.0)
        if p.softcap != 0.0:
            cap, inverse_cap = real(p.softcap), real(1.0 / p.softcap)
        bias_at, mask_at = bias_at + first_row * p.bias_row, mask_at + first_row * p.mask_row
        terms = (p.bias != 0) + (p.mask != 0)

        # where this thread's parts start: its first row of Q and P, its first key and column
        q_row, p_row = ty * q_stride, p_at + ty * p_stride
        k_row, v_column = kv_at + tx * k_stride, kv_at + tx * vector
        p_element, partial = p_row + tx, partial_at + ty * threads_x

        s, m, l = local_array(n_scores, real), local_array(rows, real), local_array(rows, real)
        o, top = local_array(n_outputs, real), local_array(vector, real)
        for r in range(rows):
            m[r], l[r] = real(-inf), real(0.0)
        for n in range(n_outputs):
            o[n] = real(0.0)

        position = first_row + shift
        start, stop, all0, all1 = geometry.visible_keys(
            position, position + own_rows - 1, p.left, p.right, 0, total_keys
        )
        if own_rows <= 0 or start >= stop:
            start = stop = 0
        else:
            q_at += first_row * p.q_row
            quick = is_quick_q(q_at, p.q_row, p.q_column, p.q_format)
            for d in range(0, padded, piece):
                load_queries(
                    shared, d, q_at + d * p.q_column, p.q_row, p.q_column, p.q_format, quick,
                    0, own_rows, piece if whole else min(piece, dim - d), scale, t,
                )  # fmt: skip
        quick_k = is_quick_k(k_at, p.k_row, p.k_column, p.k_format)
        quick_v = is_quick_v(v_at, p.v_row, p.v_column, p.v_format)
        # from a fixed multiple, so that the bits of a row don't depend on the rows that share its tile
        for j0 in range(start // block_k * block_k, stop, block_k):
            first, last = max(start - j0, 0), min(stop - j0, block_k)
            by_position = j0 < all0 or j0 + block_k > all1
            barrier()  # everyone is done with the block before
            t = fresh(int64(thread_index()))
            if terms != 0:
                term = term_of(p, fresh(int64(0)), bias_at, mask_at)
                kept = load_term(shared, term, j0, first, last, own_rows, t)
                if not barrier_or(int32(kept)):
                    continue
            for n in range(n_scores):
                s[n] = real(0.0)
            for d in range(0, padded, piece):
                if d > 0:
                    barrier()
                load_keys(
                    shared, kv_at, k_at + j0 * p.k_row + d * p.k_column, p.k_row, p.k_column, p.k_format, quick_k,
                    first, last, piece if whole else min(piece, dim - d), real(1.0), t,
                )  # fmt: skip
                barrier()
                multiply_keys(s, shared, q_row + d, k_row)

            if p.softcap != 0.0:
                for n in range(n_scores):
                    s[n] = scalar(scores.softcapped(lane(s[n]), lane(cap), lane(inverse_cap)))
            # this thread's first row, counted from its first key, and the keys of the block, likewise
            at = position + ty - j0 - tx
            if p.slopes != 0:
                for r in range(rows):
                    row = lane(real(at + r * threads_y))
                    for c in range(keys):
                        x = lane(s[r * keys + c])
                        s[r * keys + c] = scalar(scores.with_alibi(x, lane(slope), row, lane(real(c * threads_x))))
            kept = True
            for n in range(terms):
                _, _, _, code = term_of(p, n, bias_at, mask_at)
                if n > 0:
                    barrier()
                    term = term_of(p, n, bias_at, mask_at)
                    kept = load_term(shared, term, j0, first, last, own_rows, t)
                    if not barrier_or(int32(kept)):
                        break
                    kept = True
                apply_term(s, shared, p_element, code)
            if not kept:
                continue
            if by_position:
                for r in range(rows):
                    row = at + r * threads_y
                    low = int32(max(row - p.left, first - tx))
                    high = int32(max(min(row + p.right, last - 1 - tx), -threads_x))
                    for c in range(keys):
                        seen = geometry.between(int32(c * threads_x), low, high)
                        s[r * keys + c] = scalar(scores.hide(lane(s[r * keys + c]), seen))

            for r in range(rows):
                highest_score = s[r * keys]
                for c in range(1, keys):
                    highest_score = larger(highest_score, s[r * keys + c])
                put(shared, partial + r * threads_y * threads_x + tx, highest_score)
            barrier()  # K is no longer needed, nor is a term
            for r in range(rows):
                row_top = real(-inf)
                for n in range(0, threads_x, vector):
                    take(top, 0, shared, partial + r * threads_y * threads_x + n)
                    for e in range(vector):
                        row_top = larger(row_top, top[e])
                m_new, ref, alpha = recurrence.advance(lane(m[r]), lane(row_top))
                m[r] = scalar(m_new)
                total = real(0.0)
                for c in range(keys):
                    w = scalar(recurrence.weight(lane(s[r * keys + c]), ref))
                    total += w
                    put(shared, p_element + r * threads_y * p_stride + c * threads_x, w)
                l[r] = scalar(alpha) * l[r] + total
                for n in range(n_columns):
                    o[n * rows + r] *= scalar(alpha)
            if p.keep_factor != 0.0:
                barrier()
                i, j = row_index + first_row, p.key_index + j0
                drop_weights(shared, i, j, h, b, p.round_keys, p.drop_below, real(p.keep_factor), t)
            hides = by_position or terms != 0
            t = fresh(int64(thread_index()))
            tile = (position, j0, own_rows, bias_at, mask_at)
            absorb_values(p, o, shared, v_at + j0 * p.v_row, quick_v, first, last, p_row, v_column, hides, tile, t)

        write_rows(p, shared, o, m, l, int64(thread_index()))

    return attend


# -- which kernel for which call ---------------------------------------------------------------------------------------

# As many rows and keys a thread as registers and shared memory have room for. Two thread blocks of 128 threads fill a
# multiprocessor's registers at 255 a thread, three at 168.
SHAPES = {4: (Shape(4, 8), Shape(2, 8), Shape(2, 4), Shape(1, 4)), 8: (Shape(4, 4), Shape(2, 4), Shape(1, 4))}
SIMULATED_SHAPE = Shape(4, 4, 2, 4)  # few threads, which cost the simulator most


def choose_tiling(problem: np.ndarray, cc: tuple[int, int]) -> Tiling | None:
    """The tiling for a call; None where none fits."""
    accumulator = accumulator_of(problem)
    dims = int(problem["dim"]), int(problem["value_dim"])
    if SIMULATED:
        return cut(accumulator, SIMULATED_SHAPE, *dims)
    tilings = [cut(accumulator, shape, *dims) for shape in SHAPES[accumulator.itemsize]]
    fitting = (t for t in tilings if t.registers <= 255 and t.shared_bytes <= shared_limit(cc))
    return next(fitting, None)


def why_not(problem: np.ndarray, cc: tuple[int, int]) -> str | None:
    """Why this kernel doesn't take a call, in words; None if it does."""
    if problem["state"] or not problem["out"]:
        return "a stream's state is laid out for the CPU"
    if choose_tiling(problem, cc) is None:
        return "head dimensions too large for the shared memory"
    return None


def grid(record: np.ndarray) -> tuple[int, int, int]:
    """One thread block for each tile of rows of each head."""
    tiles = record["work_tile_count"] if record["work_tiles"] else record["batch"] * record["row_tiles"]
    return int(tiles * record["heads"]), 1, 1


def specialise(problem: np.ndarray, cc: tuple[int, int]) -> Kernel:
    """The kernel for a call: its floats, head dimensions, formats and shape are compiled in, all else is read."""
    tiling = choose_tiling(problem, cc)
    assert tiling is not None
    formats = tuple(int(problem[f"{name}_format"]) for name in "qkv")
    blocks = 3 if tiling.registers <= 160 else 2
    parts = "forward", tiling.accumulator.real, tiling.dim, tiling.value_dim, *formats, *tiling.shape
    name = "-".join(map(str, parts))
    return Kernel(name, build(tiling, formats), tiling.threads, tiling.shared_bytes, grid, tiling.block_q, blocks)
