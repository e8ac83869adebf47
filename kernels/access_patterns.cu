// One warp loads or stores by patterns that are read from memory, for counting what the hardware makes of them.
//
// Launch: one block of 32 threads; dynamic shared memory of `bytes` bytes, a multiple of 16.
// places    byte offset of each lane, 32 a pattern; negative: the lane is switched off. A multiple of the pattern's width
// widths    bytes that a lane moves, one a pattern: 1, 2, 4, 8 or 16
// spaces    0 global load, 1 global store, 2 shared load, 3 shared store, one a pattern
// repeats   how many times each pattern is executed, one a pattern; with 0 everywhere what is left is the launch's own traffic
// step      added to the offset at each repetition; pass 0: the compiler must not know
// memory    global memory that the patterns touch, aligned to 512 bytes; shared memory starts as a copy of its first `bytes` bytes
// sums      a word a lane: the sum of all words loaded (narrow loads as unsigned numbers)
// A store writes the lane's number + 1 into each of its words.

template <int WIDTH> struct Moved;

#define MOVED(WIDTH, LOAD, STORE)                                                                                                             \
    template <> struct Moved<WIDTH> {                                                                                                         \
        static __device__ __forceinline__ unsigned int global_load(unsigned long long at) { LOAD("global", "l") }                             \
        static __device__ __forceinline__ unsigned int shared_load(unsigned int at) { LOAD("shared", "r") }                                   \
        static __device__ __forceinline__ void global_store(unsigned long long at, unsigned int value) { STORE("global", "l") }               \
        static __device__ __forceinline__ void shared_store(unsigned int at, unsigned int value) { STORE("shared", "r") }                     \
    };

#define LOAD1(SPACE, KIND)                                                                                                                    \
    unsigned int a;                                                                                                                           \
    asm volatile("ld." SPACE ".u8 %0, [%1];" : "=r"(a) : KIND(at) : "memory");                                                                \
    return a;
#define LOAD2(SPACE, KIND)                                                                                                                    \
    unsigned short a;                                                                                                                         \
    asm volatile("ld." SPACE ".u16 %0, [%1];" : "=h"(a) : KIND(at) : "memory");                                                               \
    return a;
#define LOAD4(SPACE, KIND)                                                                                                                    \
    unsigned int a;                                                                                                                           \
    asm volatile("ld." SPACE ".b32 %0, [%1];" : "=r"(a) : KIND(at) : "memory");                                                               \
    return a;
#define LOAD8(SPACE, KIND)                                                                                                                    \
    unsigned int a, b;                                                                                                                        \
    asm volatile("ld." SPACE ".v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : KIND(at) : "memory");                                             \
    return a + b;
#define LOAD16(SPACE, KIND)                                                                                                                   \
    unsigned int a, b, c, d;                                                                                                                  \
    asm volatile("ld." SPACE ".v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : KIND(at) : "memory");                   \
    return a + b + c + d;
#define STORE1(SPACE, KIND) asm volatile("st." SPACE ".u8 [%0], %1;" ::KIND(at), "r"(value) : "memory");
#define STORE2(SPACE, KIND) asm volatile("st." SPACE ".u16 [%0], %1;" ::KIND(at), "h"((unsigned short)value) : "memory");
#define STORE4(SPACE, KIND) asm volatile("st." SPACE ".b32 [%0], %1;" ::KIND(at), "r"(value) : "memory");
#define STORE8(SPACE, KIND) asm volatile("st." SPACE ".v2.b32 [%0], {%1, %1};" ::KIND(at), "r"(value) : "memory");
#define STORE16(SPACE, KIND) asm volatile("st." SPACE ".v4.b32 [%0], {%1, %1, %1, %1};" ::KIND(at), "r"(value) : "memory");

MOVED(1, LOAD1, STORE1)
MOVED(2, LOAD2, STORE2)
MOVED(4, LOAD4, STORE4)
MOVED(8, LOAD8, STORE8)
MOVED(16, LOAD16, STORE16)

template <int WIDTH> __device__ unsigned int executed(int space, unsigned long long global, unsigned int shared, int repeats, int step, unsigned int value) {
    unsigned int all = 0;
    if (space == 0) {
        for (int i = 0; i < repeats; ++i, global += step) all += Moved<WIDTH>::global_load(global);
    } else if (space == 1) {
        for (int i = 0; i < repeats; ++i, global += step) Moved<WIDTH>::global_store(global, value);
    } else if (space == 2) {
        for (int i = 0; i < repeats; ++i, shared += step) all += Moved<WIDTH>::shared_load(shared);
    } else {
        for (int i = 0; i < repeats; ++i, shared += step) Moved<WIDTH>::shared_store(shared, value);
    }
    return all;
}

extern "C" __global__ void access_patterns(
    const int* __restrict__ places, const int* __restrict__ widths, const int* __restrict__ spaces, const int* __restrict__ repeats, int patterns, int step,
    unsigned char* memory, int bytes, unsigned int* __restrict__ sums) {
    extern __shared__ __align__(128) unsigned int inside[];
    for (int i = threadIdx.x; i < bytes / 4; i += 32) inside[i] = ((const unsigned int*)memory)[i];
    __syncwarp();
    unsigned int all = 0;
    for (int p = 0; p < patterns; ++p) {
        int place = places[p * 32 + threadIdx.x];
        if (place >= 0) {
            unsigned long long global = (unsigned long long)__cvta_generic_to_global(memory) + place;
            unsigned int shared = (unsigned int)__cvta_generic_to_shared(inside) + place;
            unsigned int value = threadIdx.x + 1;
            switch (widths[p]) {
                case 1: all += executed<1>(spaces[p], global, shared, repeats[p], step, value); break;
                case 2: all += executed<2>(spaces[p], global, shared, repeats[p], step, value); break;
                case 4: all += executed<4>(spaces[p], global, shared, repeats[p], step, value); break;
                case 8: all += executed<8>(spaces[p], global, shared, repeats[p], step, value); break;
                default: all += executed<16>(spaces[p], global, shared, repeats[p], step, value); break;
            }
        }
        __syncwarp();
    }
    sums[threadIdx.x] = all;
}
