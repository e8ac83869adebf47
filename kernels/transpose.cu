// A matrix transposed in four ways: naive, through a tile with conflicts, through a padded tile, through a swizzled tile.
//
// Launch: grid (n / 32, n / 32), block (32, 8). n is a multiple of 32; matrices of n x n floats, row by row, not overlapping.

#define TILE 32
#define ROWS 8

// reads rows, writes columns: each warp's store touches 32 sectors
extern "C" __global__ void transpose_naive(const float* __restrict__ in, float* __restrict__ out, int n) {
    int x = blockIdx.x * TILE + threadIdx.x;
    int y = blockIdx.y * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS) out[(long long)x * n + y + j] = in[(long long)(y + j) * n + x];
}

template <int PITCH, bool SWIZZLED> __device__ __forceinline__ void tiled(const float* __restrict__ in, float* __restrict__ out, int n) {
    __shared__ float tile[TILE][PITCH];
    int x = blockIdx.x * TILE + threadIdx.x;
    int y = blockIdx.y * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS) {
        int row = threadIdx.y + j;
        tile[row][SWIZZLED ? threadIdx.x ^ row : threadIdx.x] = in[(long long)(y + j) * n + x];
    }
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x;
    y = blockIdx.x * TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS) {
        int column = threadIdx.y + j;
        out[(long long)(y + j) * n + x] = tile[threadIdx.x][SWIZZLED ? column ^ threadIdx.x : column];
    }
}

// both sides of global memory side by side; the column of the tile lies in one bank
extern "C" __global__ void transpose_tiled(const float* __restrict__ in, float* __restrict__ out, int n) { tiled<TILE, false>(in, out, n); }

// one float more a row: the column lies in 32 banks
extern "C" __global__ void transpose_padded(const float* __restrict__ in, float* __restrict__ out, int n) { tiled<TILE + 1, false>(in, out, n); }

// column c of row r is kept at c ^ r: 32 banks, no memory lost
extern "C" __global__ void transpose_swizzled(const float* __restrict__ in, float* __restrict__ out, int n) { tiled<TILE, true>(in, out, n); }
