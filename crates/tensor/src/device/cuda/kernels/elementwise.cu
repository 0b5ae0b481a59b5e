// Kernels that treat every element by itself, and sums over the leading dims. All are bound by memory: accesses of 16 bytes
// where the addresses and lengths allow it, two or more of them in flight.

__device__ __forceinline__ bool is_aligned(const void* p) { return ((u64)p & 15) == 0; }

// Division of numbers that are not negative, by 32-bit instructions where they fit.
__device__ __forceinline__ i64 divide(i64 a, i64 b) {
    return ((a | b) >> 32) == 0 ? (i64)((u32)a / (u32)b) : a / b;
}

template <> struct Pack<float, 8> {
    float v[8];
    __device__ __forceinline__ void load(const float* p) {
        Pack<float, 4> low, high;
        low.load(p), high.load(p + 4);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = low.v[i], v[i + 4] = high.v[i];
    }
    __device__ __forceinline__ void store(float* p) const {
        Pack<float, 4> low, high;
#pragma unroll
        for (int i = 0; i < 4; i++) low.v[i] = v[i], high.v[i] = v[i + 4];
        low.store(p), high.store(p + 4);
    }
};

// y = f(x); y may be x.
template <int W, typename X, typename Y, typename F>
__device__ __forceinline__ void map_packs(const X* x, Y* y, i64 packs, F f) {
    i64 stride = all_threads();
#pragma unroll 1
    for (i64 i = first_index(); i < packs; i += 2 * stride) {
        i64 j = i + stride;
        Pack<X, W> a, b;
        a.load(x + i * W);
        if (j < packs) b.load(x + j * W);
        Pack<Y, W> to;
#pragma unroll
        for (int k = 0; k < W; k++) to.v[k] = f(a.v[k]);
        to.store(y + i * W);
        if (j < packs) {
#pragma unroll
            for (int k = 0; k < W; k++) to.v[k] = f(b.v[k]);
            to.store(y + j * W);
        }
    }
}

template <typename X, typename Y, typename F> __device__ __forceinline__ void map_each(const X* x, Y* y, i64 n, F f) {
    const int W = Wide<X>::width > Wide<Y>::width ? Wide<X>::width : Wide<Y>::width;
    i64 whole = is_aligned(x) && is_aligned(y) ? n / W * W : 0;
    map_packs<W>(x, y, whole / W, f);
    map_packs<1>(x + whole, y + whole, n - whole, f);
}

// y = f(a, b), where b repeats with this period, a multiple of W; y may be a.
template <int W, typename T, typename F>
__device__ __forceinline__ void map2_packs(const T* a, const T* b, T* y, i64 packs, i64 period, F f) {
    i64 stride = all_threads(), columns = divide(period, W);
    i64 column = first_index() % columns, step = stride % columns;
#pragma unroll 1
    for (i64 i = first_index(); i < packs; i += 2 * stride) {
        i64 j = i + stride, next = column + step;
        if (next >= columns) next -= columns;
        Pack<T, W> a0, a1, b0, b1;
        a0.load(a + i * W), b0.load(b + column * W);
        if (j < packs) a1.load(a + j * W), b1.load(b + next * W);
        Pack<T, W> to;
#pragma unroll
        for (int k = 0; k < W; k++) to.v[k] = f(a0.v[k], b0.v[k]);
        to.store(y + i * W);
        if (j < packs) {
#pragma unroll
            for (int k = 0; k < W; k++) to.v[k] = f(a1.v[k], b1.v[k]);
            to.store(y + j * W);
        }
        column = next + step;
        if (column >= columns) column -= columns;
    }
}

template <typename T, typename F>
__device__ __forceinline__ void map2_each(const T* a, const T* b, T* y, i64 n, i64 period, F f) {
    const int W = Wide<T>::width;
    bool wide = is_aligned(a) && is_aligned(b) && is_aligned(y);
    if (period == n) {
        i64 whole = wide ? n / W * W : 0;
        if (whole > 0) map2_packs<W>(a, b, y, whole / W, whole, f);
        if (whole < n) map2_packs<1>(a + whole, b + whole, y + whole, n - whole, n - whole, f);
    } else if (wide && period % W == 0) {
        map2_packs<W>(a, b, y, n / W, period, f);
    } else {
        map2_packs<1>(a, b, y, n, period, f);
    }
}

// Functions of one number, and their gradients from dy and what was saved: the input of the GELUs, else the output.

struct Relu {
    __device__ __forceinline__ float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
    __device__ __forceinline__ float operator()(float dy, float y) const { return y <= 0.0f ? 0.0f : dy; }
};

struct Relu6 {
    __device__ __forceinline__ float operator()(float x) const { return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; }
    __device__ __forceinline__ float operator()(float dy, float y) const { return y <= 0.0f || y >= 6.0f ? 0.0f : dy; }
};

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Sigmoid {
    __device__ __forceinline__ float operator()(float x) const { return sigmoid_of(x); }
    __device__ __forceinline__ float operator()(float dy, float y) const { return dy * y * (1.0f - y); }
};

struct Tanh {
    __device__ __forceinline__ float operator()(float x) const { return tanhf(x); }
    __device__ __forceinline__ float operator()(float dy, float y) const { return dy * (1.0f - y * y); }
};

// Beyond 13 from 0 both GELUs are x or nothing, in f32; the exponentials and powers are kept from there.
__device__ __forceinline__ float not_far_below(float x) { return x < -13.0f ? -13.0f : x; }
__device__ __forceinline__ float not_far(float x) { return x > 13.0f ? 13.0f : not_far_below(x); }

struct Gelu {
    static __device__ __forceinline__ float share(float x) { return 0.5f * erfcf(-0.70710678f * x); }
    __device__ __forceinline__ float operator()(float x) const {
        x = not_far_below(x);
        return x * share(x);
    }
    __device__ __forceinline__ float operator()(float dy, float x) const {
        x = not_far(x);
        return dy * (share(x) + x * expf(-0.5f * x * x) * 0.3989423f);
    }
};

// x·σ(2u) with u = √(2/π)·(x + 0.044715·x³).
struct GeluTanh {
    __device__ __forceinline__ float operator()(float x) const {
        x = not_far_below(x);
        return x * sigmoid_of(1.595769f * x * (1.0f + 0.044715f * x * x));
    }
    __device__ __forceinline__ float operator()(float dy, float x) const {
        x = not_far(x);
        float square = x * x, gate = sigmoid_of(1.595769f * x * (1.0f + 0.044715f * square));
        return dy * (gate + x * gate * (1.0f - gate) * 1.595769f * (1.0f + 0.134145f * square));
    }
};

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

struct Times {
    __device__ __forceinline__ float operator()(float a, float b) const { return a * b; }
};

struct ScaleBy {
    float factor;
    __device__ __forceinline__ float operator()(float x) const { return factor * x; }
};

struct Same {
    __device__ __forceinline__ float operator()(float x) const { return x; }
};

#define UNARY(name, F, type, T)                                                                                                \
    KERNEL unary_##name##_##type(const T* x, T* y, i64 n) { map_each(x, y, n, F()); }                                          \
    KERNEL unary_grad_##name##_##type(const T* dy, const T* saved, T* dx, i64 n) { map2_each(dy, saved, dx, n, n, F()); }

#define ELEMENTWISE(type, T)                                                                                                   \
    UNARY(relu, Relu, type, T)                                                                                                 \
    UNARY(relu6, Relu6, type, T)                                                                                               \
    UNARY(gelu, Gelu, type, T)                                                                                                 \
    UNARY(gelu_tanh, GeluTanh, type, T)                                                                                        \
    UNARY(sigmoid, Sigmoid, type, T)                                                                                           \
    UNARY(tanh, Tanh, type, T)                                                                                                 \
    KERNEL add_##type(const T* a, const T* b, T* y, i64 n, i64 period) { map2_each(a, b, y, n, period, Sum()); }               \
    KERNEL mul_##type(const T* a, const T* b, T* y, i64 n, i64 period) { map2_each(a, b, y, n, period, Times()); }             \
    KERNEL scale_##type(const T* x, T* y, i64 n, float factor) { map_each(x, y, n, ScaleBy{factor}); }

ELEMENTWISE(f32, float)
ELEMENTWISE(bf16, bf16)

KERNEL cast_f32_bf16(const float* x, bf16* y, i64 n) { map_each(x, y, n, Same()); }
KERNEL cast_bf16_f32(const bf16* x, float* y, i64 n) { map_each(x, y, n, Same()); }

// Dropout: the same hash of key and index as on the CPU, so the same elements fall out on every device.

__device__ __forceinline__ u64 mix(u64 word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

__device__ __forceinline__ u64 next_key(u64 state, u64 word) {
    const u64 WEYL = 0x9E3779B97F4A7C15ull;
    return mix((state + WEYL) ^ mix(word + WEYL));
}

__device__ __forceinline__ u32 finalise(u32 word) {
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

// Which elements are dropped; the tensor's first has the index `first`. The index's upper half goes into the key.
struct DropMask {
    u64 key, first;
    u32 threshold;
    float factor;
};

__device__ __forceinline__ float dropped(float x, u32 index, u64 key, const DropMask& mask) {
    u32 hash = finalise(finalise(index ^ (u32)key) + (u32)(key >> 32));
    return hash < mask.threshold ? 0.0f : x * mask.factor;
}

// The elements from `begin` on. Of a pack that crosses a multiple of 2³², each element has a key of its own.
template <int W, typename T>
__device__ __forceinline__ void drop_packs(const T* x, T* y, i64 begin, i64 n, const DropMask& mask) {
    u64 upper = ~0ull, of_upper = 0;
#pragma unroll 1
    for (i64 i = begin + first_index() * W; i < n; i += all_threads() * W) {
        Pack<T, W> pack;
        pack.load(x + i);
        u64 index = mask.first + (u64)i;
        if (index >> 32 != upper) {
            upper = index >> 32;
            of_upper = mix(mask.key ^ mix(upper));
        }
        if ((u32)index <= 0xFFFFFFFFu - (W - 1)) {
#pragma unroll
            for (int k = 0; k < W; k++) pack.v[k] = dropped(pack.v[k], (u32)index + k, of_upper, mask);
        } else {
#pragma unroll
            for (int k = 0; k < W; k++)
                pack.v[k] = dropped(pack.v[k], (u32)index + k, mix(mask.key ^ mix((index + k) >> 32)), mask);
        }
        pack.store(y + i);
    }
}

// `pass` holds seed, step, the number of the first sample and how many samples there are, as `Pass` in execute.rs.
template <typename T>
__device__ __forceinline__ void drop_each(const T* x, T* y, i64 n, const u64* pass, u64 salt, u32 threshold, float factor) {
    const int W = Wide<T>::width;
    u64 key = next_key(next_key(next_key(0, pass[0]), pass[1]), salt), samples = pass[3] ? pass[3] : 1;
    DropMask mask = {key, pass[2] * ((u64)n / samples), threshold, factor};
    i64 whole = is_aligned(x) && is_aligned(y) ? n / W * W : 0;
    drop_packs<W>(x, y, 0, whole, mask);
    drop_packs<1>(x, y, whole, n, mask);
}

#define DROPOUT(type, T)                                                                                                       \
    KERNEL dropout_##type(const T* x, T* y, i64 n, const u64* pass, i64 salt, int threshold, float factor) {                   \
        drop_each(x, y, n, pass, (u64)salt, (u32)threshold, factor);                                                           \
    }
DROPOUT(f32, float)
DROPOUT(bf16, bf16)

// Sums over rows, column by column, in two stages that always add in the same order. A block of 256 threads stands `across`
// packs of columns wide over a chunk of the rows; gridDim.y is the number of chunks. Each thread adds runs of rows in f32 and
// the runs in f64. With one chunk the sums are the results, else they go to `partial`, [sum][chunk][column].

// Rows of a thread that are read together and added in f32.
#define RUN_OF_ROWS 8

template <int W, int SUMS, typename F>
__device__ __forceinline__ void column_sums(F values, i64 rows, i64 columns, int across, double* partial,
                                            float* const (&results)[SUMS]) {
    __shared__ double room[256 * W];
    int x = threadIdx.x % across, y = threadIdx.x / across, down = 256 / across;
    i64 chunk = divide(rows + gridDim.y - 1, gridDim.y), begin = blockIdx.y * chunk;
    i64 end = begin + chunk < rows ? begin + chunk : rows;
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile * across * W < columns; tile += gridDim.x) {
        i64 column = (tile * across + x) * W;
        double sums[SUMS][W] = {};
#pragma unroll 1
        for (i64 row = begin + y; row < end && column < columns; row += RUN_OF_ROWS * down) {
            float run[SUMS][W] = {};
            if (row + (RUN_OF_ROWS - 1) * down < end) {
#pragma unroll
                for (int k = 0; k < RUN_OF_ROWS; k++) values(row + k * down, column, run);
            } else {
#pragma unroll 1
                for (i64 at = row; at < end; at += down) values(at, column, run);
            }
#pragma unroll
            for (int s = 0; s < SUMS; s++)
#pragma unroll
                for (int i = 0; i < W; i++) sums[s][i] += (double)run[s][i];
        }
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < W; i++) room[threadIdx.x * W + i] = sums[s][i];
#pragma unroll 1
            for (int half = down / 2; half > 0; half /= 2) {
                __syncthreads();
                if (y < half)
#pragma unroll
                    for (int i = 0; i < W; i++) room[threadIdx.x * W + i] += room[(threadIdx.x + half * across) * W + i];
            }
            if (y == 0 && column < columns)
#pragma unroll
                for (int i = 0; i < W; i++) {
                    double sum = room[threadIdx.x * W + i];
                    if (gridDim.y == 1) results[s][column + i] = (float)sum;
                    else partial[((i64)s * gridDim.y + blockIdx.y) * columns + column + i] = sum;
                }
        }
    }
}

// The second stage of one sum: blocks of 32 columns by 8 parts of the chunks.
KERNEL sum_partials(const double* partial, i64 chunks, i64 columns, float* result) {
    __shared__ double room[256];
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
#pragma unroll 1
    for (i64 first = (i64)blockIdx.x * 32; first < columns; first += (i64)gridDim.x * 32) {
        i64 column = first + x;
        double sum = 0.0;
        if (column < columns)
#pragma unroll 4
            for (i64 chunk = y; chunk < chunks; chunk += 8) sum += partial[chunk * columns + column];
        __syncthreads();
        room[threadIdx.x] = sum;
#pragma unroll 1
        for (int half = 4; half > 0; half /= 2) {
            __syncthreads();
            if (y < half) room[threadIdx.x] += room[threadIdx.x + half * 32];
        }
        if (y == 0 && column < columns) result[column] = (float)room[x];
    }
}

template <typename T, int W> struct LoadRow {
    const T* x;
    i64 columns;
    __device__ __forceinline__ void operator()(i64 row, i64 column, float (&run)[1][W]) const {
        Pack<T, W> pack;
        pack.load(x + row * columns + column);
#pragma unroll
        for (int i = 0; i < W; i++) run[0][i] += pack.v[i];
    }
};

#define SUM_LEADING(type, T)                                                                                                   \
    KERNEL sum_leading_##type(const T* x, i64 rows, i64 columns, int across, double* partial, float* result) {                 \
        const int W = Wide<T>::width;                                                                                          \
        float* const results[1] = {result};                                                                                    \
        if (columns % W == 0 && is_aligned(x))                                                                                 \
            column_sums<W, 1>(LoadRow<T, W>{x, columns}, rows, columns, across, partial, results);                             \
        else                                                                                                                   \
            column_sums<1, 1>(LoadRow<T, 1>{x, columns}, rows, columns, across, partial, results);                             \
    }
SUM_LEADING(f32, float)
SUM_LEADING(bf16, bf16)
