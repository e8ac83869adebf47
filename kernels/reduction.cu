// The sum of each block's values in two ways: with strides that double, which run into bank conflicts, and with halves, which don't.
//
// Launch: any number of blocks of blockDim.x threads, a power of two from 64 to 1024; dynamic shared memory of 4 * blockDim.x bytes.
// in has rounds * gridDim.x * blockDim.x words; sums gets one word a block. Sums are of unsigned words, exact modulo 2^32.
// rounds: how many times a block adds up its next blockDim.x values, so that shared memory, not the launch, is what is timed.

extern __shared__ unsigned int part[];

// thread t adds words 2 s t and 2 s t + s: the lanes of a warp lie 2 s words apart
extern "C" __global__ void reduce_strided(const unsigned int* __restrict__ in, unsigned int* __restrict__ sums, int rounds) {
    unsigned int total = 0;
    for (int round = 0; round < rounds; ++round) {
        part[threadIdx.x] = in[((long long)round * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x];
        __syncthreads();
        for (int s = 1; s < blockDim.x; s *= 2) {
            int at = 2 * s * threadIdx.x;
            if (at < blockDim.x) part[at] += part[at + s];
            __syncthreads();
        }
        total += part[0];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// thread t adds words t and t + s: the lanes of a warp lie side by side
extern "C" __global__ void reduce_halves(const unsigned int* __restrict__ in, unsigned int* __restrict__ sums, int rounds) {
    unsigned int total = 0;
    for (int round = 0; round < rounds; ++round) {
        part[threadIdx.x] = in[((long long)round * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x];
        __syncthreads();
        for (int s = blockDim.x / 2; s > 0; s /= 2) {
            if (threadIdx.x < s) part[threadIdx.x] += part[threadIdx.x + s];
            __syncthreads();
        }
        total += part[0];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
