// How long one load takes: a pointer chase, where each load's address is what the load before gave.
//
// Launch: one block of one thread (line_latency too); no shared memory.
// Macro: CACHED 1: loads may stay in the L1 (ld.global.ca); 0: from the L2 on (ld.global.cg) (1).
// next     word i holds the index of the word to read after it; a cycle. Words are 4 bytes, one used a line of 128.
// hops     loads, a multiple of 16
// out      chase: cycles, nanoseconds (global timer), last index. line_latency: cycles of `hops` loads, one a line.

#ifndef CACHED
#define CACHED 1
#endif

__device__ __forceinline__ unsigned int follow(const unsigned int* next, unsigned int at) {
    unsigned int value;
#if CACHED
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(value) : "l"(next + at) : "memory");
#else
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(next + at) : "memory");
#endif
    return value;
}

__device__ __forceinline__ long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ unsigned int walk(const unsigned int* next, unsigned int at, int hops) {
    for (int i = 0; i < hops; i += 16) {
#pragma unroll
        for (int k = 0; k < 16; ++k) at = follow(next, at);
    }
    return at;
}

// warm hops are not timed
extern "C" __global__ void chase(const unsigned int* next, unsigned int start, int warm, int hops, long long* out) {
    unsigned int at = walk(next, start, warm);
    long long ns = nanoseconds();
    long long begin = clock64();
    at = walk(next, at, hops);
    long long end = clock64();
    out[0] = end - begin;
    out[1] = nanoseconds() - ns;
    out[2] = at;
}

// each line points to itself: the time of one place of the cache, near or far
extern "C" __global__ void line_latency(const unsigned int* next, const unsigned int* lines, int count, int hops, long long* out) {
    for (int i = 0; i < count; ++i) {
        unsigned int at = walk(next, lines[i], 16);
        long long begin = clock64();
        at = walk(next, at, hops);
        long long end = clock64();
        out[i] = at == lines[i] ? end - begin : -1;
    }
}
