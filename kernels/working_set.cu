// How fast a set of bytes is read again and again: from the L2 as long as it fits there.
//
// Launch: any number of blocks (a few a multiprocessor) of any number of threads; no shared memory.
// in holds n elements of 16 bytes, which are read `rounds` times, past the L1 (ld.global.cg); all threads are busy also where n is small.
// sums has a word a thread: the sum (modulo 2^32) of what it read.

typedef unsigned long long Count;

extern "C" __global__ void reread(const uint4* __restrict__ in, unsigned int* __restrict__ sums, Count n, int rounds) {
    const Count threads = (Count)gridDim.x * blockDim.x, thread = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    const Count all = n * rounds, step = threads % n;
    Count at = thread % n;
    unsigned int sum = 0;
#pragma unroll 8
    for (Count i = thread; i < all; i += threads) {
        uint4 v = __ldcg(in + at);
        sum += v.x + v.y + v.z + v.w;
        at += step;
        if (at >= n) at -= n;
    }
    sums[thread] = sum;
}
