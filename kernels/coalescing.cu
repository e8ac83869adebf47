// What scattered reads cost: strides, offsets, structures of arrays against arrays of structures, gather.
//
// Launch: any number of blocks of any number of threads, one dimension; no shared memory. A block takes tiles of UNROLL * blockDim.x elements
//   (structures, structures_wide: threads take every (gridDim.x * blockDim.x)-th).
// Macro: UNROLL elements that a thread has in flight at once (8)
// Words are 4 bytes. A thread keeps the sum (modulo 2^32) of what it read where keep is set or it happens to equal needle; sums has a word a thread.

#ifndef UNROLL
#define UNROLL 8
#endif

typedef unsigned long long Count;

#define EACH(i, n) for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (Count)gridDim.x * blockDim.x)
#define KEEP(all)                                                                                                       \
    do {                                                                                                                \
        if (keep || (all) == needle) sums[(Count)blockIdx.x * blockDim.x + threadIdx.x] = (all);                        \
    } while (0)

// the sum of take(i) over a thread's elements
template <typename Take> __device__ __forceinline__ unsigned int summed(Count n, Take take) {
    const Count tile = (Count)blockDim.x * UNROLL;
    unsigned int all = 0;
    for (Count start = blockIdx.x * tile; start < n; start += gridDim.x * tile) {
        if (start + tile <= n) {
            unsigned int v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) v[k] = take(start + threadIdx.x + (Count)k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) all += v[k];
        } else {
            for (Count i = start + threadIdx.x; i < n; i += blockDim.x) all += take(i);
        }
    }
    return all;
}

// element i is word i * stride + offset; in has (n - 1) * stride + offset + 1 words
extern "C" __global__ void strided(const unsigned int* __restrict__ in, unsigned int* __restrict__ sums, Count n, Count stride, Count offset, unsigned int needle, int keep) {
    unsigned int all = summed(n, [&](Count i) { return __ldg(in + i * stride + offset); });
    KEEP(all);
}

// field f of structure i is word i * per_structure + f * per_field: (fields, 1) is an array of structures, (1, n) a structure of arrays
extern "C" __global__ void structures(
    const unsigned int* __restrict__ in, unsigned int* __restrict__ sums, Count n, int fields, Count per_structure, Count per_field, unsigned int needle, int keep) {
    unsigned int all = 0;
    EACH(i, n) {
#pragma unroll 4
        for (int f = 0; f < fields; ++f) all += __ldg(in + i * per_structure + f * per_field);
    }
    KEEP(all);
}

// the same structures of four words, each read at once with 16 bytes a lane; in is aligned to 16 bytes
extern "C" __global__ void structures_wide(const uint4* __restrict__ in, unsigned int* __restrict__ sums, Count n, unsigned int needle, int keep) {
    unsigned int all = 0;
#pragma unroll 4
    EACH(i, n) {
        uint4 v = __ldg(in + i);
        all += v.x + v.y + v.z + v.w;
    }
    KEEP(all);
}

// element i is word places[i]
extern "C" __global__ void gather(const unsigned int* __restrict__ in, const unsigned int* __restrict__ places, unsigned int* __restrict__ sums, Count n, unsigned int needle, int keep) {
    unsigned int all = summed(n, [&](Count i) { return __ldg(in + __ldg(places + i)); });
    KEEP(all);
}
