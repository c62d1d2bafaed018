"""Memory as CUDA threads see it: global memory by raw addresses, and vectors of 16 bytes in shared memory.

A kernel gets addresses and byte strides (`problem.PROBLEM`), all 64 bits wide, so that no array is too large. The
Python body of a function is what it means on host memory, for Numba's simulator; the code beside it is what it compiles
to.
"""

import ctypes
import threading

import numpy as np
from llvmlite import ir
from numba import types

from .. import SIMULATED
from .lanes import I32, I64, LLVM, instruction

GLOBAL = 1  # address space
SIZES = {types.float32: 4, types.float64: 8, types.int32: 4, types.int64: 8, types.uint16: 2, types.uint8: 1}
HOST = {
    types.float32: (ctypes.c_float, np.float32),
    types.float64: (ctypes.c_double, np.float64),
    types.int32: (ctypes.c_int32, np.int32),
    types.int64: (ctypes.c_int64, int),
    types.uint16: (ctypes.c_uint16, np.int32),
    types.uint8: (ctypes.c_uint8, np.int32),
}


def llvm_of(dtype):
    return LLVM.get(dtype) or ir.IntType(dtype.bitwidth)


def global_pointer(builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(kind, GLOBAL))


# -- global memory, one element ----------------------------------------------------------------------------------------


def reader(dtype, result=None):
    """A function that loads one `dtype` from an address; integers of less than 32 bits as int32."""
    result = result or dtype

    def emit(builder, kind, given, address):
        value = builder.load(global_pointer(builder, address, llvm_of(dtype)))
        value.align = SIZES[dtype]
        return value if result == dtype else builder.zext(value, LLVM[result])

    ctype, number = HOST[dtype]

    def read(address):
        return number(ctype.from_address(int(address)).value)

    read.__name__ = f"load_{dtype}"
    return instruction(lambda address: (result, (types.int64,)), emit)(read)


def writer(dtype, given=None):
    """A function that stores one `dtype` to an address, of what is given as another."""
    given = given or dtype

    def emit(builder, kind, arguments, address, value):
        if given != dtype:
            value = builder.trunc(value, llvm_of(dtype))
        builder.store(value, global_pointer(builder, address, llvm_of(dtype))).align = SIZES[dtype]

    ctype = HOST[dtype][0]

    def write(address, value):
        ctype.from_address(int(address)).value = value

    write.__name__ = f"store_{dtype}"
    return instruction(lambda address, value: (types.void, (types.int64, given)), emit)(write)


load_float32, store_float32 = reader(types.float32), writer(types.float32)
load_float64, store_float64 = reader(types.float64), writer(types.float64)
load_int32, store_int32 = reader(types.int32), writer(types.int32)
load_int64, store_int64 = reader(types.int64), writer(types.int64)
load_uint16, store_uint16 = reader(types.uint16, types.int32), writer(types.uint16, types.int32)
load_uint8 = reader(types.uint8, types.int32)


def _swap_bytes(builder, kind, given, x):
    return builder.call(builder.module.declare_intrinsic("llvm.bswap", [x.type]), [x])


@instruction(lambda x: (x, (x,)), _swap_bytes)
def swap_bytes(x):
    """An int32 or int64 with its bytes in the other order."""
    size = x.nbytes if isinstance(x, np.int32) else 8
    return type(x)(int.from_bytes(int(x).to_bytes(size, "little", signed=True), "big", signed=True))


# -- global memory, 16 bytes -------------------------------------------------------------------------------------------


def vector_load(builder, pointer, kind, count):
    """A vector at an aligned address as a tuple."""
    vector = ir.VectorType(kind, count)
    value = builder.load(builder.bitcast(pointer, ir.PointerType(vector, pointer.type.addrspace)))
    value.align = count * (8 if kind == ir.DoubleType() else 4)
    result = ir.Constant(ir.ArrayType(kind, count), ir.Undefined)
    for i in range(count):
        result = builder.insert_value(result, builder.extract_element(value, I32(i)), i)
    return result


def vector_store(builder, pointer, kind, values):
    """A vector to an address that is a multiple of 16."""
    vector = ir.VectorType(kind, len(values))
    value = ir.Constant(vector, ir.Undefined)
    for i, x in enumerate(values):
        value = builder.insert_element(value, x, I32(i))
    builder.store(value, builder.bitcast(pointer, ir.PointerType(vector, pointer.type.addrspace))).align = 16


def fetcher(count):
    """A function that loads `count` int32 from an address that is a multiple of their size to local[k] and on."""

    def emit(context, builder, kind, given, local, k, address):
        to = element(context, builder, given[0], local, k)
        pointer = global_pointer(builder, address, I32)
        if count == 1:
            builder.store(builder.load(pointer), to)
            return
        values = vector_load(builder, pointer, I32, count)
        for j in range(count):
            builder.store(builder.extract_value(values, j), builder.gep(to, [I64(j)], inbounds=True))

    def fetch(local, k, address):
        local[k : k + count] = (ctypes.c_int32 * count).from_address(int(address))

    fetch.__name__ = f"fetch_{4 * count}"
    return instruction(lambda local, k, address: (types.void, (local, types.intp, types.int64)), emit)(fetch)


fetch_4, fetch_8, fetch_16 = fetcher(1), fetcher(2), fetcher(4)


# -- shared memory and a thread's own ----------------------------------------------------------------------------------

if SIMULATED:

    def local_array(n, dtype):
        """An array of the thread's own: registers, where every index is a constant once loops are unrolled."""
        return np.empty(n, str(dtype))
else:
    from numba import cuda
    from numba.cuda.cudadecl import Cuda_local_array
    from numba.cuda.typing.templates import infer_global

    local_array = cuda.local.array
    infer_global(local_array, types.Function(Cuda_local_array))


def element(context, builder, array_type, array, index):
    """The address of an element, without Numba's look at negative indices."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


@instruction(
    lambda array, i: (array.dtype, (array, types.intp)),
    lambda context, builder, kind, given, array, i: builder.load(element(context, builder, given[0], array, i)),
)
def get(array, i):
    """array[i]"""
    return array[i]


def _put(context, builder, kind, given, array, i, x):
    builder.store(x, element(context, builder, given[0], array, i))


@instruction(lambda array, i, x: (types.void, (array, types.intp, array.dtype)), _put)
def put(array, i, x):
    """array[i] = x"""
    array[i] = x


def _take(context, builder, kind, given, local, k, array, i):
    real = LLVM[given[0].dtype]
    values = vector_load(builder, element(context, builder, given[2], array, i), real, 16 // SIZES[given[0].dtype])
    to = element(context, builder, given[0], local, k)
    for j in range(len(values.type)):
        builder.store(builder.extract_value(values, j), builder.gep(to, [I64(j)], inbounds=True))


@instruction(lambda local, k, array, i: (types.void, (local, types.intp, array, types.intp)), _take)
def take(local, k, array, i):
    """16 bytes of floats of a shared array, from array[i] on, to the thread's own, local[k] on, in one load.

    The shared array starts at a multiple of 16 bytes, and i is one.
    """
    n = 16 // array.itemsize
    local[k : k + n] = array[i : i + n]


def _give(context, builder, kind, given, array, i, local, k):
    source = element(context, builder, given[2], local, k)
    count = 16 // SIZES[given[0].dtype]
    values = [builder.load(builder.gep(source, [I64(j)], inbounds=True)) for j in range(count)]
    vector_store(builder, element(context, builder, given[0], array, i), LLVM[given[0].dtype], values)


@instruction(lambda array, i, local, k: (types.void, (array, types.intp, local, types.intp)), _give)
def give(array, i, local, k):
    """16 bytes of the thread's own floats, from local[k] on, to a shared array, from array[i] on, in one store."""
    n = 16 // array.itemsize
    array[i : i + n] = local[k : k + n]


# -- atomics -----------------------------------------------------------------------------------------------------------

_lock = threading.Lock()


def _atomic_add(builder, kind, given, address, value):
    return builder.atomic_rmw("add", global_pointer(builder, address, I64), value, "monotonic")


@instruction(lambda address, value: (types.int64, (types.int64, types.int64)), _atomic_add)
def atomic_add(address, value):
    """Add to the int64 at an address; what it was before."""
    with _lock:
        counter = ctypes.c_int64.from_address(int(address))
        before = counter.value
        counter.value = before + value
        return before
