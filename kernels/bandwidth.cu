// How fast memory can be read and written: read, write, copy, scale, add, triad.
//
// Launch: any number of blocks of any number of threads, one dimension; no shared memory. A block takes tiles of UNROLL * blockDim.x elements.
//   One-shot: as many blocks as tiles. Persistent: a few blocks a multiprocessor, which take every gridDim.x-th tile.
// Macros: WIDTH    bytes of an element: 4, 8 or 16 (16)
//         UNROLL   elements that a thread has in flight at once (4)
//         STREAM   1: loads and stores marked as used once (ld.global.cs, st.global.cs) (0)
// Arrays hold n elements of WIDTH bytes, aligned to WIDTH, not overlapping.
// read keeps its result, the sum (modulo 2^32) of the words that a thread read, where keep is set or it happens to equal needle: sums has a word a thread of the launch.
// scale, add and triad compute in float, each operation rounded by itself (no fused multiply-add), so that NumPy gives the same bits.

#ifndef WIDTH
#define WIDTH 16
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef STREAM
#define STREAM 0
#endif

#if WIDTH == 16
typedef uint4 Bits;
typedef float4 Real;
#elif WIDTH == 8
typedef uint2 Bits;
typedef float2 Real;
#else
typedef unsigned int Bits;
typedef float Real;
#endif

typedef unsigned long long Count;

template <typename T> __device__ __forceinline__ T take(const T* at) {
#if STREAM
    return __ldcs(at);
#else
    return __ldg(at);
#endif
}

template <typename T> __device__ __forceinline__ void put(T* at, T value) {
#if STREAM
    __stcs(at, value);
#else
    *at = value;
#endif
}

__device__ __forceinline__ unsigned int folded(unsigned int a) { return a; }
__device__ __forceinline__ unsigned int folded(uint2 a) { return a.x + a.y; }
__device__ __forceinline__ unsigned int folded(uint4 a) { return a.x + a.y + a.z + a.w; }

__device__ __forceinline__ float scaled(float s, float a) { return __fmul_rn(s, a); }
__device__ __forceinline__ float2 scaled(float s, float2 a) { return make_float2(scaled(s, a.x), scaled(s, a.y)); }
__device__ __forceinline__ float4 scaled(float s, float4 a) { return make_float4(scaled(s, a.x), scaled(s, a.y), scaled(s, a.z), scaled(s, a.w)); }

__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float2 sum(float2 a, float2 b) { return make_float2(sum(a.x, b.x), sum(a.y, b.y)); }
__device__ __forceinline__ float4 sum(float4 a, float4 b) { return make_float4(sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w)); }

// the word that write puts at a place: never the same twice in 16 GiB, and cheap
__device__ __forceinline__ unsigned int mixed(Count word, unsigned int seed) { return (unsigned int)word * 2654435761u + seed; }
__device__ __forceinline__ void made(unsigned int& v, Count i, unsigned int seed) { v = mixed(i, seed); }
__device__ __forceinline__ void made(uint2& v, Count i, unsigned int seed) { v = make_uint2(mixed(2 * i, seed), mixed(2 * i + 1, seed)); }
__device__ __forceinline__ void made(uint4& v, Count i, unsigned int seed) {
    v = make_uint4(mixed(4 * i, seed), mixed(4 * i + 1, seed), mixed(4 * i + 2, seed), mixed(4 * i + 3, seed));
}

// work(first) for each of a thread's whole tiles, rest(i) for the elements of the last, incomplete one
template <typename Work, typename Rest> __device__ __forceinline__ void tiles(Count n, Work work, Rest rest) {
    const Count tile = (Count)blockDim.x * UNROLL;
    for (Count start = blockIdx.x * tile; start < n; start += gridDim.x * tile) {
        if (start + tile <= n) {
            work(start + threadIdx.x);
        } else {
            for (Count i = start + threadIdx.x; i < n; i += blockDim.x) rest(i);
        }
    }
}

extern "C" __global__ void read(const Bits* __restrict__ in, unsigned int* __restrict__ sums, Count n, unsigned int needle, int keep) {
    unsigned int all = 0;
    tiles(
        n,
        [&](Count first) {
            Bits v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) v[k] = take(in + first + (Count)k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) all += folded(v[k]);
        },
        [&](Count i) { all += folded(take(in + i)); });
    if (keep || all == needle) sums[(Count)blockIdx.x * blockDim.x + threadIdx.x] = all;
}

extern "C" __global__ void write(Bits* __restrict__ out, Count n, unsigned int seed) {
    auto one = [&](Count i) {
        Bits v;
        made(v, i, seed);
        put(out + i, v);
    };
    tiles(
        n,
        [&](Count first) {
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) one(first + (Count)k * blockDim.x);
        },
        one);
}

extern "C" __global__ void copy(const Bits* __restrict__ in, Bits* __restrict__ out, Count n) {
    tiles(
        n,
        [&](Count first) {
            Bits v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) v[k] = take(in + first + (Count)k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) put(out + first + (Count)k * blockDim.x, v[k]);
        },
        [&](Count i) { put(out + i, take(in + i)); });
}

extern "C" __global__ void scale(const Real* __restrict__ in, Real* __restrict__ out, Count n, float s) {
    tiles(
        n,
        [&](Count first) {
            Real v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) v[k] = take(in + first + (Count)k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) put(out + first + (Count)k * blockDim.x, scaled(s, v[k]));
        },
        [&](Count i) { put(out + i, scaled(s, take(in + i))); });
}

// s is not used by add: one body for both, s * b is b where s is 1
template <bool SCALED> __device__ __forceinline__ void two(const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, Count n, float s) {
    tiles(
        n,
        [&](Count first) {
            Real u[UNROLL], v[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                u[k] = take(a + first + (Count)k * blockDim.x);
                v[k] = take(b + first + (Count)k * blockDim.x);
            }
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) put(out + first + (Count)k * blockDim.x, sum(u[k], SCALED ? scaled(s, v[k]) : v[k]));
        },
        [&](Count i) { put(out + i, sum(take(a + i), SCALED ? scaled(s, take(b + i)) : take(b + i))); });
}

extern "C" __global__ void add(const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, Count n) { two<false>(a, b, out, n, 1.0f); }

extern "C" __global__ void triad(const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, Count n, float s) {
    two<true>(a, b, out, n, s);
}
