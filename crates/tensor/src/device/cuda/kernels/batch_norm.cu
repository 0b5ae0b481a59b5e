// Batch normalisation over the rows of a [rows, channels] matrix: two reading passes forward (sums, then the result), two
// backward. Bound: bytes of those passes over memory bandwidth. The second of two passes goes the way back: what was read last is still in
// the cache.
//
// A block of 256 threads works on a tile of `tile` packs of W channels and a few times 256/tile rows at a time, then as far on as all blocks
// together reach: what is read at one time lies side by side. Blocks are numbered by rows (x) and by tile of channels (y). Sums go lane by
// lane, then block by block, in a fixed order: every block of the second pass adds up for itself what those of the first have found for its
// tile, which takes less time than a kernel between them. Only for large matrices, whose tiles are wide, such a kernel comes first.

#define NORM_THREADS 256
#define NORM_UNROLL 4
#define NORM_GRAD_UNROLL 2

struct NormPlace {
    i64 row, end, step;
    int lanes, channel;
    bool live;
};

template <int W, int U> __device__ __forceinline__ NormPlace norm_place(i64 rows, int channels, int tile) {
    NormPlace p;
    int column = threadIdx.x % tile;
    p.lanes = NORM_THREADS / tile;
    p.channel = (blockIdx.y * tile + column) * W;
    p.live = p.channel < channels;
    p.row = (i64)blockIdx.x * U * p.lanes + threadIdx.x / tile;
    p.step = (i64)gridDim.x * U * p.lanes;
    p.end = rows;
    return p;
}

// The last row at which a thread begins.
__device__ __forceinline__ i64 norm_last(const NormPlace& p) { return p.row < p.end ? p.row + (p.end - 1 - p.row) / p.step * p.step : p.row - p.step; }

// Room of a block for sums.
template <int W> __device__ __forceinline__ double* norm_room() {
    __shared__ double room[NORM_THREADS * W];
    return room;
}

// Adds up what the lanes of a block hold, two sums per channel, and writes them to partial[block][2][channels].
template <int W> __device__ __forceinline__ void norm_write_sums(const float* first, const float* second, float* partial, int channels, int tile) {
    float* room = reinterpret_cast<float*>(norm_room<W>());
    const int n = 2 * W;
#pragma unroll
    for (int i = 0; i < W; i++) {
        room[threadIdx.x * n + i] = first[i];
        room[threadIdx.x * n + W + i] = second[i];
    }
    __syncthreads();
    for (int index = threadIdx.x; index < tile * n; index += NORM_THREADS) {
        float sum = 0.0f;
        for (int lane = 0; lane < NORM_THREADS / tile; lane++) sum += room[lane * tile * n + index];
        int channel = (blockIdx.y * tile + index / n) * W + index % W, which = index % n / W;
        if (channel < channels) partial[((i64)blockIdx.x * 2 + which) * channels + channel] = sum;
    }
}

// Sums of x − pivot and of its square, the pivot being the first row, which is written behind the blocks' sums.
template <typename T, int W> __device__ __forceinline__ void norm_sums(const T* x, float* partial, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    float sum[W], square[W];
    Raw<T, W> pivot, raw[NORM_UNROLL];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = square[i] = 0.0f;
    if (p.live) {
        pivot.load(x + p.channel);
        if (blockIdx.x == 0 && (int)threadIdx.x < tile)
#pragma unroll
            for (int i = 0; i < W; i++) partial[(i64)gridDim.x * 2 * channels + p.channel + i] = pivot.at(i);
        for (i64 row = p.row; row < p.end; row += p.step) {
#pragma unroll
            for (int u = 0; u < NORM_UNROLL; u++)
                if (row + u * p.lanes < p.end) raw[u].load(x + (row + u * p.lanes) * channels + p.channel);
#pragma unroll
            for (int u = 0; u < NORM_UNROLL; u++)
                if (row + u * p.lanes < p.end)
#pragma unroll
                    for (int i = 0; i < W; i++) {
                        float d = raw[u].at(i) - pivot.at(i);
                        sum[i] += d;
                        square[i] = fmaf(d, d, square[i]);
                    }
        }
    }
    norm_write_sums<W>(sum, square, partial, channels, tile);
}

// What the blocks of the first pass have written: two sums for each block and channel, then a pivot.
struct NormPartial {
    const float* sums;
    int blocks;
    __device__ __forceinline__ double pivot(int channels, int c) const { return sums[(i64)blocks * 2 * channels + c]; }
};

template <int V> __device__ __forceinline__ void norm_load(float (&to)[V], const float* p);
template <> __device__ __forceinline__ void norm_load<1>(float (&to)[1], const float* p) { to[0] = *p; }
template <> __device__ __forceinline__ void norm_load<4>(float (&to)[4], const float* p) {
    float4 four = *reinterpret_cast<const float4*>(p);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Adds it up: each thread for a few channels and some of the blocks, then one thread for each channel, which hands both sums to `take`.
template <int W, typename F> __device__ __forceinline__ void norm_totals(NormPartial partial, int channels, int tile, F take) {
    const int V = W < 4 ? 1 : 4, U = 4;
    double* room = norm_room<W>();
    int half = tile * W / V, columns = 2 * half, groups = NORM_THREADS / columns, first = blockIdx.y * tile * W;
    int column = threadIdx.x % columns, group = threadIdx.x / columns, c = first + column % half * V;
    const float* from = partial.sums + (i64)(column / half) * channels + c;
    double sum[V];
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = 0.0;
    if (c < channels)
        for (int block = group; block < partial.blocks; block += groups * U) {
            float found[U][V];
#pragma unroll
            for (int u = 0; u < U; u++)
                if (block + u * groups < partial.blocks) norm_load<V>(found[u], from + (i64)(block + u * groups) * 2 * channels);
#pragma unroll
            for (int u = 0; u < U; u++)
                if (block + u * groups < partial.blocks)
#pragma unroll
                    for (int i = 0; i < V; i++) sum[i] += found[u][i];
        }
#pragma unroll
    for (int i = 0; i < V; i++) room[threadIdx.x * V + i] = sum[i];
    __syncthreads();
    int channel = first + threadIdx.x;
    if ((int)threadIdx.x < tile * W && channel < channels) {
        double a = 0.0, b = 0.0;
        for (int g = 0; g < groups; g++) {
            a += room[g * columns * V + threadIdx.x];
            b += room[(g * columns + half) * V + threadIdx.x];
        }
        take(channel, a, b);
    }
    __syncthreads();
}

// The mean and the variance themselves.
template <int W> __device__ __forceinline__ void norm_moments(NormPartial partial, float* mean, float* variance, i64 rows, int channels, int tile) {
    norm_totals<W>(partial, channels, tile, [&](int c, double sum, double square) {
        double shift = sum / (double)rows;
        mean[c] = (float)(partial.pivot(channels, c) + shift);
        variance[c] = (float)fmax(square / (double)rows - shift * shift, 0.0);
    });
}

// The statistics of a batch-norm from a mean and a variance that are given.
KERNEL batch_norm_given(const float* given_mean, const float* given_variance, i64 rows, int channels, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance) {
    wait_for_last();
    i64 c = first_index();
    if (c >= channels) return;
    // One value has no variance that could be remembered.
    double variance = given_variance[c], m = rows > 1 ? momentum : 0.0f;
    mean[c] = given_mean[c];
    spread[c] = (float)(1.0 / sqrt(variance + (double)epsilon));
    running_mean[c] = (float)((1.0 - m) * (double)running_mean[c] + m * (double)given_mean[c]);
    running_variance[c] = (float)((1.0 - m) * (double)running_variance[c] + m * variance * (double)rows / fmax((double)rows - 1.0, 1.0));
}

// What multiplies x, and what is added to it.
template <int W> __device__ __forceinline__ void norm_affine(float* scale, float* shift, int c, const float* mean, const float* spread, int is_variance, float epsilon, const float* gamma, const float* beta) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        float s = is_variance ? 1.0f / sqrtf(spread[c + i] + epsilon) : spread[c + i];
        scale[i] = gamma ? gamma[c + i] * s : s;
        shift[i] = fmaf(-mean[c + i], scale[i], beta[c + i]);
    }
}

// cut: 0 nothing, 1 below zero, 2 below zero and above six.
__device__ __forceinline__ float norm_cut(float x, int cut) {
    if (cut) x = x < 0.0f ? 0.0f : x;
    return cut == 2 && x > 6.0f ? 6.0f : x;
}

__device__ __forceinline__ bool norm_passes(float x, int cut) { return x > 0.0f && (cut != 2 || x < 6.0f); }

// x and what is added to it, at a few rows. `gate`, where it is given, gets a bit for each element that the ReLU lets pass: a byte for
// eight channels.
template <typename T, int W> struct NormRows {
    Raw<T, W> raw[NORM_UNROLL], other[NORM_UNROLL];
    __device__ __forceinline__ void load(const T* x, const T* added, const NormPlace& p, i64 row, int channels) {
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++)
            if (row + u * p.lanes < p.end) {
                raw[u].load(x + (row + u * p.lanes) * channels + p.channel);
                if (added) other[u].load(added + (row + u * p.lanes) * channels + p.channel);
            }
    }
    __device__ __forceinline__ void write(T* y, unsigned char* gate, bool adds, const float* scale, const float* shift, int cut, const NormPlace& p, i64 row, int channels) const {
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++)
            if (row + u * p.lanes < p.end) {
                i64 at = (row + u * p.lanes) * channels + p.channel;
                Pack<T, W> pack;
                u32 bits = 0;
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float value = fmaf(raw[u].at(i), scale[i], shift[i]);
                    if (adds) value += other[u].at(i);
                    bits |= (u32)norm_passes(value, cut) << i;
                    pack.v[i] = norm_cut(value, cut);
                }
                pack.store(y + at);
                if (W == 8 && gate) gate[at / 8] = (unsigned char)bits;
            }
    }
};

template <typename T, int W> __device__ __forceinline__ void norm_apply(const T* x, const T* added, T* y, unsigned char* gate, const float* mean, const float* spread, int is_variance, float epsilon, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    if (!p.live) return;
    float scale[W], shift[W];
    norm_affine<W>(scale, shift, p.channel, mean, spread, is_variance, epsilon, gamma, beta);
    NormRows<T, W> some;
    for (i64 row = p.row; row < p.end; row += p.step) {
        some.load(x, added, p, row, channels);
        some.write(y, gate, added, scale, shift, cut, p, row, channels);
    }
}

// The second pass of a training step: statistics, from the sums of the first, and the result.
template <typename T, int W> __device__ __forceinline__ void norm_train(const T* x, const T* added, T* y, unsigned char* gate, NormPartial partial, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    __shared__ float scales[NORM_THREADS], shifts[NORM_THREADS];
    i64 row = norm_last(p);
    NormRows<T, W> some;
    if (p.live && row >= p.row) some.load(x, added, p, row, channels);
    norm_totals<W>(partial, channels, tile, [&](int c, double sum, double square) {
        double shift = sum / (double)rows, variance = fmax(square / (double)rows - shift * shift, 0.0);
        double middle = partial.pivot(channels, c) + shift;
        float inverse = (float)(1.0 / sqrt(variance + (double)epsilon)), scale = gamma ? gamma[c] * inverse : inverse;
        scales[threadIdx.x] = scale;
        shifts[threadIdx.x] = fmaf(-(float)middle, scale, beta[c]);
        if (blockIdx.x != 0) return;
        mean[c] = (float)middle;
        spread[c] = inverse;
        double m = rows > 1 ? momentum : 0.0f, unbiased = variance * (double)rows / fmax((double)rows - 1.0, 1.0);
        running_mean[c] = (float)((1.0 - m) * (double)running_mean[c] + m * middle);
        running_variance[c] = (float)((1.0 - m) * (double)running_variance[c] + m * unbiased);
    });
    if (!p.live) return;
    float scale[W], shift[W];
#pragma unroll
    for (int i = 0; i < W; i++) scale[i] = scales[threadIdx.x % tile * W + i], shift[i] = shifts[threadIdx.x % tile * W + i];
    for (; row >= p.row; row -= p.step) {
        some.write(y, gate, added, scale, shift, cut, p, row, channels);
        if (row - p.step >= p.row) some.load(x, added, p, row - p.step, channels);
    }
}

// What is read of a gradient. mask: 0 there is no ReLU, 1 what it let pass follows from x, 2 from y, 3 from the gate's bits.
template <typename T, int W, int mask> struct NormGradient {
    Raw<T, W> dy, more, x, y;
    u32 bits;
    __device__ __forceinline__ void load(const T* dy_, const T* more_, const T* x_, const void* y_, i64 at) {
        dy.load(dy_ + at);
        if (more_) more.load(more_ + at);
        x.load(x_ + at);
        if (mask == 2) y.load((const T*)y_ + at);
        if (W == 8 && mask == 3) bits = ((const unsigned char*)y_)[at / 8];
    }
    // What the ReLU let pass of the gradient, which may come in two parts.
    __device__ __forceinline__ void pass(float* dz, const T* more_, const float* scale, const float* shift, int kind) const {
#pragma unroll
        for (int i = 0; i < W; i++) {
            float value = more_ ? dy.at(i) + more.at(i) : dy.at(i);
            bool passes = mask == 0;
            if (mask == 1) passes = norm_passes(fmaf(x.at(i), scale[i], shift[i]), kind);
            if (mask == 2) passes = norm_passes(y.at(i), kind);
            if (mask == 3) passes = bits >> i & 1;
            dz[i] = passes ? value : 0.0f;
        }
    }
};

// Sums of dz and of dz·(x − mean)/deviation; gives dz out where somebody wants it.
template <typename T, int W, int mask> __device__ __forceinline__ void norm_grad_sums(const T* dy, const T* more, const T* x, const void* y, T* dz, const float* mean, const float* spread, const float* gamma, const float* beta, int kind, float* partial, i64 rows, int channels, int tile) {
    const int U = NORM_GRAD_UNROLL;
    NormPlace p = norm_place<W, U>(rows, channels, tile);
    float sum[W], slope[W], scale[W], shift[W], middle[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = slope[i] = 0.0f;
    if (p.live) {
#pragma unroll
        for (int i = 0; i < W; i++) middle[i] = mean[p.channel + i];
        if (mask == 1) norm_affine<W>(scale, shift, p.channel, mean, spread, 0, 0.0f, gamma, beta);
        NormGradient<T, W, mask> g[U];
        for (i64 row = p.row; row < p.end; row += p.step) {
#pragma unroll
            for (int u = 0; u < U; u++)
                if (row + u * p.lanes < p.end) g[u].load(dy, more, x, y, (row + u * p.lanes) * channels + p.channel);
#pragma unroll
            for (int u = 0; u < U; u++)
                if (row + u * p.lanes < p.end) {
                    Pack<T, W> passed;
                    g[u].pass(passed.v, more, scale, shift, kind);
#pragma unroll
                    for (int i = 0; i < W; i++) {
                        sum[i] += passed.v[i];
                        slope[i] = fmaf(passed.v[i], g[u].x.at(i) - middle[i], slope[i]);
                    }
                    if (dz) passed.store(dz + (row + u * p.lanes) * channels + p.channel);
                }
        }
#pragma unroll
        for (int i = 0; i < W; i++) slope[i] *= spread[p.channel + i];
    }
    norm_write_sums<W>(sum, slope, partial, channels, tile);
}

// dx = gamma/deviation·(dz − mean of dz − (x − mean)/deviation·mean of dz·(x − mean)/deviation)
template <typename T, int W, int mask> __device__ __forceinline__ void norm_grad_apply(const T* dy, const T* x, const void* y, T* dx, const float* mean, const float* spread, const float* gamma, const float* beta, float* dbeta, float* dgamma, int kind, NormPartial partial, i64 rows, int channels, int tile) {
    const int U = NORM_UNROLL;
    NormPlace p = norm_place<W, U>(rows, channels, tile);
    __shared__ float factors[3][NORM_THREADS];
    NormGradient<T, W, mask> g[U];
    const T* none = 0;
    i64 row = norm_last(p);
    auto load = [&]() {
#pragma unroll
        for (int u = 0; u < U; u++)
            if (row + u * p.lanes < p.end) g[u].load(dy, none, x, y, (row + u * p.lanes) * channels + p.channel);
    };
    if (p.live && row >= p.row) load();
    norm_totals<W>(partial, channels, tile, [&](int c, double sum, double slope) {
        float share = 1.0f / (float)rows, s = spread[c], of_dy = gamma ? gamma[c] * s : s;
        float of_x = -of_dy * s * (float)slope * share;
        factors[0][threadIdx.x] = of_dy;
        factors[1][threadIdx.x] = of_x;
        factors[2][threadIdx.x] = -of_dy * (float)sum * share - of_x * mean[c];
        if (blockIdx.x != 0) return;
        dbeta[c] = (float)sum;
        dgamma[c] = (float)slope;
    });
    if (!p.live) return;
    float scale[W], shift[W], of_x[W], constant[W], of_dy[W];
#pragma unroll
    for (int i = 0; i < W; i++) {
        int at = threadIdx.x % tile * W + i;
        of_dy[i] = factors[0][at], of_x[i] = factors[1][at], constant[i] = factors[2][at];
    }
    if (mask == 1) norm_affine<W>(scale, shift, p.channel, mean, spread, 0, 0.0f, gamma, beta);
    while (row >= p.row) {
#pragma unroll
        for (int u = 0; u < U; u++)
            if (row + u * p.lanes < p.end) {
                Pack<T, W> passed;
                g[u].pass(passed.v, none, scale, shift, kind);
#pragma unroll
                for (int i = 0; i < W; i++) passed.v[i] = fmaf(of_dy[i], passed.v[i], fmaf(of_x[i], g[u].x.at(i), constant[i]));
                passed.store(dx + (row + u * p.lanes) * channels + p.channel);
            }
        row -= p.step;
        if (row >= p.row) load();
    }
}

// The gradient of ReLU, and its sums over the rows: the gradient of a bias. dz may stand where dy stood.
template <typename T, int W> __device__ __forceinline__ void relu_grad_sums(const T* dy, const T* y, T* dz, float* partial, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    float sum[W], nothing[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = nothing[i] = 0.0f;
    Raw<T, W> g[NORM_UNROLL], o[NORM_UNROLL];
    if (p.live) {
        for (i64 row = p.row; row < p.end; row += p.step) {
#pragma unroll
            for (int u = 0; u < NORM_UNROLL; u++)
                if (row + u * p.lanes < p.end) {
                    g[u].load(dy + (row + u * p.lanes) * channels + p.channel);
                    o[u].load(y + (row + u * p.lanes) * channels + p.channel);
                }
#pragma unroll
            for (int u = 0; u < NORM_UNROLL; u++)
                if (row + u * p.lanes < p.end) {
                    Pack<T, W> passed;
#pragma unroll
                    for (int i = 0; i < W; i++) {
                        passed.v[i] = o[u].at(i) > 0.0f ? g[u].at(i) : 0.0f;
                        sum[i] += passed.v[i];
                    }
                    passed.store(dz + (row + u * p.lanes) * channels + p.channel);
                }
        }
    }
    norm_write_sums<W>(sum, nothing, partial, channels, tile);
}

#define NORM_KERNELS(T, NAME, W)                                                                                                 \
    KERNEL __launch_bounds__(NORM_THREADS) relu_grad_sums_##NAME(const T* dy, const T* y, T* dz, float* partial, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        relu_grad_sums<T, W>(dy, y, dz, partial, rows, channels, tile);                                                          \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_sums_##NAME(const T* x, float* partial, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_sums<T, W>(x, partial, rows, channels, tile);                                                                       \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_train_##NAME(const T* x, const T* added, T* y, unsigned char* gate, const float* partial, int blocks, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_train<T, W>(x, added, y, gate, {partial, blocks}, epsilon, momentum, mean, spread, running_mean, running_variance, gamma, beta, cut, rows, channels, tile); \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_apply_##NAME(const T* x, const T* added, T* y, unsigned char* gate, const float* mean, const float* spread, int is_variance, float epsilon, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_apply<T, W>(x, added, y, gate, mean, spread, is_variance, epsilon, gamma, beta, cut, rows, channels, tile);         \
    }

#define NORM_GRADIENTS(T, NAME, W, MASK)                                                                                         \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_grad_sums_##NAME##_##MASK(const T* dy, const T* more, const T* x, const void* y, T* dz, const float* mean, const float* spread, const float* gamma, const float* beta, int kind, float* partial, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_grad_sums<T, W, MASK>(dy, more, x, y, dz, mean, spread, gamma, beta, kind, partial, rows, channels, tile);          \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_grad_apply_##NAME##_##MASK(const T* dy, const T* x, const void* y, T* dx, const float* mean, const float* spread, const float* gamma, const float* beta, float* dbeta, float* dgamma, int kind, const float* partial, int blocks, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_grad_apply<T, W, MASK>(dy, x, y, dx, mean, spread, gamma, beta, dbeta, dgamma, kind, {partial, blocks}, rows, channels, tile); \
    }
#define NORM_MASKS(T, NAME, W) NORM_GRADIENTS(T, NAME, W, 0) NORM_GRADIENTS(T, NAME, W, 1) NORM_GRADIENTS(T, NAME, W, 2)

NORM_MASKS(float, f32, 1)
NORM_MASKS(float, f32_wide, 4)
NORM_MASKS(bf16, bf16, 1)
NORM_MASKS(bf16, bf16_wide, 8)
NORM_GRADIENTS(bf16, bf16_wide, 8, 3)

NORM_KERNELS(float, f32, 1)
NORM_KERNELS(float, f32_wide, 4)
NORM_KERNELS(bf16, bf16, 1)
NORM_KERNELS(bf16, bf16_wide, 8)

// What blocks have found, added up once for all, where there are many of both: by one block for each tile.
#define NORM_TOTALS(NAME, W)                                                                                                     \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_totals_##NAME(const float* partial, int blocks, float* sums, int pivoted, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        NormPartial all = {partial, blocks};                                                                                     \
        norm_totals<W>(all, channels, tile, [&](int c, double first, double second) {                                            \
            sums[c] = (float)first;                                                                                              \
            sums[channels + c] = (float)second;                                                                                  \
            if (pivoted) sums[2 * channels + c] = (float)all.pivot(channels, c);                                                 \
        });                                                                                                                      \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_moments_##NAME(const float* partial, int blocks, float* mean, float* variance, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_moments<W>({partial, blocks}, mean, variance, rows, channels, tile);                                                \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) first_totals_##NAME(const float* partial, int blocks, float* sums, i64 rows, int channels, int tile) { \
        wait_for_last();                                                                                                         \
        norm_totals<W>({partial, blocks}, channels, tile, [&](int c, double sum, double) { sums[c] = (float)sum; });             \
    }

NORM_TOTALS(f32, 1)
NORM_TOTALS(f32_wide, 4)
NORM_TOTALS(bf16, 1)
NORM_TOTALS(bf16_wide, 8)
