"""The PTX interpreter's memory, warps and checks: what works, and what is refused, with the place named."""

import re

import numpy as np
import pytest
from ptx import (
    Deadlock,
    Divergence,
    GlobalMemory,
    InFlight,
    Machine,
    Misaligned,
    OutOfBounds,
    PTXError,
    Race,
    Uninitialised,
    Unsupported,
    parse,
    run,
)
from ptx.snippets import HEAD, TAIL, launch

SHARED = """
    .shared .align 16 .b8 tile[1024];
    mov.u32 %r40, tile;
    mad.lo.u32 %r41, %r30, 4, %r40;  // the thread's word of it
"""
WORDS = np.arange(64, dtype=np.uint32) * 7
WRITE_R1 = "st.global.u32 [%rd26], %r1;"


def words(*shape):
    return np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)


# ---- what is understood: control flow, scopes, memory


def test_loops_of_different_lengths_meet_again():
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
$loop:
    setp.ge.u32 %p1, %r2, %r33;
    @%p1 bra $done;
    add.u32 %r1, %r1, %r2;
    add.u32 %r2, %r2, 1;
    bra.uni $loop;
$done:
    vote.sync.ballot.b32 %r3, %p1, -1;
    mad.lo.u32 %r1, %r3, 1000, %r1;
    st.global.u32 [%rd25], %r1;
    """
    n = np.arange(96, dtype=np.uint32)
    assert (launch(body, blocks=3) == (n * (n - 1) // 2 - np.uint32(1000)).astype(np.uint32)).all()


def test_a_jump_table():
    body = """
    and.b32 %r2, %r30, 3;
    $table: .branchtargets $zero, $one, $two, $two;
    brx.idx %r2, $table;
$zero:
    mov.u32 %r1, 10;
    bra $end;
$one:
    mov.u32 %r1, 11;
    bra $end;
$two:
    mov.u32 %r1, 12;
$end:
    st.global.u32 [%rd25], %r1;
    """
    assert (launch(body) == np.resize([10, 11, 12, 12], 32)).all()


def test_registers_of_an_inner_scope_are_their_own():
    body = """
    mov.u32 %r1, 1;
    { .reg .b32 %r1; .reg .pred p; mov.u32 %r1, 2; setp.eq.u32 p, %r1, 2; @p add.u32 %r2, %r1, 5; }
    { .reg .b32 %r1; mov.u32 %r1, 3; add.u32 %r2, %r2, %r1; }
    mad.lo.u32 %r1, %r1, 100, %r2; /* a comment
    of two lines */
    st.global.u32 [%rd25], %r1;
    """
    assert (launch(body) == 110).all()


def test_place_of_a_thread_in_the_grid():
    ptx = (HEAD + """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
    mov.u32 %r7, %nctaid.x; mov.u32 %r8, %nctaid.y;
    mad.lo.u32 %r9, %r6, %r8, %r5; mad.lo.u32 %r9, %r9, %r7, %r4;
    mad.lo.u32 %r10, %r3, 2, %r2; mad.lo.u32 %r10, %r10, 16, %r1; mad.lo.u32 %r10, %r9, 64, %r10;
    mul.wide.u32 %rd1, %r10, 4; add.s64 %rd1, %rd20, %rd1;
    mov.u32 %r11, %laneid; mad.lo.u32 %r11, %r10, 32, %r11;
    st.global.u32 [%rd1], %r11;
    """ + TAIL)  # fmt: skip
    for backwards in (False, True):
        memory = GlobalMemory()
        out = memory.place(np.zeros(64 * 24, np.uint32), "write")
        machine = Machine(parse(ptx)["test"], (16, 2, 2), at_once=5)
        machine.launch((2, 3, 4), [out.ctypes.data, 0, 0, 0], memory, backwards=backwards)
        n = np.arange(64 * 24)
        assert (out == n * 32 + n % 32).all()


def test_vectors_and_widths():
    body = """
    mad.wide.u32 %rd1, %r33, 16, %rd20;
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.global.nc.v2.f32 {%f1, %f2}, [%rd1+8];
    ld.global.s8 %rs1, [%rd1+3];
    cvt.s32.s16 %r5, %rs1;
    ld.global.u8 %r6, [%rd1+3];
    ld.global.s16 %rd2, [%rd1+2];
    cvt.u32.u64 %r7, %rd2;
    mad.wide.u32 %rd3, %r33, 32, %rd21;
    st.global.v4.b32 [%rd3], {%r4, %r3, %r2, %r1};
    st.global.v2.f32 [%rd3+16], {%f2, %f1};
    st.global.u32 [%rd3+24], %r5;
    st.global.u8 [%rd3+28], %r6;
    st.global.u8 [%rd3+29], %r6;
    st.global.u16 [%rd3+30], %rd2;
    """
    x = words(32, 4)
    got = launch(body, x, out=np.zeros((32, 8), np.uint32))
    assert (got[:, :4] == x[:, ::-1]).all()
    assert (got[:, 4:6] == x[:, 3:1:-1]).all()
    octets = x.view(np.uint8)
    assert (got[:, 6].view(np.int32) == octets[:, 3].view(np.int8)).all()
    assert (got[:, 7].copy().view(np.uint8).reshape(-1, 4) == octets[:, [3, 3, 2, 3]]).all()


def test_parameters_of_all_kinds():
    ptx = """
    .version 8.0
    .visible .entry kernel(.param .u64 out, .param .f64 x, .param .align 8 .b8 both[16], .param .u32 n, .param .f32 y)
    {
        .reg .b64 %rd<8>; .reg .f64 %fd<4>; .reg .f32 %f<4>; .reg .b32 %r<4>;
        ld.param.u64 %rd1, [out]; ld.param.f64 %fd1, [x]; ld.param.v2.u64 {%rd2, %rd3}, [both];
        ld.param.u32 %r1, [n]; ld.param.f32 %f1, [y]; ld.param.u64 %rd4, [both+8];
        mov.u32 %r2, %tid.x; mad.wide.u32 %rd1, %r2, 40, %rd1;
        st.global.f64 [%rd1], %fd1; st.global.v2.u64 [%rd1+8], {%rd2, %rd3}; st.global.u64 [%rd1+24], %rd4;
        st.global.u32 [%rd1+32], %r1; st.global.f32 [%rd1+36], %f1;
        ret;
    }"""
    row = np.dtype([("x", "f8"), ("both", "u8", 2), ("second", "u8"), ("n", "u4"), ("y", "f4")])
    packed = np.array(
        [(0, 2.5, (3, 2**63), 7, 1.25)], [("out", "u8"), ("x", "f8"), ("b", "u8", 2), ("n", "u4"), ("y", "f4")]
    )
    memory = GlobalMemory()
    out = memory.place(np.zeros(32, row), "write")
    packed["out"] = out.ctypes.data
    with pytest.raises(Misaligned):  # 8 bytes behind a multiple of 40 aren't a multiple of 16 for odd threads
        run(ptx, (1, 1, 1), (32, 1, 1), packed.tobytes(), memory)
    memory = GlobalMemory()
    out = memory.place(np.zeros(32, row), "write")
    packed["out"] = out.ctypes.data
    ptx = ptx.replace(
        "st.global.v2.u64 [%rd1+8], {%rd2, %rd3};", "st.global.u64 [%rd1+8], %rd2; st.global.u64 [%rd1+16], %rd3;"
    )
    run(ptx, (1, 1, 1), (32, 1, 1), packed.tobytes(), memory)
    assert (out == np.array((2.5, (3, 2**63), 2**63, 7, 1.25), row)).all()
    with pytest.raises(OutOfBounds, match=r"byte 16 .* line 7"):
        run(ptx.replace("[both+8]", "[both+16]"), (1, 1, 1), (32, 1, 1), packed.tobytes(), memory)
    with pytest.raises(ValueError, match="bytes of parameters"):
        run(ptx, (1, 1, 1), (32, 1, 1), packed.tobytes()[:-1], memory)


def test_arrays_keep_their_strides_and_their_alignment():
    memory = GlobalMemory()
    x = words(6, 8)[::-2, 1::3]
    view = memory.place(x)
    assert view.strides == x.strides
    assert (view == x).all()
    assert (view.__array_interface__["data"][0] - x.__array_interface__["data"][0]) % 256 == 0
    assert memory.place(np.zeros((0, 4))).shape == (0, 4)
    at = np.array([view.__array_interface__["data"][0]], np.uint64)
    one = np.array([0])
    assert memory.load(at, np.dtype("u4"), 1, one)[0, 0] == x[0, 0]
    with pytest.raises(OutOfBounds):  # between two elements
        memory.load(at + np.uint64(4), np.dtype("u4"), 1, one)
    with pytest.raises(MemoryError):
        memory.place(np.zeros(1 << 24, np.uint8))


def test_tables_in_the_module():
    ptx = HEAD.replace(".visible", ".const .align 4 .b32 table[4] = {10, 0x14, 30, -1};\n.visible") + """
    mov.u64 %rd1, table;
    and.b32 %r1, %r30, 3;
    mad.wide.u32 %rd1, %r1, 4, %rd1;
    ld.const.u32 %r1, [%rd1];
    st.global.u32 [%rd25], %r1;
    """ + TAIL  # fmt: skip
    memory = GlobalMemory()
    out = memory.place(np.zeros(32, np.uint32), "write")
    run(ptx, (1, 1, 1), (32, 1, 1), [out.ctypes.data, 0, 0, 0], memory)
    assert (out == np.resize(np.array([10, 20, 30, 2**32 - 1], np.uint32), 32)).all()


LOCAL = """
    .local .align 8 .b8 __local_depot0[16];
    .reg .b64 %SP; .reg .b64 %SPL;
    mov.u64 %SPL, __local_depot0;
    cvta.local.u64 %SP, %SPL;
    st.local.u32 [%SPL+4], %r33;
    ld.u32 %r1, [%SP+{}];
    st.global.u32 [%rd25], %r1;
"""


def test_local_memory():
    assert (launch(LOCAL.format(4), blocks=2) == np.arange(64)).all()
    with pytest.raises(Uninitialised, match="local"):
        launch(LOCAL.format(8))
    with pytest.raises(OutOfBounds, match="16 bytes"):
        launch(LOCAL.format(16))


def test_dynamic_shared_memory_lies_behind_the_static():
    body = (
        SHARED
        + """
    .extern .shared .align 16 .b8 dynamic[];
    mov.u32 %r42, dynamic;
    mad.lo.u32 %r43, %r30, 4, %r42;
    st.shared.u32 [%r41], 1;
    st.shared.u32 [%r43], %r42;
    ld.shared.u32 %r1, [%r43];
    cvt.u64.u32 %rd1, %r43;
    cvta.shared.u64 %rd2, %rd1;
    ld.u32 %r2, [%rd2];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd25], %r1;
    """
    )
    assert (launch(body, shared_bytes=128) == 2048).all()
    with pytest.raises(OutOfBounds, match=r"1148 bytes.*thread \(31, 0, 0\) of block \(0, 0, 0\); PTX line"):
        launch(body, shared_bytes=124)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(space):
    start = SHARED + "setp.eq.u32 %p1, %r30, 0; @%p1 st.shared.u32 [%r40], 0; bar.sync 0; cvt.u64.u32 %rd1, %r40;"
    start = start if space == "shared" else "mov.u64 %rd1, %rd20;"
    body = (
        start
        + f"""
    atom.{space}.add.u32 %r1, [%rd1], 2;
    red.{space}.max.u32 [%rd1], 5;
    bar.sync 0;
    atom.{space}.cas.b32 %r2, [%rd1], 128, 1000;
    st.global.u32 [%rd26], %r1;
    bar.sync 0;
    ld.{space}.u32 %r3, [%rd1];
    mad.wide.u32 %rd2, %r33, 4, %rd22;
    st.global.u32 [%rd2], %r3;
    """
    )
    memory = GlobalMemory()
    counter = memory.place(np.zeros(1, np.uint32), "update")
    first, last = (memory.place(np.zeros(64, np.uint32), "write") for _ in range(2))
    addresses = [x.ctypes.data for x in (counter, first, last)]
    run(HEAD + body + TAIL, (1, 1, 1), (64, 1, 1), [*addresses, 0], memory)
    assert sorted(first.tolist()) == list(range(0, 128, 2))
    assert (last == 1000).all()


# ---- checks of memory

ODD_ONES = "setp.eq.u32 %p1, %r30, 5; "


@pytest.mark.parametrize(
    ("fault", "body", "words_in_message"),
    [
        (OutOfBounds, "ld.global.u32 %r1, [%rd25+128];", ["read of 4 bytes", "in no array", "thread (0, 0, 0)"]),
        (OutOfBounds, "ld.global.u32 %r1, [%rd25+4];", ["thread (31, 0, 0)"]),
        (OutOfBounds, "ld.global.u32 %r1, [%rd25+-4];", ["thread (0, 0, 0)"]),
        (OutOfBounds, "mov.u64 %rd25, 0; ld.global.u32 %r1, [%rd25];", ["0x0 is in no array"]),
        (OutOfBounds, "st.global.u32 [%rd25], 1;", ["write of 4 bytes", "read-only"]),
        (OutOfBounds, ODD_ONES + "@%p1 ld.global.u32 %r1, [%rd25+1024];", ["thread (5, 0, 0)"]),
        (Misaligned, "ld.global.u32 %r1, [%rd25+2];", ["multiple of 4"]),
        (Misaligned, "ld.global.v2.u32 {%r1, %r2}, [%rd20+4];", ["multiple of 8"]),
        (Uninitialised, "ld.global.u32 %r1, [%rd26];", ["never written"]),
        (Race, "st.global.u32 [%rd26], 1; st.global.u32 [%rd26], 1;", ["second write"]),
    ],
)
def test_global_memory_is_checked(fault, body, words_in_message):
    with pytest.raises(fault) as raised:
        launch(body, WORDS[:32])
    message = str(raised.value)
    line = next(i for i, text in enumerate((HEAD + body).splitlines(), 1) if body in text)
    for word in [*words_in_message, f"PTX line {line}: ", "block (0, 0, 0)"]:
        assert word in message
    assert raised.value.line == line


def test_what_a_kernel_left_out_is_known():
    memory = GlobalMemory()
    out = memory.place(np.zeros(32, np.uint32), "write")
    body = "setp.ne.u32 %p1, %r30, 7; @%p1 st.global.u32 [%rd25], 1;"
    run(HEAD + body + TAIL, (1, 1, 1), (32, 1, 1), [out.ctypes.data, 0, 0, 0], memory)
    assert (memory.unwritten(out) == (np.arange(32) == 7)).all()


def test_a_workspace_is_read_after_it_is_written():
    memory = GlobalMemory()
    place = memory.reserve(128)
    body = "{} ld.global.u32 %r1, [%rd25];"
    run(HEAD + body.format("st.global.u32 [%rd25], 1;") + TAIL, (1, 1, 1), (32, 1, 1), [place, 0, 0, 0], memory)
    with pytest.raises(Uninitialised):
        run(HEAD + body.format("") + TAIL, (1, 1, 1), (32, 1, 1), [memory.reserve(128), 0, 0, 0], memory)


STORE, LOAD, BARRIER = "st.shared.u32 [%r41], %r30; ", "ld.shared.u32 %r1, [%r41]; ", "bar.sync 0; "
OTHER = "xor.b32 %r42, %r41, {}; "  # another thread's word
NEIGHBOUR, OTHER_WARP = OTHER.format(4), OTHER.format(128)
LOAD_OTHER, STORE_OTHER = "ld.shared.u32 %r1, [%r42]; ", "st.shared.u32 [%r42], 9; "


@pytest.mark.parametrize(
    ("fault", "body"),
    [
        (None, STORE + LOAD + STORE),  # one's own word
        (None, OTHER_WARP + STORE + BARRIER + LOAD_OTHER + BARRIER + STORE),
        (None, NEIGHBOUR + STORE + "bar.warp.sync -1; " + LOAD_OTHER + "bar.warp.sync -1; " + STORE),
        (None, STORE + BARRIER + "ld.shared.u32 %r1, [%r40]; ld.shared.u32 %r2, [%r40+128];"),  # by all
        (None, "st.shared.u32 [%r40], 7; " + BARRIER + "ld.shared.u32 %r1, [%r40];"),  # one value by all
        (Race, OTHER_WARP + STORE + LOAD_OTHER),
        (Race, NEIGHBOUR + STORE + LOAD_OTHER),
        (Race, OTHER_WARP + STORE + "bar.warp.sync -1; " + LOAD_OTHER),
        (Race, OTHER_WARP + STORE + BARRIER + LOAD_OTHER + STORE),
        (Race, NEIGHBOUR + STORE + BARRIER + LOAD_OTHER + STORE),
        (Race, OTHER_WARP + STORE + BARRIER + LOAD_OTHER + "bar.warp.sync -1; " + STORE),
        (Race, OTHER_WARP + STORE + STORE_OTHER),
        (Race, "st.shared.u32 [%r40], %r30; "),  # different values to one place
        (Race, STORE + BARRIER + "ld.shared.u32 %r1, [%r40]; " + STORE),  # read by all, then written by one
        (Race, "st.shared.u32 [%r40], 7; ld.shared.u32 %r1, [%r40];"),
        (Race, OTHER_WARP + STORE + "atom.shared.add.u32 %r1, [%r42], 1;"),
        (Uninitialised, LOAD),
        (Uninitialised, NEIGHBOUR + "setp.eq.u32 %p1, %r30, 3; @!%p1 " + STORE + BARRIER + LOAD_OTHER),
        (OutOfBounds, "st.shared.u32 [%r41+1024], 1;"),
        (OutOfBounds, "st.shared.u32 [%r41+-4], 1;"),
        (Misaligned, "st.shared.u32 [%r41+1], 1;"),
        (Misaligned, "st.shared.v4.u32 [%r41], {%r30, %r30, %r30, %r30};"),
    ],
)
def test_shared_memory_is_checked(fault, body):
    if fault is None:
        launch(SHARED + body, threads=64)
        return
    with pytest.raises(fault, match=r"thread \(\d+, 0, 0\) of block \(0, 0, 0\); PTX line \d+: [a-z]+.shared"):
        launch(SHARED + body, threads=64)


def test_races_are_found_in_each_block_alone():
    late = "setp.eq.u32 %p1, %r31, 5; @!%p1 bra $on; " + LOAD_OTHER + "$on: "
    with pytest.raises(Race) as raised:
        launch(SHARED + OTHER_WARP + STORE + late, threads=64, blocks=8, at_once=3)
    assert raised.value.block == (5, 0, 0)


# ---- asynchronous copies

COPY = "cp.async.ca.shared.global [%r41], [%rd25], 4; "
COMMIT, WAIT = "cp.async.commit_group; ", "cp.async.wait_group {}; "
SECOND = "cp.async.ca.shared.global [%r41+256], [%rd25], 4; "


@pytest.mark.parametrize(
    ("fault", "body"),
    [
        (None, COPY + COMMIT + WAIT.format(0) + LOAD),
        (None, COPY + "cp.async.wait_all; " + LOAD),
        (None, OTHER_WARP + COPY + COMMIT + WAIT.format(0) + BARRIER + LOAD_OTHER),
        (None, COPY + COMMIT + SECOND + COMMIT + WAIT.format(1) + LOAD + WAIT.format(0)),
        (InFlight, COPY + COMMIT + LOAD + WAIT.format(0)),
        (InFlight, COPY + COMMIT + BARRIER + LOAD + WAIT.format(0)),
        (InFlight, COPY + COMMIT + WAIT.format(1) + LOAD),
        (InFlight, COPY + WAIT.format(0) + LOAD),  # never committed
        (InFlight, COPY + COMMIT + STORE + WAIT.format(0)),
        (InFlight, COPY + COMMIT + COPY + COMMIT + WAIT.format(0)),
        (InFlight, COPY + COMMIT),  # never waited for
        (InFlight, COPY + SECOND + COMMIT + COPY + COMMIT + WAIT.format(1) + LOAD),
        (Race, OTHER_WARP + COPY + COMMIT + WAIT.format(0) + LOAD_OTHER),
        (Race, OTHER_WARP + COPY + COMMIT + BARRIER + WAIT.format(0) + LOAD_OTHER),
        (Race, OTHER_WARP + STORE + BARRIER + LOAD_OTHER + COPY + COMMIT + WAIT.format(0)),
        (OutOfBounds, "cp.async.ca.shared.global [%r41], [%rd25+4], 4; " + COMMIT + WAIT.format(0)),
        (OutOfBounds, "cp.async.ca.shared.global [%r41+1020], [%rd25], 4; " + COMMIT + WAIT.format(0)),
        (Misaligned, "cp.async.ca.shared.global [%r41], [%rd25], 8; " + COMMIT + WAIT.format(0)),
    ],
)
def test_asynchronous_copies_are_checked(fault, body):
    if fault is None:
        x = words(64)
        got = launch(SHARED + body + WRITE_R1, x, threads=64)
        assert (got == (x[np.arange(64) ^ 32] if OTHER_WARP in body else x)).all()
        return
    with pytest.raises(fault, match=r"PTX line|never waited"):
        launch(SHARED + body, words(64), threads=64)


@pytest.mark.parametrize("taken", [0, 3, 8, 10, 16])
def test_a_copy_may_take_a_part_and_fill_with_zeros(taken):
    body = f"""
    .shared .align 16 .b8 wide[512];
    mov.u32 %r40, wide;
    mad.lo.u32 %r41, %r30, 16, %r40;
    mad.wide.u32 %rd1, %r30, 16, %rd20;
    mov.u32 %r2, {taken};
    cp.async.cg.shared.global [%r41], [%rd1], 16, %r2;
    cp.async.wait_all;
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r41];
    mad.wide.u32 %rd1, %r30, 16, %rd21;
    st.global.v4.u32 [%rd1], {{%r4, %r5, %r6, %r7}};
    """
    x = words(32, 4)
    got = launch(body, x, out=np.zeros((32, 4), np.uint32))
    want = x.view(np.uint8).copy()
    want[:, taken:] = 0
    assert (got.view(np.uint8) == want).all()
    short = x.view(np.uint8).reshape(-1)[: 31 * 16 + taken]  # the last row ends where the copy has to stop
    assert (launch(body, short, out=np.zeros((32, 4), np.uint32)).view(np.uint8)[-1] == want[-1]).all()


# ---- threads that wait, and what isn't supported

FIRST_HALF, WARP_0 = "setp.lt.u32 %p1, %r30, 16; ", "setp.lt.u32 %p1, %r30, 32; "


@pytest.mark.parametrize(
    ("fault", "message", "body"),
    [
        (Deadlock, "32 threads of the block wait, 32 have ended", WARP_0 + "@%p1 ret; bar.sync 0;"),
        (Divergence, "without thread 16", FIRST_HALF + "@!%p1 bra $on; bar.sync 0; $on: "),
        (Deadlock, "different barriers", WARP_0 + "@%p1 bra $a; bar.sync 0; bra $b; $a: bar.sync 0; $b: "),
        (Deadlock, "different barriers", WARP_0 + "@%p1 bra $a; bar.sync 1; bra $b; $a: bar.sync 2; $b: "),
        (Deadlock, "different barriers", WARP_0 + "@%p1 bra $a; bar.sync 0; $a: bar.sync 0;"),
        (Divergence, "without", FIRST_HALF + "@!%p1 bra $on; bar.warp.sync -1; $on: "),
        (Divergence, "without", FIRST_HALF + "@%p1 vote.sync.any.pred %p2, %p1, -1;"),
        (Unsupported, "calls", "{ .param .b32 x; call.uni f, (x); }"),
        (Unsupported, "calls", "call.uni f, ();"),
        (Unsupported, "instruction wgmma.fence", "wgmma.fence;"),
        (Unsupported, "f16", "add.f16 %rs1, %rs2, %rs3;"),
        (Unsupported, ".cc", "add.cc.u32 %r1, %r2, %r3;"),
        (Unsupported, "part of the block", "bar.sync 1, 32;"),
        (Unsupported, "bar.arrive", "bar.arrive 1, 64;"),
        (Unsupported, "operand %nothing", "add.u32 %r1, %nothing, 3;"),
        (Unsupported, "narrower", "add.u64 %rd1, %r1, 3;"),
        (PTXError, "trap", "trap;"),
        (PTXError, "still running", "$again: add.u32 %r1, %r1, 1; bra.uni $again;"),
    ],
)
def test_refused(fault, message, body, monkeypatch):
    monkeypatch.setattr(Machine, "max_instructions", 1000)
    with pytest.raises(fault, match=re.escape(message)):
        launch(body, threads=64)


def test_blocks_have_whole_warps():
    with pytest.raises(Unsupported, match="40 threads"):
        launch("", threads=40)
