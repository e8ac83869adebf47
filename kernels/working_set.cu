// How fast a set of bytes is read again and again: from the L2 as long as it fits there.
//
// Launch: any number of blocks (a few a multiprocessor) of any number of threads; no shared memory.
// in holds n elements of 16 bytes; each of `rounds` rounds reads all of them once, a block other parts each time, past the L1 (ld.global.cg).
// sums has a word a thread: the sum (modulo 2^32) of what it read.

typedef unsigned long long Count;

extern "C" __global__ void reread(const uint4* __restrict__ in, unsigned int* __restrict__ sums, Count n, int rounds) {
    Count threads = (Count)gridDim.x * blockDim.x;
    unsigned int all = 0;
    for (int round = 0; round < rounds; ++round) {
        Count block = (blockIdx.x + (Count)round * 37) % gridDim.x;  // another multiprocessor's part, so that no L1 could help
#pragma unroll 4
        for (Count i = block * blockDim.x + threadIdx.x; i < n; i += threads) {
            uint4 v = __ldcg(in + i);
            all += v.x + v.y + v.z + v.w;
        }
    }
    sums[(Count)blockIdx.x * blockDim.x + threadIdx.x] = all;
}
