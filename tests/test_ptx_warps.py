"""The PTX interpreter between the threads of a warp: shuffles, votes, barriers, and tensor cores' fragments against the
PTX ISA's tables.
"""

import ml_dtypes
import numpy as np
import pytest
from ptx import Divergence, Unsupported, tensor
from ptx.snippets import launch


def words(*shape):
    return np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)


@pytest.mark.parametrize(
    ("mode", "by", "control", "source"),
    [
        ("bfly", 5, 31, lambda n: n ^ 5),
        ("up", 3, 0, lambda n: np.where(n % 32 < 3, n, n - 3)),
        ("down", 4, 31, lambda n: np.where(n % 32 > 27, n, n + 4)),
        ("idx", 9, 31, lambda n: n // 32 * 32 + 9),
        ("idx", 9, 0x181F, lambda n: n // 8 * 8 + 1),
        ("bfly", 8, 0x181F, lambda n: np.where(n % 16 < 8, n, n - 8)),  # only lower segments can be reached
        ("down", 2, 0x1C1F, lambda n: np.where(n % 4 > 1, n, n + 2)),
    ],
)
def test_shuffles(mode, by, control, source):
    body = f"""
    ld.global.u32 %r2, [%rd25];
    shfl.sync.{mode}.b32 %r1|%p1, %r2, {by}, {control}, -1;
    @!%p1 not.b32 %r1, %r1;
    st.global.u32 [%rd26], %r1;
    """
    x, n = words(64), np.arange(64)
    got = launch(body, x, blocks=2)
    of_itself = source(n) == n
    kept = np.where(of_itself & (got == ~x), ~got, got)
    assert (kept == x[source(n)]).all()
    inside = {"bfly": (n ^ by) // 32 == n // 32, "idx": n >= 0}.get(mode, ~of_itself)
    if control == 31 or mode == "up":
        assert ((got == x[source(n)]) == inside).all()


def test_votes_and_reductions():
    body = """
    ld.global.u32 %r2, [%rd25];
    and.b32 %r3, %r2, 7;
    setp.eq.u32 %p1, %r3, 0;
    vote.sync.ballot.b32 %r4, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, !%p1, -1;
    selp.u32 %r5, 1, 0, %p2;
    @%p3 add.u32 %r5, %r5, 2;
    match.any.sync.b32 %r6, %r3, -1;
    redux.sync.max.u32 %r7, %r2, -1;
    redux.sync.add.s32 %r8, %r2, -1;
    activemask.b32 %r9;
    mad.wide.u32 %rd1, %r33, 32, %rd21;
    st.global.v4.u32 [%rd1], {%r4, %r5, %r6, %r7};
    st.global.v2.u32 [%rd1+16], {%r8, %r9};
    """
    x = words(64)
    x[32:] |= 1
    got = launch(body, x, blocks=2, out=np.zeros((64, 8), np.uint32))
    for warp in (slice(0, 32), slice(32, 64)):
        mine, zero = x[warp], x[warp] & 7 == 0
        assert (got[warp, 0] == sum(1 << i for i in np.flatnonzero(zero))).all()
        assert (got[warp, 1] == (1 if zero.any() else 2)).all()
        alike = (mine & 7)[:, None] == (mine & 7)
        assert (got[warp, 2] == (alike * (1 << np.arange(32))).sum(axis=1)).all()
        assert (got[warp, 3] == mine.max()).all()
        assert (got[warp, 4] == mine.sum(dtype=np.uint32)).all()
        assert (got[warp, 5] == 2**32 - 1).all()


def test_a_barrier_that_counts():
    body = """
    setp.lt.u32 %p1, %r30, 40;
    bar.red.popc.u32 %r1, 0, %p1;
    barrier.cta.red.or.aligned.pred %p2, 0, %p1;
    barrier.cta.red.and.pred %p3, 0, %p1;
    @%p2 add.u32 %r1, %r1, 100;
    @%p3 add.u32 %r1, %r1, 1000;
    st.global.u32 [%rd25], %r1;
    """
    assert (launch(body, threads=64, blocks=2) == 140).all()


def test_half_a_warp_may_shuffle_among_itself():
    body = """
    mov.u32 %r1, 0;
    setp.ge.u32 %p1, %r30, 16;
    @%p1 bra $end;
    shfl.sync.bfly.b32 %r1, %r30, 1, 31, 0xFFFF;
$end:
    st.global.u32 [%rd25], %r1;
    """
    assert (launch(body)[:16] == np.arange(16) ^ 1).all()
    with pytest.raises(Divergence, match="without thread 16 of its warp"):
        launch(body.replace("0xFFFF", "-1"))
    with pytest.raises(Divergence, match="doesn't name"):
        launch(body.replace("0xFFFF", "0xFF"))
    with pytest.raises(Divergence, match="reads from thread 16"):
        launch(body.replace("bfly.b32 %r1, %r30, 1,", "down.b32 %r1, %r30, 1,"))


# ---- fragments, from the PTX ISA: 9.7.14.5.7 (m16n8k8), 9.7.14.5.8 (m16n8k16), 9.7.14.5.15 (ldmatrix)


def group(lane):
    return lane >> 2


def thread_in_group(lane):
    return lane % 4


def a_place(lane, i, k):
    """Row and column of element a_i."""
    if k == 8:
        return group(lane) + (0 if i < 2 else 8), thread_in_group(lane) * 2 + (i & 1)
    row = group(lane) if 0 <= i < 2 or 4 <= i < 6 else group(lane) + 8
    return row, thread_in_group(lane) * 2 + (i & 1) + (0 if i < 4 else 8)


def b_place(lane, i, k):
    return thread_in_group(lane) * 2 + (i & 1) + (0 if i < 2 else 8), group(lane)


def c_place(lane, i):
    return group(lane) + (0 if i < 2 else 8), thread_in_group(lane) * 2 + (i & 1)


def registers_of(matrix, place, count, k):
    """(lanes, registers) words of the fragment of a 16-bit matrix: element i is half i % 2 of register i / 2."""
    words = np.zeros((32, count, 2), np.uint16)
    for lane in range(32):
        for i in range(2 * count):
            words[lane, i // 2, i % 2] = matrix[place(lane, i, k)]
    return words.view(np.uint32)[..., 0]


TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("k", [8, 16])
def test_mma_multiplies_the_matrices_that_the_tables_spread(kind, k):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(TYPES[kind]) for shape in ((16, k), (k, 8)))
    c = rng.integers(-99, 99, (16, 8)).astype(np.float32) + np.float32(2.0**-20)
    a_words, b_words = registers_of(a.view("u2"), a_place, k // 4, k), registers_of(b.view("u2"), b_place, k // 8, k)
    c_words = np.array([[c[c_place(lane, i)] for i in range(4)] for lane in range(32)], np.float32)
    given = np.zeros((32, 12), np.uint32)
    given[:, : k // 4], given[:, 4 : 4 + k // 8], given[:, 8:] = a_words, b_words, c_words.view(np.uint32)
    names = {"a": ["%r0", "%r1", "%r2", "%r3"][: k // 4], "b": ["%r4", "%r5"][: k // 8]}
    body = f"""
    mad.wide.u32 %rd1, %r33, 48, %rd20;
    ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd1];
    ld.global.v2.u32 {{%r4, %r5}}, [%rd1+16];
    ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd1+32];
    mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}},
        {{{", ".join(names["a"])}}}, {{{", ".join(names["b"])}}}, {{%f0, %f1, %f2, %f3}};
    mad.wide.u32 %rd1, %r33, 16, %rd21;
    st.global.v4.f32 [%rd1], {{%f4, %f5, %f6, %f7}};
    """
    got = launch(body, np.tile(given, (3, 1)), blocks=3, out=np.zeros((96, 4), np.float32))
    want = a.astype(np.float32) @ b.astype(np.float32) + c
    for lane in range(96):
        for i in range(4):
            assert got[lane, i] == want[c_place(lane % 32, i)]


def test_fragments_there_and_back():
    x = np.random.default_rng(0).standard_normal((5, 16, 8)).astype(np.float32)
    assert (tensor.c_matrices(tensor.c_registers(x)) == x).all()


LDMATRIX = """
    .shared .align 16 .b8 tile[2048];
    mov.u32 %r40, tile;
    mad.lo.u32 %r41, %r30, 16, %r40;
    mad.wide.u32 %rd1, %r33, 16, %rd20;
    ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd1];
    st.shared.v4.u32 [%r41], {{%r0, %r1, %r2, %r3}};
    bar.sync 0;
    xor.b32 %r41, %r41, 48;
    {}
    mad.wide.u32 %rd1, %r33, 16, %rd21;
    st.global.v4.u32 [%rd1], {{%r4, %r5, %r6, %r7}};
"""


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_spreads_rows_as_the_table_says(count, trans):
    names = ["%r4", "%r5", "%r6", "%r7"]
    load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{', '.join(names[:count])}}}, [%r41];"
    x = words(64, 4)
    got = launch(LDMATRIX.format(load), x, threads=64, out=np.zeros((64, 4), np.uint32))
    for warp in range(2):
        rows = x.view(np.uint16)[32 * warp : 32 * warp + 32][np.arange(32) ^ 3]  # where each thread's address points
        for lane in range(32):
            for i in range(count):
                matrix = rows[8 * i : 8 * i + 8]
                matrix = matrix.T if trans else matrix
                low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
                assert got[32 * warp + lane, i] == int(high) << 16 | int(low)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_undoes_ldmatrix(trans):
    both = f"""
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r41];
    bar.sync 0;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r41], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r41];
    """
    x = words(64, 4)
    got = launch(LDMATRIX.format(both), x, threads=64, out=np.zeros((64, 4), np.uint32))
    assert (got == x[np.arange(64) ^ 3]).all()


MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{}.f32 {{%f0,%f1,%f2,%f3}}, {{%r0,%r1,%r2,%r3}}, {{{}}}, "
    "{{%f0,%f1,%f2,%f3}};"
)


def test_tensor_cores_need_whole_warps():
    half = "setp.lt.u32 %p1, %r30, 16; @!%p1 bra $on; {} $on: "
    with pytest.raises(Divergence, match=r"without thread 16 of its warp.*mma"):
        launch(half.format(MMA.format("f16.f16", "%r4,%r5")))
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r40];"
    with pytest.raises(Divergence, match=r"without thread 16 of its warp.*ldmatrix"):
        launch(half.format(load))


@pytest.mark.parametrize(
    "instruction", [MMA.format("f16.bf16", "%r4,%r5"), MMA.format("tf32.tf32", "%r4,%r5"), MMA.format("f16.f16", "%r4")]
)
def test_other_products_are_refused(instruction):
    with pytest.raises(Unsupported):
        launch(instruction)
