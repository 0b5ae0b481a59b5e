// What all kernels share: bf16 without headers, vectors of 16 bytes, sums over a block.

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void

// Begins a kernel that may be made ready while the one ahead of it ends: here it waits until that has. Which kernels begin like this: `EARLY`
// in compile.rs.
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

// Rounds to the nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return to_bf16(x); }

// The lower half is the first of the two.
__device__ __forceinline__ u32 to_bf16_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Bytes of two words by number, four in a selector's nibbles; with 8 added, eight times the byte's upper bit. (`__byte_perm` has no 8.)
template <int selector> __device__ __forceinline__ u32 select_bytes(u32 first, u32 second) {
    u32 word;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(first), "r"(second), "n"(selector));
    return word;
}

// 16 bytes in one store; a compiler that finds the words apart would write them apart.
__device__ __forceinline__ void store_words(void* to, const u32 (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// W elements of type T as floats; 16 bytes at a time where W says so. The address is aligned to what is read.
template <typename T, int W> struct Pack {
    float v[W];
    __device__ __forceinline__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
    }
    __device__ __forceinline__ void store(T* p) const {
#pragma unroll
        for (int i = 0; i < W; i++) p[i] = from_float<T>(v[i]);
    }
};
template <> struct Pack<float, 4> {
    float v[4];
    __device__ __forceinline__ void load(const float* p) {
        float4 raw = *reinterpret_cast<const float4*>(p);
        v[0] = raw.x, v[1] = raw.y, v[2] = raw.z, v[3] = raw.w;
    }
    __device__ __forceinline__ void store(float* p) const {
        *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    }
};
template <> struct Pack<bf16, 8> {
    float v[8];
    __device__ __forceinline__ void load(const bf16* p) {
        uint4 raw = *reinterpret_cast<const uint4*>(p);
        u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = __uint_as_float(words[i] << 16);
            v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    __device__ __forceinline__ void store(bf16* p) const {
        *reinterpret_cast<uint4*>(p) = make_uint4(to_bf16_pair(v[0], v[1]), to_bf16_pair(v[2], v[3]),
                                                  to_bf16_pair(v[4], v[5]), to_bf16_pair(v[6], v[7]));
    }
};

// W elements as they stand in memory, for what is read long before it is used: half the registers of a Pack in bf16.
template <typename T, int W> struct Raw {
    T v[W];
    __device__ __forceinline__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = p[i];
    }
    __device__ __forceinline__ float at(int i) const { return to_float(v[i]); }
};
template <> struct Raw<float, 4> {
    float4 v;
    __device__ __forceinline__ void load(const float* p) { v = *reinterpret_cast<const float4*>(p); }
    __device__ __forceinline__ float at(int i) const { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};
template <> struct Raw<bf16, 8> {
    uint4 v;
    __device__ __forceinline__ void load(const bf16* p) { v = *reinterpret_cast<const uint4*>(p); }
    __device__ __forceinline__ float at(int i) const {
        u32 word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
};

// The widest pack of a type.
template <typename T> struct Wide;
template <> struct Wide<float> { static const int width = 4; };
template <> struct Wide<bf16> { static const int width = 8; };

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// The sum over a block of whole warps, given to every thread. `room` holds 32 floats.
__device__ __forceinline__ float sum_of_block(float x, float* room) {
    x = sum_of_warp(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0.0f;
    return sum_of_warp(x);
}

__device__ __forceinline__ float max_of_block(float x, float* room) {
    x = max_of_warp(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : -__int_as_float(0x7f800000);
    return max_of_warp(x);
}

// The first index of this thread, and the number of threads of the grid.
__device__ __forceinline__ i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 all_threads() { return (i64)gridDim.x * blockDim.x; }

