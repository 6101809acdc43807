"""Ways to fail on a GPU: ``python cuda_failures.py NAME ...``, one after the other.

A JSON object is printed for each: the error's text, what ``diagnose_oom`` says of the
error and of its text, and the amounts that torch told just after it.
"""

import ctypes
import gc
import json
import os
import sys
import traceback

GIB = 2**30
MIB = 2**20

FAILURES = {}
"""By name: the function, whether it is out of memory, and what is known of it."""


def fails(*, is_oom, verdicts=(), settings="", alone=False, **states):
    """Register a failure; ``alone`` if nothing more can be tried in its process."""

    def register(function):
        FAILURES[function.__name__] = {
            "function": function,
            "alone": alone or bool(settings),
            "is_oom": is_oom,
            "verdicts": verdicts,
            "settings": settings,
            "states": states,
        }
        return function

    return register


def give(size, **options):
    import torch

    return torch.empty(int(size), dtype=torch.uint8, device="cuda", **options)


def limit_to(size):
    """Let this process take so many bytes of the GPU."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)


def fill_up(left):
    """Take what is free but for some bytes, in one piece."""
    import torch

    return give(torch.cuda.mem_get_info()[0] - left)


@fails(is_oom=True, verdicts=["request exceeds device"], requested=200 * GIB)
def one_request_larger_than_the_card():
    give(200 * GIB)


@fails(is_oom=True, verdicts=["true shortage"], requested=2 * GIB)
def full_of_its_own_tensors():
    kept = fill_up(GIB)
    return kept, give(2 * GIB)


@fails(is_oom=True, verdicts=["software limit"], requested=2 * GIB)
def a_share_of_the_card():
    limit_to(GIB)
    give(2 * GIB)


@fails(is_oom=True, verdicts=["software limit"], requested=GIB)
def a_share_that_is_used_up():
    limit_to(4 * GIB)
    kept = give(3.5 * GIB)
    return kept, give(GIB)


@fails(is_oom=True, verdicts=["fragmentation"], requested=24 * MIB)
def enough_in_pieces():
    import torch

    left = fill_up(2 * GIB)
    pieces = []
    try:
        while True:
            pieces.append(give(11 * MIB))
    except torch.OutOfMemoryError:
        del pieces[::2]
    gc.collect()
    return left, pieces, give(24 * MIB)


@fails(is_oom=True, verdicts=["held by others"], requested=8 * GIB)
def another_process_holds_it():
    import subprocess

    import torch

    code = "import torch; k=torch.empty(int(%d), dtype=torch.uint8, device='cuda');"
    code += "torch.cuda.synchronize(); print('held', flush=True); input()"
    free = torch.cuda.mem_get_info()[0]
    holder = subprocess.Popen(
        [sys.executable, "-c", code % (free - 4 * GIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    try:
        give(8 * GIB)
    finally:
        holder.kill()
        holder.wait()


@fails(
    is_oom=True,
    verdicts=["true shortage", "software limit"],
    settings="expandable_segments:True",
    requested=2 * GIB,
)
def expandable_segments():
    kept = fill_up(GIB)
    return kept, give(2 * GIB)


@fails(is_oom=True, settings="backend:cudaMallocAsync", requested=2 * GIB)
def the_drivers_allocator():
    kept = fill_up(GIB)
    return kept, give(2 * GIB)


@fails(is_oom=True, settings="backend:cudaMallocAsync", requested=200 * GIB)
def the_drivers_allocator_too_large():
    give(200 * GIB)


@fails(is_oom=True)
def in_a_backward_pass():
    import torch

    limit_to(GIB)
    x = torch.randn(6000, 6000, device="cuda", requires_grad=True)
    (x.exp().sin().cos().sin()).sum().backward()
    y = torch.randn(6000, 6000, device="cuda", requires_grad=True)
    (y.exp().sin().cos().sin().exp()).sum().backward()


@fails(is_oom=True)
def in_an_optimizers_update():
    import torch

    limit_to(2 * GIB)
    weight = torch.nn.Parameter(torch.randn(220 * MIB // 2, device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight]).step()
    other = torch.nn.Parameter(torch.randn(110 * MIB // 2, device="cuda"))
    other.grad = torch.ones_like(other)
    torch.optim.Adam([other]).step()


@fails(is_oom=True, alone=True)
def a_librarys_workspace():
    """cuBLAS takes its workspace at the first product."""
    import torch

    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    kept = []
    try:
        for size in (GIB, 64 * MIB, 8 * MIB, 2 * MIB, 512 << 10, 64 << 10, 512):
            while len(kept) < 10**5:
                try:
                    kept.append(give(size))
                except torch.OutOfMemoryError:
                    break
        return kept, a @ b
    finally:
        pass


@fails(is_oom=True, alone=True)
def a_captured_graph():
    import torch

    limit_to(GIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        give(2 * GIB)


@fails(is_oom=True, requested=4000 * GIB)
def page_locked_host_memory():
    import torch

    torch.empty(4000 * GIB, dtype=torch.uint8, pin_memory=True)


@fails(is_oom=True, verdicts=["garbage size", "request exceeds device"])
def a_garbage_size():
    import torch

    torch.empty((2**31, 2**31), device="cuda")


@fails(is_oom=True)
def a_matrix_of_all_pairs():
    import torch

    x = torch.randn(400_000, 3, device="cuda")
    torch.cdist(x, x)


@fails(is_oom=True)
def an_eigendecomposition():
    import torch

    limit_to(GIB)
    torch.linalg.eigh(torch.randn(9000, 9000, device="cuda"))


@fails(is_oom=True)
def a_fourier_transform():
    import torch

    limit_to(GIB)
    torch.fft.fftn(torch.randn(1024, 512, 512, device="cuda")[:, :300, :257])


@fails(is_oom=True)
def a_convolution():
    import torch

    limit_to(GIB)
    conv = torch.nn.Conv2d(64, 512, 7, padding=3).cuda()
    conv(torch.randn(16, 64, 256, 256, device="cuda"))


@fails(is_oom=True, requested=2 * GIB)
def the_runtime_itself():
    import torch

    kept = fill_up(GIB)
    runtime = torch.cuda.cudart()
    pointer = ctypes.c_void_p()
    library = ctypes.CDLL("libcudart.so.13")
    code = library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 * GIB))
    assert kept is not None
    torch.cuda.check_error(code)
    return runtime


@fails(is_oom=True, alone=True)
def cupy():
    import cupy

    cupy.empty(200 * GIB, dtype=cupy.uint8)


@fails(is_oom=True, alone=True)
def cupy_with_a_limit():
    import cupy

    cupy.get_default_memory_pool().set_limit(size=GIB)
    cupy.empty(2 * GIB, dtype=cupy.uint8)


@fails(is_oom=True, alone=True)
def jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax.numpy as jnp

    jnp.ones((200 * GIB // 4,), jnp.float32).block_until_ready()


@fails(is_oom=True, alone=True)
def jax_inside_a_program():
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".05"
    import jax
    import jax.numpy as jnp

    x = jnp.ones((30000, 1000))
    jax.jit(lambda x: (x @ x.T).sort(axis=1).sum())(x).block_until_ready()


@fails(is_oom=True, alone=True)
def numba():
    import numpy as np
    from numba import cuda

    cuda.device_array(200 * GIB, dtype=np.uint8)


@fails(is_oom="maybe", alone=True)
def onnxruntime():
    import numpy as np
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    shape = [200_000, 200_000]
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    assert onnx
    session = ort.InferenceSession(
        model.SerializeToString(), providers=ort.get_available_providers()
    )
    given = {"x": np.ones((1, 1), np.float32), "shape": np.array(shape, np.int64)}
    session.run(None, given)


# What is not out of memory, though memory or a resource is spoken of.


@fails(is_oom=False, alone=True)
def triton_out_of_shared_memory():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a, b, c, N: tl.constexpr):
        i = tl.arange(0, N)
        x = tl.load(a + i[:, None] * N + i[None, :])
        y = tl.load(b + i[:, None] * N + i[None, :])
        tl.store(c + i[:, None] * N + i[None, :], tl.dot(x, y))

    x = torch.randn(512, 512, device="cuda")
    kernel[(1,)](x, x, x, 512)


@fails(is_oom=False, alone=True)
def an_index_out_of_range():
    import torch

    torch.nn.functional.embedding(
        torch.tensor([99], device="cuda"), torch.randn(3, 3, device="cuda")
    )
    torch.cuda.synchronize()


@fails(is_oom=False, alone=True)
def an_illegal_address():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a, N: tl.constexpr):
        i = tl.arange(0, N).to(tl.int64)
        tl.store(a + i * 10_000_000_000, 1.0)

    kernel[(64,)](torch.zeros(4, device="cuda"), 128)
    torch.cuda.synchronize()


@fails(is_oom=False, alone=True)
def too_many_threads():
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void f() {}', "f")
    kernel((1,), (4096,), ())
    cupy.cuda.Device().synchronize()


@fails(is_oom=False)
def another_device():
    import torch

    torch.ones(3, device="cuda") + torch.ones(3, 3).sum(0)


@fails(is_oom=False)
def no_such_card():
    import torch

    torch.ones(3, device="cuda:7")


@fails(is_oom=False, alone=True)
def a_fork_after_the_first_use():
    import torch

    torch.ones(3, device="cuda")
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(3, device="cuda")
        except Exception as error:  # noqa: BLE001 -- sent to the parent
            os.write(write, str(error).encode())
        os._exit(0)
    raise RuntimeError(os.read(read, 10**5).decode())


def describe(name):
    """Fail, and say what is read from the error."""
    import torch

    from loaderkit import diagnose_oom

    case = FAILURES[name]
    error = None
    try:
        case["function"]()
    except Exception as raised:  # noqa: BLE001 -- what is looked for
        error = raised
    if error is None:
        return {"name": name, "text": None}
    traceback.clear_frames(error.__traceback__)
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    diagnosis, of_text = diagnose_oom(error), diagnose_oom(text)
    told = {}
    if case["is_oom"] and not text.startswith(("cupy", "jax", "numba")):
        try:
            told = {
                "capacity": torch.cuda.get_device_properties(0).total_memory,
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
            }
        except Exception as asked:  # noqa: BLE001 -- a dead context answers nothing
            told = {"unreadable": str(asked)[:100]}
    return {
        "name": name,
        "text": text,
        "trace": "".join(traceback.format_exception(error))[-3000:],
        "torch": told,
        "read": {k: v for k, v in diagnosis.to_json().items() if k != "raw" and v},
        "of_text": {k: v for k, v in of_text.to_json().items() if k != "raw" and v},
        "printed": str(diagnosis),
    }


def main(names):
    for name in names:
        print("\n" + json.dumps(describe(name)), flush=True)
        if len(names) > 1:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
