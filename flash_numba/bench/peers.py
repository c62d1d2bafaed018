"""How each library is called, as its users would for speed: the layout it likes best, nothing converted on the way.

A library's function runs in a process of its own (`worker`). It takes the number of threads and returns the version and
`prepare(shape, dtype)`, which draws `Shape.inputs`, and returns a `Call`, or raises `Refused` for what the library
doesn't take. Libraries are imported by name at run time: none is a dependency.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from . import onnx_model
from .shapes import DTYPES, Shape

OURS = "flash_numba"


class Refused(Exception):
    """Why a library doesn't take a problem."""


class Call(NamedTuple):
    """A call without arguments, and how its result becomes (B, H, S_q, D) in NumPy, or gradients `in_one`."""

    run: Callable[[], Any]
    as_array: Callable[[Any], np.ndarray] = np.asarray


def in_one(gradients: Iterable[np.ndarray]) -> np.ndarray:
    """dq, dk and dv one after the other, without axes."""
    return np.concatenate([np.asarray(dx, np.float64).ravel() for dx in gradients])


def refuse_gradient(shape: Shape) -> None:
    if shape.gradient:
        raise Refused("it has no gradient")


Prepare = Callable[[Shape, str], Call]
Library = tuple[str, Prepare]


def threads_in_environment(threads: int, passive: bool = True) -> dict[str, str]:
    """What libraries read before they start their threads: how many, and whether idle ones wait by sleeping.

    A spinning pool would take the cores from whoever's turn is next, did a worker not wait for it (`worker.settle`).
    """
    counts = [f"{pool}_NUM_THREADS" for pool in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMBA")]
    counts += ["VECLIB_MAXIMUM_THREADS", "PJRT_NPROC"]  # Apple's BLAS, JAX
    waiting = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"} if passive else {}
    return {name: str(threads) for name in counts} | waiting


def check_memory(needed: int) -> None:
    """Refuse what would fill more than half of the memory that is free."""
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free / 2:
        raise Refused(f"the score matrix needs {1e-9 * needed:.1f} GB")


def score_bytes(shape: Shape) -> int:
    """Bytes of the score matrix in float32, for libraries that hold it."""
    return 4 * shape.B * shape.H * shape.S_q * shape.S_kv


def flash_numba(threads: int) -> Library:
    import numba

    from .. import __version__, attention, attention_grad

    numba.set_num_threads(threads)

    def prepare(shape: Shape, dtype: str) -> Call:
        q, k, v = shape.inputs(DTYPES[dtype])
        if shape.gradient:
            dout = shape.dout(DTYPES[dtype])

            def forward_and_backward() -> Any:
                out, lse = attention(q, k, v, causal=shape.causal, return_lse=True, backend="cpu")
                return attention_grad(dout, q, k, v, out, lse, causal=shape.causal, backend="cpu")[:3]

            return Call(forward_and_backward, in_one)
        return Call(lambda: attention(q, k, v, causal=shape.causal, backend="cpu"))

    return __version__, prepare


def numpy(threads: int) -> Library:
    from . import baselines

    def prepare(shape: Shape, dtype: str) -> Call:
        if dtype not in ("float32", "float64"):
            raise Refused(f"NumPy has no matrix product in {dtype}")
        check_memory(score_bytes(shape) * DTYPES[dtype].itemsize // 4)
        q, k, v = shape.inputs(DTYPES[dtype])
        if shape.gradient:
            dout = shape.dout(DTYPES[dtype])
            check_memory(2 * score_bytes(shape) * DTYPES[dtype].itemsize // 4)
            return Call(
                lambda: (
                    baselines.one_shot(q, k, v, shape.causal),
                    baselines.one_shot_grad(q, k, v, dout, shape.causal),
                ),
                lambda results: in_one(results[1]),
            )
        return Call(lambda: baselines.one_shot(q, k, v, shape.causal))

    return f"{np.__version__}{blas()}", prepare


def blas() -> str:
    """Which BLAS NumPy multiplies with, in brackets, where threadpoolctl is there to say."""
    with contextlib.suppress(ImportError):
        for pool in importlib.import_module("threadpoolctl").threadpool_info():
            if pool["user_api"] == "blas":
                return f" ({pool['internal_api']} {pool['version']} {pool.get('architecture', '')})".replace(" )", ")")
    return ""


def torch(threads: int) -> Library:
    """`scaled_dot_product_attention`."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    attend = torch.nn.functional.scaled_dot_product_attention

    def prepare(shape: Shape, dtype: str) -> Call:
        of = getattr(torch, dtype)
        # Drawn by torch's own memory, as a program in torch would have it, and rounded by torch.
        q, k, v = (torch.from_numpy(x).to(of, copy=True) for x in shape.inputs(drawn_as(dtype)))

        def forward() -> Any:
            return attend(q, k, v, is_causal=shape.causal, enable_gqa=shape.H_kv < shape.H)

        if not shape.gradient:
            return Call(forward, lambda out: out.double().numpy())
        dout = torch.from_numpy(shape.dout(drawn_as(dtype))).to(of, copy=True)
        for leaf in (q, k, v):
            leaf.requires_grad_()

        def forward_and_backward() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(forward(), (q, k, v), dout)

        return Call(forward_and_backward, lambda gradients: in_one(dx.double().numpy() for dx in gradients))

    return torch.__version__, prepare


def drawn_as(dtype: str) -> np.dtype:
    """What NumPy draws for a library that rounds to `dtype` itself."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def jax(threads: int) -> Library:
    """`jax.nn.dot_product_attention`, compiled for the shape."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)

    def prepare(shape: Shape, dtype: str) -> Call:
        check_memory(3 * score_bytes(shape))  # it holds the scores, the weights, and one of them by key
        q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2), dtype) for x in shape.inputs(drawn_as(dtype)))

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=shape.causal)

        if shape.gradient:
            dout = jax.numpy.asarray(shape.dout(drawn_as(dtype)).swapaxes(1, 2), dtype)
            with_gradient = jax.jit(lambda q, k, v, dout: (attend(q, k, v), jax.vjp(attend, q, k, v)[1](dout)))
            both = with_gradient.lower(q, k, v, dout).compile()
            return Call(
                lambda: jax.block_until_ready(both(q, k, v, dout)),
                lambda results: in_one(np.asarray(dx, np.float64).swapaxes(1, 2) for dx in results[1]),
            )
        compiled = jax.jit(attend).lower(q, k, v).compile()
        return Call(
            lambda: compiled(q, k, v).block_until_ready(), lambda out: np.asarray(out, np.float64).swapaxes(1, 2)
        )

    return jax.__version__, prepare


def openvino(threads: int) -> Library:
    """The operation ScaledDotProductAttention, as its LLM pipelines use it."""
    openvino = importlib.import_module("openvino")
    ops = importlib.import_module("openvino.opset13")
    core = openvino.Core()
    elements = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

    def prepare(shape: Shape, dtype: str) -> Call:
        if dtype not in elements:
            raise Refused(f"it computes in {', '.join(elements)}")
        if shape.H_kv < shape.H:
            raise Refused("its operation has no grouped heads")
        refuse_gradient(shape)
        check_memory(score_bytes(shape))
        inputs = shape.inputs(DTYPES[dtype])
        element = getattr(openvino.Type, elements[dtype])
        q, k, v = parameters = [ops.parameter(x.shape, element) for x in inputs]
        out = ops.scaled_dot_product_attention(q, k, v, causal=shape.causal)
        # Without the hint it computes float32 in bfloat16 where the CPU can.
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": elements[dtype],
        }
        request = core.compile_model(openvino.Model([out], parameters), "CPU", settings).create_infer_request()
        # A tensor made of an array with a type of its own doesn't keep the array: `run` does.
        raw = [np.ascontiguousarray(x).view(np.uint16) if dtype == "bfloat16" else x for x in inputs]
        for i, x in enumerate(raw):
            request.set_input_tensor(i, openvino.Tensor(x, x.shape, element))

        def run(_: Any = raw) -> Any:
            request.infer()
            return request.get_output_tensor(0)

        return Call(run, lambda out: np.array(out.data).view(DTYPES[dtype]).astype(np.float64))

    return openvino.__version__.partition("-")[0], prepare


def onnxruntime(threads: int) -> Library:
    """The operator of its own that is fastest for each kind: MultiHeadAttention for many rows in float32, ONNX's
    Attention for them in other formats, GroupQueryAttention with a cache that it appends to in place for one row."""
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # spin within a call, not after it
    elements = {"float32": onnx_model.FLOAT, "float16": onnx_model.FLOAT16}

    def prepare(shape: Shape, dtype: str) -> Call:
        if dtype not in elements:
            raise Refused(f"its attention on a CPU takes {', '.join(elements)}")
        refuse_gradient(shape)
        element = elements[dtype]
        q, k, v = shape.inputs(DTYPES[dtype])
        if shape.decoding:
            model, feed, cache = onnx_decoding(shape, element, q, k, v)
        else:
            check_memory(score_bytes(shape))
            model, feed, cache = onnx_prefill(shape, element, q, k, v)
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no public type
            raise Refused(str(error).splitlines()[0]) from None
        values = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in feed.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("out")
        for output, name in cache.items():
            binding.bind_ortvalue_output(output, values[name])

        def run(_: Any = feed) -> Any:
            session.run_with_iobinding(binding)
            return binding

        def as_array(binding: Any) -> np.ndarray:
            out = binding.get_outputs()[0].numpy().astype(np.float64)
            if out.ndim == 3:
                out = out.reshape(shape.B, shape.S_q, shape.H, shape.D).swapaxes(1, 2)
            return out

        return Call(run, as_array)

    return ort.__version__, prepare


def heads_last(x: np.ndarray) -> np.ndarray:
    """(B, H, S, D) as (B, S, H * D)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(x.shape[0], x.shape[2], -1)


OnnxProblem = tuple[bytes, dict[str, np.ndarray], dict[str, str]]


def onnx_prefill(shape: Shape, element: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> OnnxProblem:
    """`(model, inputs by name, outputs that lie in an input)` for many rows."""
    types, out = dict.fromkeys("qkv", element), {"out": element}
    feed = {"q": q, "k": k, "v": v}
    if element != onnx_model.FLOAT or shape.H_kv < shape.H:
        return onnx_model.one_node("Attention", types, out, {"is_causal": int(shape.causal)}), feed, {}
    attributes = {"num_heads": shape.H, "unidirectional": int(shape.causal)}
    model = onnx_model.one_node("MultiHeadAttention", types, out, attributes, "com.microsoft")
    return model, {name: heads_last(x) for name, x in feed.items()}, {}


def onnx_decoding(shape: Shape, element: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> OnnxProblem:
    """Likewise for one row: the last key is the new one, which each call writes to the cache anew, in its place."""
    feed = {
        "q": heads_last(q),
        "k": heads_last(k[:, :, -1:]),
        "v": heads_last(v[:, :, -1:]),
        "past_k": k,
        "past_v": v,
        "past_lengths": np.full(shape.B, shape.S_kv - 1, np.int32),
        "total_length": np.array([shape.S_kv], np.int32),
    }
    types = {name: element if x.dtype != np.int32 else onnx_model.INT32 for name, x in feed.items()}
    outputs = dict.fromkeys(("out", "present_k", "present_v"), element)
    attributes = {"num_heads": shape.H, "kv_num_heads": shape.H_kv}
    model = onnx_model.one_node("GroupQueryAttention", types, outputs, attributes, "com.microsoft")
    return model, feed, {"present_k": "past_k", "present_v": "past_v"}


PEERS: dict[str, Callable[[int], Library]] = {
    "numpy": numpy,
    "torch": torch,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "jax": jax,
}
LIBRARIES = {OURS: flash_numba, **PEERS}
