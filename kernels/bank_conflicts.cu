// What bank conflicts cost: a loop of shared-memory loads in which every lane has its own place.
//
// Launch: any number of blocks (one a multiprocessor), blockDim.x a multiple of 32; dynamic shared memory of `bytes` bytes, a multiple of 16.
// Macro: WIDTH bytes of a load: 4, 8 or 16 (4).
// places   byte offset of each of the 32 lanes, a multiple of WIDTH; the same for all warps
// fill     what shared memory holds at the start, bytes / 4 words
// repeats  loads of a lane, a multiple of 8
// step     added to the offset from load to load; pass 0: the compiler must not know
// cycles   clock cycles that the loop took, one a warp of the launch
// sums     sum of all words that a thread read, one a thread of the launch, so that the loads are needed

#ifndef WIDTH
#define WIDTH 4
#endif

__device__ __forceinline__ unsigned int loaded(unsigned int at) {
#if WIDTH == 16
    unsigned int a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
    return a + b + c + d;
#elif WIDTH == 8
    unsigned int a, b;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
    return a + b;
#else
    unsigned int a;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(at));
    return a;
#endif
}

extern "C" __global__ void shared_loads(
    const int* __restrict__ places, const unsigned int* __restrict__ fill, int bytes, int repeats, int step, long long* __restrict__ cycles, unsigned int* __restrict__ sums) {
    extern __shared__ __align__(128) unsigned int memory[];
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) memory[i] = fill[i];
    unsigned int at = (unsigned int)__cvta_generic_to_shared(memory) + places[threadIdx.x % 32];
    unsigned int all[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    __syncthreads();
    long long begin = clock64();
    for (int i = 0; i < repeats; i += 8) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            all[k] += loaded(at);
            at += step;
        }
    }
    long long end = clock64();
    unsigned int sum = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += all[k];
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x % 32 == 0) cycles[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = end - begin;
}
