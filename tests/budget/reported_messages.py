"""What users of many systems pasted when memory ran out, and what only looks like it.

Collected from public reports after the wordings were written, and read by hand.  A row
states what the text states; a field that is not named is not checked.  Rows are dealt
into two halves: the first was looked at while the grammar was written, the second not.
"""

from dataclasses import dataclass, field
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Report:
    """One text and what it states."""

    text: str
    kind: str
    backend: str | None = None
    is_oom: bool | str = True
    states: dict[str, Any] = field(default_factory=dict)


def said(text, kind, backend=None, *, is_oom=True, **states):
    """One text and what it states, sizes in bytes."""
    sizes = {
        name: round(value) if isinstance(value, float) else value
        for name, value in states.items()
    }
    return Report(text, kind, backend, is_oom, sizes)


RAN_OUT = [
    # CUDA: driver, runtime, libraries
    said("RuntimeError: CUDA failed with error out of memory", "device_oom_async", "cuda"),
    said(
        "CUDA error 2 at /build/ggml-cuda.cu:7233: out of memory\ncurrent device: 0",
        "device_oom_async",
        "cuda",
    ),
    said(
        "Check failed: e == cudaSuccess: CUDA: out of memory",
        "device_oom_async",
        "cuda",
    ),
    said(
        "mxnet.base.MXNetError: [11:41:11] src/storage/./pooled_storage_manager.h:108: "
        "cudaMalloc failed: out of memory",
        "device_oom_async",
        "cuda",
    ),
    said("MXNetError: cudaMalloc retry failed: out of memory", "device_oom_async", "cuda"),
    said(
        "[E] [TRT] ../rtSafe/safeRuntime.cpp (25) - Cuda Error in allocate: 2 (out of "
        "memory)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "[defaultAllocator.cpp::allocate::63] Error Code 1: Cuda Runtime (out of memory)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "ERROR: [TRT]: 2: [virtualMemoryBuffer.cpp::resizePhysical::160] Error Code 2: "
        "OutOfMemory (no further information)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "[TensorRT] ERROR: Requested amount of memory (150994944 bytes) could not be "
        "allocated. There may not be enough free memory for allocation to succeed.",
        "device_oom",
        requested=150994944,
    ),
    said(
        "WARNING: [TRT]: Requested amount of GPU memory (4294967296 bytes) could not be "
        "allocated. There may not be enough free memory for allocation to succeed.",
        "device_oom",
        requested=4294967296,
    ),
    said(
        "[TRT] Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)",
        "device_oom",
        "cuda",
        requested=8589934592,
    ),
    said(
        "MemoryError: std::bad_alloc: CUDA error at: ../include/rmm/mr/device/"
        "cuda_memory_resource.hpp68: cudaErrorMemoryAllocation out of memory",
        "device_oom_async",
        "cuda",
    ),
    said(
        "MemoryError: std::bad_alloc: RMM failure at:/envs/rap/include/rmm/mr/device/"
        "pool_memory_resource.hpp:182: Maximum pool size exceeded",
        "device_oom",
        "cuda",
    ),
    said(
        "[2025-01-23 14:33:04.213] [RMM] [error] [A][Stream 0x1][Upstream 67108864B]"
        "[FAILURE maximum pool size exceeded]",
        "device_oom",
        "cuda",
        requested=67108864,
    ),
    said(
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in "
        "CUDA_ERROR_OUT_OF_MEMORY",
        kind="device_oom",
        backend="cuda",
    ),
    said(
        "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        "device_oom_async",
        "cuda",
    ),
    said(
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 3,221,225,472 bytes "
        "(allocated so far: 8,589,934,592 bytes, limit set to: 10,737,418,240 bytes).",
        "device_oom",
        "cuda",
        requested=3221225472,
        allocated=8589934592,
        limit=10737418240,
    ),
    said("terminate: after an error: GPUassert: out of memory kernel.cu 38",
         "device_oom_async", "cuda"),
    said(
        "cublas error: CUBLAS_STATUS_ALLOC_FAILED the resource allocation failed",
        "library_alloc",
        "cuda",
        is_oom="maybe",
    ),
    said(
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "library_alloc",
        "cuda",
    ),
    said(
        "node3:411:902 [2] NCCL INFO Bootstrap\nnode3:411:902 [2] include/alloc.h:48 "
        "NCCL WARN Failed to CUDA host alloc 9437184 bytes",
        "comm_oom",
        "cuda",
        requested=9437184,
    ),
    said(
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed "
        "memory. (out of memory)\nCurrently allocated     : 5.44 GiB\n"
        "Requested               : 28.00 MiB\nDevice limit            : 8.00 GiB\n"
        "Free (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory "
        "fraction)\n                        : 17179869184.00 GiB",
        "device_oom",
        "cuda",
        requested=28 * MIB,
        capacity=8 * GIB,
        free=0,
        device=0,
    ),
    said("torch.OutOfMemoryError: Allocation on device", "device_oom", "cuda"),
    # llama.cpp and its kin
    said(
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144817.04 MiB on device "
        "0: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate "
        "CUDA0 buffer of size 151851674624",
        "device_oom",
        "cuda",
        device=0,
        requested=144817.04 * MIB,
    ),
    said(
        "ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 10345253120",
        "device_oom",
        "cuda",
        requested=10345253120,
    ),
    said(
        "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size 14822711296",
        "device_oom",
        "hip",
        requested=14822711296,
    ),
    said(
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "device_oom_async",
        "cuda",
    ),
    said(
        "ggml_vulkan: Device memory allocation of size 369827840 failed.\n"
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "device_oom",
        "vulkan",
        requested=369827840,
    ),
    said(
        "ggml_metal_graph_compute: command buffer 0 failed with status 5\nerror: "
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "device_oom_async",
        "mps",
    ),
    said(
        "ggml_aligned_malloc: insufficient memory (attempted to allocate 17179.87 MB)",
        "host_alloc",
        "cpu",
        requested=17179.87 * MIB,
    ),
    said(
        "ggml_new_tensor_impl: not enough space in the context's memory pool (needed "
        "10485760, available 8388608)",
        "host_alloc",
        "cpu",
    ),
    said(
        "ggml_cuda_host_malloc: failed to allocate 256.00 MiB of pinned memory: out of "
        "memory",
        "pinned",
        "host",
        requested=256 * MIB,
    ),
    # ROCm
    said("error: 'hipErrorOutOfMemory'(2) at square.cpp:76", "device_oom_async", "hip"),
    said("HIPError(code hipErrorOutOfMemory, out of memory)", "device_oom_async", "hip"),
    said(
        "rocm_driver.cc:600] failed to allocate 890.06M (933298432 bytes) from device: "
        "HIP_ERROR_OutOfMemory",
        "device_oom",
        "hip",
        requested=933298432,
    ),
    said(
        "rocm_driver.cc:606] failed to allocate 127.99TiB (140729850295296 bytes) from "
        "device: HIP_ERROR_OutOfMemory",
        "device_oom",
        "hip",
        requested=140729850295296,
    ),
    said(
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 1 "
        "has a total capacity of 31.98 GiB of which 1.20 GiB is free. Of the allocated "
        "memory 29.33 GiB is allocated by PyTorch, and 912.00 MiB is reserved by PyTorch "
        "but unallocated.",
        "device_oom",
        "hip",
        device=1,
        requested=1.5 * GIB,
        capacity=31.98 * GIB,
        free=1.2 * GIB,
        allocated=29.33 * GIB,
        reserved_unallocated=912 * MIB,
    ),
    # Intel
    said(
        "RuntimeError: Current platform can NOT allocate memory block with size larger "
        "than 4GB! Tried to allocate 6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes "
        "already allocated; 0 bytes reserved in total by PyTorch)",
        "buffer_too_large",
        "xpu",
        device=0,
        requested=6.85 * GIB,
        capacity=15.56 * GIB,
        allocated=0,
        reserved=0,
        limit=4 * GIB,
    ),
    said(
        "XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; "
        "176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)",
        "device_oom",
        "xpu",
        device=0,
        requested=1.71 * GIB,
        capacity=15.56 * GIB,
        allocated=176 * MIB,
        reserved=176 * MIB,
    ),
    said(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 "
        "has a total capacity of 5.65 GiB of which 5.65 GiB is free. Of the allocated "
        "memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by PyTorch "
        "but unallocated. Please use `empty_cache` to release all unoccupied cached "
        "memory.",
        "device_oom",
        "xpu",
        requested=4.66 * GIB,
        capacity=5.65 * GIB,
        free=5.65 * GIB,
        allocated=195.5 * KIB,
        reserved_unallocated=1.81 * MIB,
    ),
    said(
        "zeMemAllocDevice returns ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY for the "
        "allocation",
        "device_oom_async",
        "xpu",
    ),
    said(
        "Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY)",
        "masked_oom",
        "xpu",
        errno=-6,
    ),
    said(
        "ggml_backend_sycl_buffer_type_alloc_buffer: can't allocate 5234491392 Bytes of "
        "memory on device",
        "device_oom",
        "xpu",
        requested=5234491392,
    ),
    # Apple
    said(
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: "
        "[malloc_or_wait] Unable to allocate 134217728 bytes.",
        "device_oom",
        "mps",
        requested=134217728,
    ),
    said(
        "RuntimeError: [METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "device_oom_async",
        "mps",
    ),
    said(
        "RuntimeError: [metal::malloc] Attempting to allocate 19327352832 bytes which is "
        "greater than the maximum allowed buffer size of 14260633600 bytes.",
        "buffer_too_large",
        "mps",
        requested=19327352832,
        limit=14260633600,
    ),
    said(
        "[METAL] Command buffer execution failed: Insufficient Memory",
        "device_oom_async",
        "mps",
    ),
    # Ascend and other cards
    said(
        "RuntimeError: NPU out of memory. Tried to allocate 3.47 GiB (NPU 0; 60.97 GiB "
        "total capacity; 58.92 GiB already allocated; 58.92 GiB current active; 1.66 GiB "
        "free; 58.95 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "device_oom",
        "npu",
        device=0,
        requested=3.47 * GIB,
        capacity=60.97 * GIB,
        allocated=58.92 * GIB,
        free=1.66 * GIB,
        reserved=58.95 * GIB,
    ),
    said(
        "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 72.00 MiB (NPU 3; "
        "61.27 GiB total capacity; 56.05 GiB already allocated; 56.05 GiB current "
        "active; 5.04 MiB free; 58.39 GiB reserved in total by PyTorch).If reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid "
        "fragmentation.",
        "device_oom",
        "npu",
        device=3,
        requested=72 * MIB,
        capacity=61.27 * GIB,
        allocated=56.05 * GIB,
        free=5.04 * MIB,
        reserved=58.39 * GIB,
    ),
    said(
        "Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE "
        "module. Possible Cause: Available memory is insufficient.",
        "device_oom_async",
        "npu",
    ),
    said(
        "EL0004: [PID: 553] 2025-09-17-04:55:13.065.712 Failed to allocate memory.\n"
        "Possible Cause: Available memory is insufficient.\nalloc device memory failed, "
        "runtime result = 207001[FUNC:ReportCallError][FILE:log_inner.cpp][LINE:161]",
        "device_oom_async",
        "npu",
    ),
    said(
        "RuntimeError: Device(id:0) memory isn't enough and alloc failed, kernel name: "
        "Default/network, alloc size: 536870912B.",
        "device_oom",
        requested=536870912,
    ),
    said(
        "RuntimeError: MUSA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.95 GiB "
        "total capacity; 14.20 GiB already allocated; 512.00 MiB free)",
        "device_oom",
        "musa",
        requested=2 * GIB,
        free=512 * MIB,
    ),
    said(
        "RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for "
        "size::939524096 (896)MB on hpu",
        "device_oom",
        "hpu",
        requested=939524096,
    ),
    # XLA and TensorFlow
    said(
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile "
        "permanent error. Ran out of memory in memory space hbm. Used 21.95G of 15.48G "
        "hbm. Exceeded hbm capacity by 6.47G.",
        "device_oom",
        "tpu",
        capacity=15.48 * GIB,
    ),
    said(
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. "
        "Ran out of memory in memory space hbm. Used 215.17G of 31.25G hbm. Exceeded hbm "
        "capacity by 183.92G.",
        "device_oom",
        "tpu",
        capacity=31.25 * GIB,
    ),
    said(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 285212672 bytes.",
        "device_oom",
        requested=285212672,
    ),
    said(
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Error loading program 'jit_step': "
        "Attempting to reserve 9.61G at the bottom of memory. That was not possible. "
        "There are 7.48G free, 0B reserved, and 7.48G reservable.",
        "device_oom",
        requested=9.61 * GIB,
        free=7.48 * GIB,
    ),
    said(
        "ResourceExhaustedError: OOM when allocating tensor with shape[25088,4096] and "
        "type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator "
        "GPU_0_bfc",
        "device_oom",
        "cuda",
        shape=[25088, 4096],
        dtype="float",
        device=0,
    ),
    said(
        "ResourceExhaustedError (see above for traceback): OOM when allocating tensor "
        "with shape[100,4096,32]",
        "oom",
        shape=[100, 4096, 32],
    ),
    said(
        "W tensorflow/core/common_runtime/bfc_allocator.cc:497] Allocator (GPU_0_bfc) "
        "ran out of memory trying to allocate 2.25GiB (rounded to 2415919104)requested "
        "by op Conv2D",
        "device_oom",
        "cuda",
        requested=2.25 * GIB,
        device=0,
    ),
    said(
        "paddle ResourceExhaustedError: Out of memory error on GPU 2. Cannot allocate "
        "1.125000GB memory on GPU 2, 14.9GB memory has been allocated and available "
        "memory is only 0.8GB.",
        "device_oom",
        "cuda",
        device=2,
        requested=1.125 * GIB,
        allocated=14.9 * GIB,
        free=0.8 * GIB,
    ),
    # serving
    said(
        "ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 71.33 GiB). Decrease GPU memory "
        "utilization or reduce GPU memory used by other processes.",
        "device_limit",
        "cuda",
        free=67.24 * GIB,
        capacity=79.25 * GIB,
        requested=71.33 * GIB,
    ),
    said(
        "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less "
        "than desired GPU memory utilization (0.9, 19.84 GiB).",
        "device_limit",
        "cuda",
        free=19.77 * GIB,
        capacity=22.05 * GIB,
        requested=19.84 * GIB,
        device=0,
    ),
    said(
        "ValueError: To serve at least one request with the models's max seq len "
        "(131072), (16.00 GiB KV cache is needed, which is larger than the available KV "
        "cache memory (7.73 GiB).",
        "device_limit",
        "cuda",
        requested=16 * GIB,
    ),
    said(
        "ValueError: The model's max seq len (32768) is larger than the maximum number "
        "of tokens that can be stored in KV cache (5952). Try increasing "
        "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
        "engine.",
        "device_limit",
        "cuda",
    ),
    said(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "device_limit",
    ),
    said(
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 "
        "dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` "
        "when initializing the engine.",
        "device_oom",
        "cuda",
    ),
    said(
        "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate "
        "memory for requested buffer of size 8388608000",
        "device_oom",
        requested=8388608000,
    ),
    said(
        "onnxruntime::CudaCall CUDA failure 2: out of memory ; GPU=0 ; hostname=ab12 ; "
        "expr=cudaMalloc((void**)&p, size);",
        "device_oom_async",
        "cuda",
    ),
    # the host
    said(
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.91 TiB for an "
        "array with shape (1000000, 400000) and data type float64",
        "host_alloc",
        "cpu",
        requested=2.91 * 2**40,
        shape=[1000000, 400000],
        dtype="float64",
    ),
    said(
        "cv2.error: OpenCV(4.4.0) alloc.cpp:73: error: (-4:Insufficient memory) Failed "
        "to allocate 6291456 bytes in function 'cv::OutOfMemoryError'",
        "host_alloc",
        "cpu",
        requested=6291456,
    ),
    said(
        "OpenCV Error: Insufficient memory (Failed to allocate 3686400 bytes) in void* "
        "cv::OutOfMemoryError(size_t), file alloc.cpp, line 55",
        "host_alloc",
        "cpu",
        requested=3686400,
    ),
    said(
        "pyarrow.lib.ArrowMemoryError: malloc of size 1073741824 failed",
        "host_alloc",
        "cpu",
        requested=1073741824,
    ),
    said(
        "memory allocation of 34359738368 bytes failed\nAborted (core dumped)",
        "host_alloc",
        "cpu",
        requested=34359738368,
    ),
    said(
        "duckdb.OutOfMemoryException: Out of Memory Error: failed to allocate data of "
        "size 256.0 MiB (260.3 MiB/476.8 MiB used)",
        "host_alloc",
        "cpu",
        requested=256 * MIB,
    ),
    said(
        "Error: Out of Memory Error: could not allocate block of 262144 bytes",
        "host_alloc",
        "cpu",
        requested=262144,
    ),
    said(
        "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of "
        "memory",
        "host_alloc",
        "cpu",
    ),
    said(
        "FATAL ERROR: Ineffective mark-compacts near heap limit Allocation failed - "
        "JavaScript heap out of memory",
        "host_alloc",
        "cpu",
    ),
    said("java.lang.OutOfMemoryError: Java heap space", "host_alloc", "cpu"),
    said(
        "java.lang.OutOfMemoryError: GC overhead limit exceeded",
        "host_alloc",
        "cpu",
    ),
    said(
        "OSError: [Errno 12] Cannot allocate memory: 'mmap'",
        "host_alloc",
        is_oom=True,
        errno=12,
    ),
    said(
        "OSError: unable to mmap 10737418240 bytes from file </models/model.bin>: Cannot "
        "allocate memory (12)",
        "host_alloc",
        "cpu",
        requested=10737418240,
        errno=12,
    ),
    said(
        "thread '<unnamed>' panicked: capacity overflow or out of memory: failed to "
        "allocate an array of 8589934592 bytes",
        "host_alloc",
        requested=8589934592,
    ),
    said(
        "python(92117,0x7fff) malloc: *** mach_vm_map(size=18446744065559752704) failed "
        "(error code=3)\n*** error: can't allocate region",
        "host_alloc",
        "cpu",
    ),
    said("fatal error: runtime: out of memory", "host_alloc"),
    said("Cannot allocate memory\nAborted", "host_alloc"),
    # Windows
    said(
        "SafetensorError: The paging file is too small for this operation to complete. "
        "(os error 1455)",
        "pagefile",
        "host",
        errno=1455,
    ),
    said(
        "OSError: Die Auslagerungsdatei ist zu klein (os error 1455)",
        "pagefile",
        "host",
        errno=1455,
    ),
    said(
        "OSError: [WinError 1455] The paging file is too small for this operation to "
        "complete. Error loading \"C:\\lib\\torch\\lib\\shm.dll\" or one of its "
        "dependencies.",
        "pagefile",
        "host",
        errno=1455,
    ),
    said(
        "RuntimeError: Memory mapping file failed: Cannot allocate memory",
        "host_alloc",
    ),
    said("MemoryError: [WinError 8] Not enough memory resources are available to "
         "process this command", "host_alloc", errno=8),
    # shared memory
    said(
        "RuntimeError: unable to write to file </torch_8021_1>: No space left on device "
        "(28)",
        "shm",
        "host",
        pid=8021,
        errno=28,
    ),
    said(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by "
        "insufficient shared memory (shm).",
        "shm",
        "host",
    ),
    said(
        "OSError: [Errno 28] No space left on device: '/dev/shm/nccl-8Xk2'",
        "shm",
        "host",
        errno=28,
    ),
    said(
        "OSError: [Errno 28] No space left on device: '/dev/shm/pymp-e2k1'",
        "shm",
        "host",
        errno=28,
    ),
    # killed for it
    said(
        "[44165.845229] Out of memory: Killed process 27541 (python) "
        "total-vm:8118236kB, anon-rss:8098448kB, file-rss:3264kB, shmem-rss:0kB",
        "killed",
        "host",
        pid=27541,
        total_vm=8118236 * KIB,
        anon_rss=8098448 * KIB,
    ),
    said(
        "Nov 23 15:36:25 node1 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask="
        "(null),cpuset=x,mems_allowed=0,oom_memcg=/job,task=python3,pid=99112,uid=1000",
        "killed",
        "host",
        pid=99112,
    ),
    said(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
        "memory.\nMemory on the node (IP: 192.168.0.107, ID: fc2b) where the task (actor "
        "ID: f9cc, name=SimEnv.__init__, pid=4331, memory used=2.22GB) was running was "
        "59.49GB / 62.58GB (0.950744), which exceeds the memory usage threshold of 0.95.",
        "killed",
        "host",
    ),
    said(
        "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory "
        "pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 8289)",
        "killed",
        "host",
    ),
    said(
        "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node "
        "think is used (11.8 / 12.3 GB). The top 5 memory consumers are:",
        "killed",
        "host",
    ),
    said(
        "distributed.nanny - WARNING - Worker exceeded 95% memory budget. Restarting",
        "killed",
        "host",
    ),
    said(
        "distributed.nanny.memory - WARNING - Worker tls://10.0.0.4:34937 (pid=129) "
        "exceeded 95% memory budget. Restarting...",
        "killed",
        "host",
        pid=129,
    ),
    said(
        "ExecutorLostFailure (executor 9 exited caused by one of the running tasks) "
        "Reason: Container killed by YARN for exceeding memory limits. 7.2 GB of 4.2 GB "
        "virtual memory used.",
        "killed",
        "host",
    ),
    said(
        "Container [pid=4123] is running beyond physical memory limits. Current usage: "
        "2.1 GB of 2 GB physical memory used. Killing container.",
        "killed",
        "host",
        pid=4123,
    ),
    said(
        "Warning Evicted pod/egg-1 The node was low on resource: memory. Container egg "
        "was using 5053216Ki, which exceeds its request of 0.",
        "killed",
        "host",
    ),
    said(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the "
        "step tasks have been OOM Killed.",
        "killed",
        "host",
    ),
    said(
        "slurmstepd: error: Step 5512.0 exceeded memory limit (4210688 > 4194304), being "
        "killed",
        "killed",
        "host",
    ),
    said(
        "systemd-oomd[1852]: Killed /user.slice/user-1000.slice/app.scope due to memory "
        "pressure for /user.slice being 63.10% > 50.00% for > 20s with reclaim activity",
        "killed",
        "host",
    ),
    said(
        "earlyoom[1460]: low memory! at or below SIGTERM limits: mem 10 %, swap 10 %\n"
        "sending SIGTERM to process 27541 \"python\": badness 550",
        "killed",
        "host",
    ),
    said("Last State: Terminated Reason: OOMKilled Exit Code: 137", "killed", "host"),
    said(
        "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process "
        "managed by the executor was unexpectedly terminated. This could be caused by a "
        "segmentation fault while calling the function or by an excessive memory usage "
        "causing the Operating System to kill the worker.",
        "killed",
        "host",
        is_oom="maybe",
    ),
    said(
        "distributed.scheduler.KilledWorker: ('task', <Worker 'tcp://127.0.0.1:34589'>)",
        "killed",
        "host",
        is_oom="maybe",
    ),
]

LOOK_ALIKES = [
    # kernels, addresses, shapes
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
    "65538, Hardware limit: 65536.",
    "triton.runtime.autotuner.OutOfResources: out of resource: registers, Required: 512",
    "RuntimeError: CUDA error: too many resources requested for launch",
    "ptxas error: Entry function uses too much shared data (0x12000 bytes, 0xc000 max)",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: misaligned address",
    "CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error: invalid configuration argument",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f. Reason: "
    "Unknown.",
    "Memory critical error by agent node-1 on address 0x3f8b182000. Reason: Memory in "
    "use.",
    "RuntimeError: CUDA driver error: invalid argument",
    "RuntimeError: HIP error: invalid device function",
    "Segmentation fault (core dumped)",
    "double free or corruption (out)",
    "malloc(): corrupted top size",
    "free(): invalid pointer",
    "munmap_chunk(): invalid pointer",
    "RuntimeError: The size of tensor a (512) must match the size of tensor b (256)",
    "IndexError: index 128 is out of bounds for dimension 0 with size 100",
    "IndexError: list index out of range",
    "ValueError: memory format channels_last is not supported for 3D tensors",
    "RuntimeError: required rank 4 tensor to use channels_last format",
    "RuntimeError: shape '[2, -1]' is invalid for input of size 1073741825",
    "RuntimeError: more than one element of the written-to tensor refers to a single "
    "memory location",
    "ValueError: array is too big; `arr.size * arr.dtype.itemsize` is larger than the "
    "maximum possible size.",
    "OverflowError: Python int too large to convert to C long",
    "RecursionError: maximum recursion depth exceeded while calling a Python object",
    "RuntimeError: nonzero is not supported for tensors with more than INT_MAX elements",
    # disks, quotas, descriptors, ports
    "OSError: [Errno 28] No space left on device: '/data/checkpoint-1000/model.pt'",
    "OSError: [Errno 122] Disk quota exceeded",
    "shutil.Error: No space left on device while writing 'model.safetensors'",
    "tar: write error: No space left on device",
    "HDF5-DIAG: unable to extend file: No space left on device",
    "Error: ENOSPC: System limit for number of file watchers reached",
    "OSError: [Errno 24] Too many open files: 'data/0001.npy'",
    "OSError: [Errno 11] Resource temporarily unavailable",
    "OSError: [Errno 98] Address already in use",
    "RuntimeError: unable to allocate port 29500: address already in use",
    "Failed to allocate a pseudo tty",
    "sbatch: error: Unable to allocate resources: Requested node configuration is not "
    "available",
    "srun: error: Unable to allocate resources: Invalid account or account/partition "
    "combination specified",
    "salloc: error: Job submit/allocate failed: Requested time limit is invalid",
    "slurmstepd: error: *** JOB 5512 ON node3 CANCELLED AT 2024-05-01T10:00:00 DUE TO "
    "TIME LIMIT ***",
    "slurmstepd: error: *** STEP 11.0 CANCELLED DUE TO NODE FAILURE ***",
    "0/5 nodes are available: 5 Insufficient nvidia.com/gpu.",
    "Reason: Error Exit Code: 1",
    "Reason: Completed Exit Code: 0",
    "Container exited with code 143",
    "The node was low on resource: ephemeral-storage. Container a was using 4Gi.",
    # networks and services
    "grpc RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)",
    "google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for quota metric "
    "'Requests' per minute",
    "openai.RateLimitError: Error code: 429 - rate limit exceeded",
    "ValueError: This model's maximum context length is 4096 tokens, however you "
    "requested 5000 tokens",
    "requests.exceptions.ReadTimeout: Read timed out. (read timeout=10)",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "RuntimeError: [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE)",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was "
    "a network error",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "redis warning: Memory overcommit must be enabled! Without it, a background save may "
    "fail under low memory condition.",
    # hints, warnings, statistics
    "To avoid CUDA out of memory errors, lower the batch size.",
    "If you run out of memory, try gradient checkpointing.",
    "Tip: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    "Hint: If you want to see a list of allocated tensors when OOM happens, add "
    "report_tensor_allocations_upon_oom to RunOptions.",
    "UserWarning: This may cause out-of-memory errors on small devices.",
    "ResourceWarning: unclosed file <_io.TextIOWrapper name='a.txt'>",
    "resource_tracker: There appear to be 5 leaked shared_memory objects to clean up at "
    "shutdown",
    "UserWarning: resource_tracker: There appear to be 12 leaked semaphore objects",
    "UserWarning: 'pin_memory' argument is set as true but no accelerator is found",
    "Memory leak detected: 3 tensors were not released (1.2 GiB)",
    "Detected a possible memory leak in the data loader",
    "I tensorflow/core/common_runtime/gpu/gpu_device.cc:1525] Created device "
    "/device:GPU:0 with 14249 MB memory",
    "GPU memory usage: 10.9 GiB / 24.0 GiB (45 %)",
    "max_memory_allocated: 10.2 GiB, max_memory_reserved: 11.4 GiB",
    "INFO: loaded model, 7.2 GiB of 24 GiB used, 16.8 GiB free",
    "Epoch 3: loss 0.12, mem 11.3 GiB, 31.2 it/s",
    "W tensorflow/core/framework/cpu_allocator_impl.cc:83] Allocation of 1073741824 "
    "exceeds 10% of free system memory.",
    "[W] allocator cache flushes since last step. this happens when there is high memory "
    "pressure",
    "distributed.worker - WARNING - Memory use is high but worker has no data to store to "
    "disk. Perhaps some other process is leaking memory? Process memory: 3.06 GB",
    "Some tactics do not have sufficient workspace memory to run. Increasing workspace "
    "size may increase performance, please check verbose output.",
    "Some parameters are on the meta device because they were offloaded to the cpu due "
    "to limited memory",
    "earlyoom v1.7: sending SIGTERM when mem <= 10.00% and swap <= 10.00%",
    "mem avail: 15342 of 15881 MiB (96.61%), swap free: 4095 of 4095 MiB (100.00%)",
    "Setting OOM score adjustment to -500",
    "docker: set --oom-kill-disable to keep the container running",
    "\"OOMKilled\": false, \"ExitCode\": 1",
    "test_out_of_memory_is_handled PASSED [ 95%]",
    "feat: recover from out of memory errors by splitting the batch",
    "except torch.cuda.OutOfMemoryError:",
    "    raise torch.cuda.OutOfMemoryError",
    "oom_guard() adds a diagnosis to the error",
    "How to prevent the OOM killer from ending my training",
    "The memory allocator was changed to jemalloc",
    "memory limit set to 8 GiB",
    # loading, versions, configuration
    "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    "OSError: [WinError 126] The specified module could not be found.",
    "OSError: [WinError 127] The specified procedure could not be found.",
    "RuntimeError: Attempting to deserialize object on a CUDA device but "
    "torch.cuda.is_available() is False.",
    "AssertionError: Torch not compiled with CUDA enabled",
    "RuntimeError: Found no NVIDIA driver on your system.",
    "RuntimeError: Unrecognized CachingAllocator option: max_split_size",
    "RuntimeError: invalid low watermark ratio 1.4",
    "ValueError: gpu_memory_utilization must be less than 1.0. Got 1.2.",
    "KeyError: 'memory'",
    "AttributeError: module 'torch.cuda' has no attribute 'OutOfMemoryErrors'",
    "MemoryMappedFile: file not found",
    "h5py: Unable to open file (truncated file: eof = 96, stored_eof = 2048)",
    "Killing process 4123 because the user pressed ctrl-c",
    "KeyboardInterrupt",
    "SystemExit: 1",
    "worker process 22204 was killed by signal 15",
    "ProcessExitedException: process 0 terminated with signal SIGSEGV",
    "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit "
    "code 1",
    "RuntimeError: NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is "
    "507013",
    "RuntimeError: level_zero backend failed with error: 2147483646 (UR_RESULT_ERROR_"
    "UNKNOWN_FORMAT)",
    "Allocated memory out of bound in the compiler's scheduling pass",
]


LATER = [
    said(
        "RuntimeError: Could not allocate tensor with 234881024 bytes. There is not "
        "enough GPU video memory available!",
        "device_oom",
        requested=234881024,
    ),
    said(
        "Resource exhausted: OOM when allocating tensor with shape[16,128,98,98] and type "
        "float on /job:localhost/replica:0/task:0/device:DML:0 by allocator DmlAllocator",
        "oom",
        shape=[16, 128, 98, 98],
    ),
    said(
        "XGBoostError: [11:17:11] /src/common/device_vector.cu:23: Memory allocation "
        "error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n"
        "- Free memory: 53.1098GB\n- Requested memory: 64GB",
        "device_oom",
        "cuda",
        requested=64 * GIB,
        free=53.1098 * GIB,
    ),
    said(
        "ERROR: LoadError: CUDA error: out of memory (code #2, ERROR_OUT_OF_MEMORY)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "ERROR: Out of GPU memory trying to allocate 1.907 GiB\nEffective GPU memory "
        "usage: 97.50% (7.600 GiB/7.795 GiB)\nMemory pool usage: 5.722 GiB (7.500 GiB "
        "reserved)",
        "device_oom",
        "cuda",
        requested=1.907 * GIB,
        reserved=7.5 * GIB,
    ),
    said(
        "Error using gpuArray. Out of memory on device. To view more detail about "
        "available memory on the GPU, use 'gpuDevice()'.",
        "device_oom_async",
        "cuda",
    ),
    said(
        "Error: Out of memory in CUDA queue enqueue (integrator_shade_surface)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "[LightGBM] [Fatal] [CUDA] out of memory /src/cuda/cuda_utils.cpp 56",
        "device_oom_async",
        "cuda",
    ),
    said(
        "CatBoostError: catboost/cuda/cuda_lib/cuda_base.h:281: CUDA error 2: out of "
        "memory",
        "device_oom_async",
        "cuda",
    ),
    said("Error: cannot allocate vector of size 3.7 Gb", "host_alloc", requested=3.7 * GIB),
    said(
        "PHP Fatal error: Allowed memory size of 134217728 bytes exhausted (tried to "
        "allocate 20480 bytes)",
        "host_alloc",
        requested=20480,
        limit=134217728,
    ),
    said(
        "ERROR 5 (HY000): Out of memory (Needed 128917500 bytes)",
        "oom",
        requested=128917500,
    ),
    said(
        "ERROR: out of memory\nDETAIL: Failed on request of size 1073741824 in memory "
        'context "ExecutorState".',
        "oom",
        requested=1073741824,
    ),
    said(
        "cc1plus: out of memory allocating 65536 bytes after a total of 1073741824 bytes",
        "oom",
        requested=65536,
    ),
    said("virtual memory exhausted: Cannot allocate memory", "host_alloc", "cpu"),
    said("Memory limit of 512 MiB exceeded with 530 MiB used.", "killed", "host"),
    said(
        "PBS: job killed: mem 33554432kb exceeded limit 31457280kb", "killed", "host"
    ),
    said(
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "killed",
        "host",
    ),
    said(
        "pandas.errors.ParserError: Error tokenizing data. C error: out of memory",
        "host_alloc",
        "cpu",
    ),
    said("java.lang.OutOfMemoryError: Metaspace", "host_alloc", "cpu"),
    said(
        "System.OutOfMemoryException: Insufficient memory to continue the execution of "
        "the program.",
        "oom",
    ),
    said(
        "vk::OutOfDeviceMemoryError: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "device_oom_async",
        "vulkan",
    ),
    said(
        "RuntimeError: Error in allocMemory at StandardGpuResources.cpp:452: Error: 'err "
        "== cudaSuccess' failed: StandardGpuResources: alloc fail type "
        "TemporaryMemoryBuffer dev 0 space Device stream 0x55 size 1610612736 bytes "
        "(cudaMalloc error out of memory [2])",
        "device_oom",
        "cuda",
        requested=1610612736,
    ),
    said("[Open3D Error] CUDA runtime error: out of memory", "device_oom_async", "cuda"),
    said(
        "Warp CUDA error 2: out of memory (in function wp_alloc_device_async, warp.cu:55)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "[cuda_driver.h:operator()@87] CUDA Error CUDA_ERROR_OUT_OF_MEMORY: out of "
        "memory while calling malloc_async_impl (cuMemAllocAsync)",
        "device_oom_async",
        "cuda",
    ),
    said(
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, "
        "unhandled cuda error, NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA "
        "function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "comm_oom",
        "cuda",
    ),
    said(
        "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
        "device_oom",
        requested=17179869184,
    ),
    said("c++: fatal error: Killed signal terminated program cc1plus", "killed", "host",
         is_oom="maybe"),
    said("MemoryError: Unable to allocate internal buffer.", "host_alloc", "cpu"),
]
"""Gathered after the halves had been compared, and read once before anything changed."""

LATER_LOOK_ALIKES = [
    "Task timed out after 3.00 seconds",
    "error: linker command failed with exit code 1",
    "ValueError: not enough values to unpack (expected 3, got 2)",
    "Not enough disk space available: 3.2 GiB needed, 1.1 GiB free",
    "*** buffer overflow detected ***: terminated",
    "Failed to allocate IP address from pool",
    "413 Request Entity Too Large: upload limit exceeded",
    "RuntimeError: CUDA error: the launch timed out and was terminated",
    "cuDNN error: CUDNN_STATUS_BAD_PARAM",
    "Job exceeded the wall time limit of 04:00:00 and was killed",
    "OSError: cannot write to memory map opened read-only",
    "TypeError: memoryview: a bytes-like object is required, not 'str'",
    "Not enough data to train on: 12 samples",
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up "
    "environment",
    "fatal error: stack overflow",
    "thread 'main' has overflowed its stack",
    "The scheduler could not allocate the requested nodes in time",
    "Exceeded maximum number of retries while loading memory snapshot",
    "gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    "allocated 4.1 GiB of pinned memory for prefetching",
]
