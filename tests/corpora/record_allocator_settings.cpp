// Says what the readers of a torch for CUDA make of allocator settings, without a GPU.
//
// Settings come on stdin, each ended by a NUL; for each it writes "+" (accepted),
// "-" (the first use raises) or "!" (the process ends while torch's library is loaded).
// TORCH and CUDART are an unpacked wheel of torch and one of nvidia-cuda-runtime:
//
//   g++ -std=c++20 -rdynamic -ITORCH/include -ICUDART/include record_allocator_settings.cpp
//       -LTORCH/lib -lc10_cuda -lc10 CUDART/lib/libcudart.so.* -Wl,-rpath,TORCH/lib
//
// with -D_GLIBCXX_USE_CXX11_ABI=0 for torch 2.5 and 2.6, and -DHAS_TOKENIZER from 2.10 on,
// where a reader for all devices goes over the setting too.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// backend:cudaMallocAsync asks for the version of the driver: claim one of CUDA 13.
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return cudaSuccess;
}

static char read_environment() {
  try {
#ifdef HAS_TOKENIZER
    c10::CachingAllocator::AcceleratorAllocatorConfig::instance();
#endif
    c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::instance();
    return '+';
  } catch (const std::exception&) {
    return '-';
  }
}

static char ask_new_process(const std::string& setting) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(1);
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 1);
    freopen("/dev/null", "w", stderr);
    setenv("PYTORCH_CUDA_ALLOC_CONF", setting.c_str(), 1);
    // A new process, since the backend is read while the library is loaded.
    execl("/proc/self/exe", "reader", "one", nullptr);
    _exit(1);
  }
  close(ends[1]);
  char answer = '!';
  if (read(ends[0], &answer, 1) != 1) answer = '!';
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return answer;
}

int main(int count, char**) {
  if (count > 1) {
    std::cout << read_environment() << std::flush;
    _exit(0);
  }
  std::string setting;
  while (std::getline(std::cin, setting, '\0')) std::cout << ask_new_process(setting);
}
