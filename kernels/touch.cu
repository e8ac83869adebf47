// Adds a number to every word: each page is read and written once. For unified memory and for warming up.
//
// Launch: any number of blocks of any number of threads, one dimension; no shared memory.

extern "C" __global__ void touch(unsigned int* data, unsigned long long n, unsigned int more) {
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (unsigned long long)gridDim.x * blockDim.x) data[i] += more;
}
