// Kernels that others publish, written again from their algorithm, to hold ours against. ELEMENT is float or double; arrays of n elements.
//
// Launch: ceil(n / block) blocks, as their programs do.
// public_read: gpu-benches (Dominik Ernst), gpu-stream/main.cu, read_kernel: a thread reads one element and keeps it where it is a rare value; without
//   the shared array there that lowers occupancy on purpose.
// public_copy, public_triad: BabelStream (University of Bristol), src/cuda/CUDAStream.cu: a loop over the grid, int index; one element a thread at this launch.

#ifndef ELEMENT
#define ELEMENT double
#endif

typedef ELEMENT T;

extern "C" __global__ void public_read(const T* __restrict__ b, T* __restrict__ a, int n, int secretly_false) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i >= n) return;
    T value = b[i];
    if (secretly_false || value == (T)123.0) a[i] = value;
}

extern "C" __global__ void public_copy(const T* a, T* c, int n) {
    for (int i = threadIdx.x + blockDim.x * blockIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = a[i];
}

extern "C" __global__ void public_triad(T* a, const T* b, const T* c, int n) {
    const T scalar = (T)0.4;
    for (int i = threadIdx.x + blockDim.x * blockIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] = b[i] + scalar * c[i];
}
