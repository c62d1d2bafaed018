"""Kernels of a few lines, to try out instructions with."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import GlobalMemory, run

HEAD = """
.version 8.0
.target sm_80
.address_size 64
// .globl test
.visible .entry test(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)
{
    .reg .pred %p<8>;
    .reg .b16 %rs<16>;
    .reg .b32 %r<64>;
    .reg .f32 %f<32>;
    .reg .b64 %rd<32>;
    .reg .f64 %fd<16>;
    ld.param.u64 %rd20, [a];
    ld.param.u64 %rd21, [b];
    ld.param.u64 %rd22, [c];
    ld.param.u64 %rd23, [d];
    mov.u32 %r30, %tid.x;
    mov.u32 %r31, %ctaid.x;
    mov.u32 %r32, %ntid.x;
    mad.lo.s32 %r33, %r31, %r32, %r30;  // number of the thread
    mul.wide.u32 %rd24, %r33, 4;
    add.s64 %rd25, %rd20, %rd24;  // its word of a, b and c
    add.s64 %rd26, %rd21, %rd24;
    add.s64 %rd27, %rd22, %rd24;
"""
TAIL = "\n    ret;\n}\n"
SHARED = "    .shared .align 16 .b8 tile[1024];\n    mov.u32 %r40, tile;\n    mad.lo.u32 %r41, %r30, 4, %r40;\n"


def launch(
    body: str, *arrays: np.ndarray, blocks: int = 1, threads: int = 32, out: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """Run `body` with a, b, c, d the addresses of `arrays`, the last of them written to: its content afterwards."""
    memory = GlobalMemory()
    out = np.zeros(blocks * threads, np.uint32) if out is None else out
    views = [memory.place(x) for x in arrays] + [memory.place(out, "write")]
    addresses = [x.__array_interface__["data"][0] for x in views] + [0] * (4 - len(views))
    run(HEAD + body + TAIL, (blocks, 1, 1), (threads, 1, 1), addresses, memory, **options)
    return views[-1]


REGISTERS = {"u": {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}, "f": {4: "%f", 8: "%fd"}}
REGISTERS["i"] = REGISTERS["b"] = REGISTERS["u"]


def evaluate(instruction: str, *inputs: np.ndarray, result: str | None = None) -> np.ndarray:
    """What `instruction` makes of each element: $0 stands for its result (of dtype `result`), $1 and on for inputs."""
    dtype = np.dtype(result or inputs[0].dtype)
    count = len(inputs[0])
    padded = count + -count % 32
    body = ""
    for i, x in enumerate(inputs):
        kind = f"{'f' if x.dtype.kind == 'f' else 'u'}{8 * x.itemsize}"
        register = REGISTERS[x.dtype.kind][x.itemsize] + str(i + 1)
        body += f"    mad.wide.u32 %rd{10 + i}, %r33, {x.itemsize}, %rd{20 + i};\n"
        body += f"    ld.global.{kind} {register}, [%rd{10 + i}];\n"
        instruction = instruction.replace(f"${i + 1}", register)
    register = REGISTERS[dtype.kind][dtype.itemsize] + "0"
    body += "    " + instruction.replace("$0", register) + "\n"
    body += f"    mad.wide.u32 %rd9, %r33, {dtype.itemsize}, %rd{20 + len(inputs)};\n"
    body += f"    st.global.{'f' if dtype.kind == 'f' else 'b'}{8 * dtype.itemsize} [%rd9], {register};\n"
    arrays = [np.resize(x, padded) for x in inputs]
    return launch(body, *arrays, blocks=padded // 32, out=np.zeros(padded, dtype))[:count]
