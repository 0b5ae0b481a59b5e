// Batch normalisation over the rows of a [rows, channels] matrix: two reading passes forward (sums, then the result), two
// backward. Bound: bytes of those passes over memory bandwidth.
//
// A block of 256 threads works on a tile of `tile` packs of W channels and a few times 256/tile rows at a time, then as far on as all blocks
// together reach: what is read at one time lies side by side. Blocks are numbered by rows (x) and by tile of channels (y). Sums go lane by
// lane, then block by block, in a fixed order.

#define NORM_THREADS 256
#define NORM_UNROLL 4

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

// Adds up what the lanes of a block hold, two sums per channel, and writes them to partial[block][2][channels].
template <int W> __device__ __forceinline__ void norm_write_sums(const float* first, const float* second, float* partial, int channels, int tile) {
    __shared__ float room[NORM_THREADS * 2 * W];
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

// Sums of x − pivot and of its square, the pivot being the first row.
template <typename T, int W> __device__ __forceinline__ void norm_sums(const T* x, float* partial, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    float sum[W], square[W];
    Raw<T, W> pivot, raw[NORM_UNROLL];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = square[i] = 0.0f;
    if (p.live) {
        pivot.load(x + p.channel);
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

// Adds up the blocks' sums of 32 channels with 32 threads for each; the first of them gets both.
__device__ __forceinline__ bool norm_collect(const float* partial, int blocks, int channels, int* channel, double* first, double* second) {
    __shared__ double room[2][32][33];
    int column = threadIdx.x % 32, group = threadIdx.x / 32;
    int c = blockIdx.x * 32 + column;
    double a = 0.0, b = 0.0;
    if (c < channels)
#pragma unroll 4
        for (int block = group; block < blocks; block += 32) {
            a += partial[((i64)block * 2) * channels + c];
            b += partial[((i64)block * 2 + 1) * channels + c];
        }
    room[0][group][column] = a;
    room[1][group][column] = b;
    __syncthreads();
    *channel = c;
    if (group != 0 || c >= channels) return false;
    a = b = 0.0;
    for (int g = 0; g < 32; g++) {
        a += room[0][g][column];
        b += room[1][g][column];
    }
    *first = a;
    *second = b;
    return true;
}

template <typename T> __device__ __forceinline__ void norm_statistics(const float* partial, int blocks, const T* x, i64 rows, int channels, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance) {
    int c;
    double sum, square;
    if (!norm_collect(partial, blocks, channels, &c, &sum, &square)) return;
    double shift = sum / (double)rows, variance = fmax(square / (double)rows - shift * shift, 0.0);
    double middle = (double)to_float(x[c]) + shift;
    mean[c] = (float)middle;
    spread[c] = (float)(1.0 / sqrt(variance + (double)epsilon));
    double m = momentum, unbiased = variance * (double)rows / fmax((double)rows - 1.0, 1.0);
    running_mean[c] = (float)((1.0 - m) * (double)running_mean[c] + m * middle);
    running_variance[c] = (float)((1.0 - m) * (double)running_variance[c] + m * unbiased);
}

// The mean and the variance themselves.
template <typename T> __device__ __forceinline__ void norm_moments(const float* partial, int blocks, const T* x, i64 rows, int channels, float* mean, float* variance) {
    int c;
    double sum, square;
    if (!norm_collect(partial, blocks, channels, &c, &sum, &square)) return;
    double shift = sum / (double)rows;
    mean[c] = (float)((double)to_float(x[c]) + shift);
    variance[c] = (float)fmax(square / (double)rows - shift * shift, 0.0);
}

// As norm_statistics, from a mean and a variance that are given.
KERNEL batch_norm_given(const float* given_mean, const float* given_variance, i64 rows, int channels, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance) {
    i64 c = first_index();
    if (c >= channels) return;
    double variance = given_variance[c], m = momentum;
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

// `gate`, where it is given, gets a bit for each element that the ReLU lets pass: a byte for eight channels.
template <typename T, int W> __device__ __forceinline__ void norm_apply(const T* x, const T* added, T* y, unsigned char* gate, const float* mean, const float* spread, int is_variance, float epsilon, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) {
    NormPlace p = norm_place<W, NORM_UNROLL>(rows, channels, tile);
    if (!p.live) return;
    float scale[W], shift[W];
    norm_affine<W>(scale, shift, p.channel, mean, spread, is_variance, epsilon, gamma, beta);
    Raw<T, W> raw[NORM_UNROLL], other[NORM_UNROLL];
    for (i64 row = p.row; row < p.end; row += p.step) {
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++)
            if (row + u * p.lanes < p.end) {
                raw[u].load(x + (row + u * p.lanes) * channels + p.channel);
                if (added) other[u].load(added + (row + u * p.lanes) * channels + p.channel);
            }
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++)
            if (row + u * p.lanes < p.end) {
                i64 at = (row + u * p.lanes) * channels + p.channel;
                Pack<T, W> pack;
                u32 bits = 0;
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float value = fmaf(raw[u].at(i), scale[i], shift[i]);
                    if (added) value += other[u].at(i);
                    bits |= (u32)norm_passes(value, cut) << i;
                    pack.v[i] = norm_cut(value, cut);
                }
                pack.store(y + at);
                if (W == 8 && gate) gate[at / 8] = (unsigned char)bits;
            }
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
    const int U = 2;
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

KERNEL batch_norm_grad_totals(const float* partial, int blocks, int channels, float* dbeta, float* dgamma) {
    int c;
    double sum, slope;
    if (!norm_collect(partial, blocks, channels, &c, &sum, &slope)) return;
    dbeta[c] = (float)sum;
    dgamma[c] = (float)slope;
}

// dx = gamma/deviation·(dz − mean of dz − (x − mean)/deviation·mean of dz·(x − mean)/deviation)
template <typename T, int W, int mask> __device__ __forceinline__ void norm_grad_apply(const T* dy, const T* x, const void* y, T* dx, const float* mean, const float* spread, const float* gamma, const float* beta, const float* dbeta, const float* dgamma, int kind, i64 rows, int channels, int tile) {
    const int U = 4;
    NormPlace p = norm_place<W, U>(rows, channels, tile);
    if (!p.live) return;
    float scale[W], shift[W], of_x[W], constant[W], of_dy[W];
    float share = 1.0f / (float)rows;
#pragma unroll
    for (int i = 0; i < W; i++) {
        int c = p.channel + i;
        of_dy[i] = gamma ? gamma[c] * spread[c] : spread[c];
        of_x[i] = -of_dy[i] * spread[c] * dgamma[c] * share;
        constant[i] = -of_dy[i] * dbeta[c] * share - of_x[i] * mean[c];
    }
    if (mask == 1) norm_affine<W>(scale, shift, p.channel, mean, spread, 0, 0.0f, gamma, beta);
    NormGradient<T, W, mask> g[U];
    const T* none = 0;
    for (i64 row = p.row; row < p.end; row += p.step) {
#pragma unroll
        for (int u = 0; u < U; u++)
            if (row + u * p.lanes < p.end) g[u].load(dy, none, x, y, (row + u * p.lanes) * channels + p.channel);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (row + u * p.lanes < p.end) {
                Pack<T, W> passed;
                g[u].pass(passed.v, none, scale, shift, kind);
#pragma unroll
                for (int i = 0; i < W; i++) passed.v[i] = fmaf(of_dy[i], passed.v[i], fmaf(of_x[i], g[u].x.at(i), constant[i]));
                passed.store(dx + (row + u * p.lanes) * channels + p.channel);
            }
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
        relu_grad_sums<T, W>(dy, y, dz, partial, rows, channels, tile);                                                   \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_sums_##NAME(const T* x, float* partial, i64 rows, int channels, int tile) { \
        norm_sums<T, W>(x, partial, rows, channels, tile);                                                                \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_apply_##NAME(const T* x, const T* added, T* y, unsigned char* gate, const float* mean, const float* spread, int is_variance, float epsilon, const float* gamma, const float* beta, int cut, i64 rows, int channels, int tile) { \
        norm_apply<T, W>(x, added, y, gate, mean, spread, is_variance, epsilon, gamma, beta, cut, rows, channels, tile);         \
    }

#define NORM_GRADIENTS(T, NAME, W, MASK)                                                                                         \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_grad_sums_##NAME##_##MASK(const T* dy, const T* more, const T* x, const void* y, T* dz, const float* mean, const float* spread, const float* gamma, const float* beta, int kind, float* partial, i64 rows, int channels, int tile) { \
        norm_grad_sums<T, W, MASK>(dy, more, x, y, dz, mean, spread, gamma, beta, kind, partial, rows, channels, tile);    \
    }                                                                                                                            \
    KERNEL __launch_bounds__(NORM_THREADS) batch_norm_grad_apply_##NAME##_##MASK(const T* dy, const T* x, const void* y, T* dx, const float* mean, const float* spread, const float* gamma, const float* beta, const float* dbeta, const float* dgamma, int kind, i64 rows, int channels, int tile) { \
        norm_grad_apply<T, W, MASK>(dy, x, y, dx, mean, spread, gamma, beta, dbeta, dgamma, kind, rows, channels, tile);   \
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

#define NORM_STATISTICS(T, NAME)                                                                                                 \
    KERNEL batch_norm_statistics_##NAME(const float* partial, int blocks, const T* x, i64 rows, int channels, float epsilon, float momentum, float* mean, float* spread, float* running_mean, float* running_variance) { \
        norm_statistics<T>(partial, blocks, x, rows, channels, epsilon, momentum, mean, spread, running_mean, running_variance);  \
    }

#define NORM_MOMENTS(T, NAME)                                                                                                    \
    KERNEL batch_norm_moments_##NAME(const float* partial, int blocks, const T* x, i64 rows, int channels, float* mean, float* variance) { \
        norm_moments<T>(partial, blocks, x, rows, channels, mean, variance);                                                     \
    }

NORM_STATISTICS(float, f32)
NORM_STATISTICS(bf16, bf16)
NORM_MOMENTS(float, f32)
NORM_MOMENTS(bf16, bf16)

