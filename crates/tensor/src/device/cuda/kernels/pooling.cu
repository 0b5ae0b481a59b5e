// Pooling of NHWC images and its gradients. A thread works on a pack of channels of one pixel. The gradients gather: each
// pixel of dx looks up the windows that cover it, in window order, so nothing is added from two sides.

struct Pooling {
    int height, width;
    // Windows per dim.
    int rows, columns;
    int adaptive;
    int kernel_h, kernel_w, stride_h, stride_w, top, left, bottom, right, count_padding;
};

#define POOLING_PARAMETERS                                                                                                     \
    i64 batch, i64 channels, int height, int width, int rows, int columns, int adaptive, int kernel_h, int kernel_w,           \
        int stride_h, int stride_w, int top, int left, int bottom, int right, int count_padding
#define POOLING                                                                                                                \
    Pooling {                                                                                                                  \
        height, width, rows, columns, adaptive, kernel_h, kernel_w, stride_h, stride_w, top, left, bottom, right,              \
            count_padding                                                                                                      \
    }

// The real pixels of a window along a dim, and what a mean divides by.
struct Span {
    int start, end, count;
};

__device__ __forceinline__ Span span_of(const Pooling& p, bool vertical, int index) {
    int size = vertical ? p.height : p.width;
    if (p.adaptive) {
        i64 windows = vertical ? p.rows : p.columns;
        int start = (int)divide((i64)index * size, windows), end = (int)divide((i64)(index + 1) * size + windows - 1, windows);
        return Span{start, end, end - start};
    }
    int kernel = vertical ? p.kernel_h : p.kernel_w, stride = vertical ? p.stride_h : p.stride_w;
    int before = vertical ? p.top : p.left, after = vertical ? p.bottom : p.right;
    int begin = index * stride, start = begin > before ? begin - before : 0;
    int end = begin + kernel - before < size ? begin + kernel - before : size;
    int padded = begin + kernel < size + before + after ? begin + kernel : size + before + after;
    return Span{start, end, p.count_padding ? padded - begin : end - start};
}

// The windows along a dim that cover a pixel: start to end.
__device__ __forceinline__ Span covering(const Pooling& p, bool vertical, int pixel) {
    int size = vertical ? p.height : p.width, windows = vertical ? p.rows : p.columns;
    if (p.adaptive) {
        int start = (int)divide((i64)pixel * windows, size), end = (int)divide((i64)(pixel + 1) * windows + size - 1, size);
        return Span{start, end, 0};
    }
    int kernel = vertical ? p.kernel_h : p.kernel_w, stride = vertical ? p.stride_h : p.stride_w;
    int at = pixel + (vertical ? p.top : p.left);
    int start = at < kernel ? 0 : (at - kernel) / stride + 1, end = at / stride + 1;
    return Span{start, end < windows ? end : windows, 0};
}

// The lines of pixels of all images, each walked by a block: what belongs to a line is worked out once. Across a line,
// packs of channels are counted in 32 bits.
struct Line {
    i64 image;
    int row;
    __device__ __forceinline__ Line(i64 index, int down) {
        image = divide(index, down);
        row = (int)(index - image * down);
    }
};

// Pixels of a window's row that are loaded before the first is looked at.
#define POOL_AHEAD 3

template <typename T, int W>
__device__ __forceinline__ void max_pool(const T* x, T* y, int* winners, i64 batch, i64 channels, const Pooling& p) {
    u32 packs = (u32)(channels / W);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * p.rows; index += gridDim.x) {
        Line line(index, p.rows);
        Span down = span_of(p, true, line.row);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.columns * packs; i += blockDim.x) {
            int place = (int)(i / packs);
            i64 channel = i - place * packs, to = (index * p.columns * packs + i) * W;
            Span across = span_of(p, false, place);
            const T* image = x + line.image * p.height * p.width * channels + channel * W;
            Pack<T, W> best;
            int winner[W];
#pragma unroll
            for (int k = 0; k < W; k++) {
                best.v[k] = -__int_as_float(0x7f800000);
                winner[k] = down.start * p.width + across.start;
            }
#pragma unroll 1
            for (int row = down.start; row < down.end; row++) {
#pragma unroll 1
                for (int column = across.start; column < across.end; column += POOL_AHEAD) {
                    Pack<T, W> next[POOL_AHEAD];
                    int pixel = row * p.width + column;
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end) next[a].load(image + (i64)(pixel + a) * channels);
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end)
#pragma unroll
                            for (int k = 0; k < W; k++) {
                                float v = next[a].v[k];
                                if (v > best.v[k] || v != v) best.v[k] = v, winner[k] = pixel + a;
                            }
                }
            }
            best.store(y + to);
            if (W % 4 == 0) {
#pragma unroll
                for (int k = 0; k < W; k += 4)
                    *reinterpret_cast<int4*>(winners + to + k) =
                        make_int4(winner[k], winner[(k + 1) % W], winner[(k + 2) % W], winner[(k + 3) % W]);
            } else {
#pragma unroll
                for (int k = 0; k < W; k++) winners[to + k] = winner[k];
            }
        }
    }
}

template <typename T, int W>
__device__ __forceinline__ void average_pool(const T* x, T* y, i64 batch, i64 channels, const Pooling& p) {
    u32 packs = (u32)(channels / W);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * p.rows; index += gridDim.x) {
        Line line(index, p.rows);
        Span down = span_of(p, true, line.row);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.columns * packs; i += blockDim.x) {
            int place = (int)(i / packs);
            i64 channel = i - place * packs, to = (index * p.columns * packs + i) * W;
            Span across = span_of(p, false, place);
            const T* image = x + line.image * p.height * p.width * channels + channel * W;
            Pack<T, W> sum;
#pragma unroll
            for (int k = 0; k < W; k++) sum.v[k] = 0.0f;
#pragma unroll 1
            for (int row = down.start; row < down.end; row++) {
#pragma unroll 1
                for (int column = across.start; column < across.end; column += POOL_AHEAD) {
                    Pack<T, W> next[POOL_AHEAD];
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end) next[a].load(image + (i64)(row * p.width + column + a) * channels);
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end)
#pragma unroll
                            for (int k = 0; k < W; k++) sum.v[k] += next[a].v[k];
                }
            }
            float factor = 1.0f / (float)((i64)down.count * across.count);
#pragma unroll
            for (int k = 0; k < W; k++) sum.v[k] *= factor;
            sum.store(y + to);
        }
    }
}

// One window over the whole image: a block of 256 threads adds the pixels of `across` packs of channels of an image.
template <typename T, int W>
__device__ __forceinline__ void average_all(const T* x, T* y, i64 batch, i64 pixels, i64 channels, int across) {
    __shared__ float room[256 * W];
    int column = threadIdx.x % across, line = threadIdx.x / across, down = 256 / across;
    i64 packs = divide(channels, W), tiles = divide(packs + across - 1, across);
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < batch * tiles; tile += gridDim.x) {
        i64 image = divide(tile, tiles), pack = (tile - image * tiles) * across + column;
        float sum[W] = {};
        if (pack < packs) {
            const T* from = x + image * pixels * channels + pack * W;
#pragma unroll 4
            for (i64 pixel = line; pixel < pixels; pixel += down) {
                Pack<T, W> next;
                next.load(from + pixel * channels);
#pragma unroll
                for (int k = 0; k < W; k++) sum[k] += next.v[k];
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < W; k++) room[threadIdx.x * W + k] = sum[k];
#pragma unroll 1
        for (int half = down / 2; half > 0; half /= 2) {
            __syncthreads();
            if (line < half)
#pragma unroll
                for (int k = 0; k < W; k++) room[threadIdx.x * W + k] += room[(threadIdx.x + half * across) * W + k];
        }
        if (line == 0 && pack < packs) {
            float factor = 1.0f / (float)pixels;
            Pack<T, W> mean;
#pragma unroll
            for (int k = 0; k < W; k++) mean.v[k] = room[threadIdx.x * W + k] * factor;
            mean.store(y + image * channels + pack * W);
        }
    }
}

// Its gradient: every pixel gets the same.
template <typename T, int W>
__device__ __forceinline__ void average_all_grad(const T* dy, T* dx, i64 batch, i64 pixels, i64 channels) {
    i64 packs = channels / W;
    float factor = 1.0f / (float)pixels;
#pragma unroll 1
    for (i64 i = first_index(); i < batch * pixels * packs; i += all_threads()) {
        i64 pixel = divide(i, packs);
        Pack<T, W> pack;
        pack.load(dy + divide(pixel, pixels) * channels + (i - pixel * packs) * W);
#pragma unroll
        for (int k = 0; k < W; k++) pack.v[k] *= factor;
        pack.store(dx + i * W);
    }
}

template <typename T, int W>
__device__ __forceinline__ void max_pool_grad(const T* dy, const int* winners, T* dx, i64 batch, i64 channels,
                                              const Pooling& p) {
    u32 packs = (u32)(channels / W);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * p.height; index += gridDim.x) {
        Line line(index, p.height);
        Span down = covering(p, true, line.row);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.width * packs; i += blockDim.x) {
            int place = (int)(i / packs);
            i64 channel = i - place * packs, to = (index * p.width * packs + i) * W;
            Span across = covering(p, false, place);
            int pixel = line.row * p.width + place;
            i64 image = line.image * p.rows * p.columns;
            Pack<T, W> sum;
#pragma unroll
            for (int k = 0; k < W; k++) sum.v[k] = 0.0f;
#pragma unroll 1
            for (int row = down.start; row < down.end; row++) {
#pragma unroll 2
                for (int column = across.start; column < across.end; column++) {
                    i64 at = (image + row * p.columns + column) * channels + channel * W;
                    Pack<T, W> next;
                    next.load(dy + at);
                    int winner[W];
                    if (W % 4 == 0) {
#pragma unroll
                        for (int k = 0; k < W; k += 4) {
                            int4 four = *reinterpret_cast<const int4*>(winners + at + k);
                            winner[k] = four.x, winner[(k + 1) % W] = four.y;
                            winner[(k + 2) % W] = four.z, winner[(k + 3) % W] = four.w;
                        }
                    } else {
#pragma unroll
                        for (int k = 0; k < W; k++) winner[k] = winners[at + k];
                    }
#pragma unroll
                    for (int k = 0; k < W; k++) sum.v[k] += winner[k] == pixel ? next.v[k] : 0.0f;
                }
            }
            sum.store(dx + to);
        }
    }
}

template <typename T, int W>
__device__ __forceinline__ void average_pool_grad(const T* dy, T* dx, i64 batch, i64 channels, const Pooling& p) {
    u32 packs = (u32)(channels / W);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * p.height; index += gridDim.x) {
        Line line(index, p.height);
        Span down = covering(p, true, line.row);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.width * packs; i += blockDim.x) {
            int place = (int)(i / packs);
            i64 channel = i - place * packs, to = (index * p.width * packs + i) * W;
            Span across = covering(p, false, place);
            i64 image = line.image * p.rows * p.columns;
            Pack<T, W> sum;
#pragma unroll
            for (int k = 0; k < W; k++) sum.v[k] = 0.0f;
#pragma unroll 1
            for (int row = down.start; row < down.end; row++) {
                i64 tall = span_of(p, true, row).count;
#pragma unroll 2
                for (int column = across.start; column < across.end; column++) {
                    Pack<T, W> next;
                    next.load(dy + (image + row * p.columns + column) * channels + channel * W);
                    float factor = 1.0f / (float)(tall * span_of(p, false, column).count);
#pragma unroll
                    for (int k = 0; k < W; k++) sum.v[k] += factor * next.v[k];
                }
            }
            sum.store(dx + to);
        }
    }
}

#define POOL(type, T)                                                                                                          \
    KERNEL max_pool_##type(const T* x, T* y, int* winners, POOLING_PARAMETERS) {                                               \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(x) && is_aligned(y) && is_aligned(winners))                                        \
            max_pool<T, W>(x, y, winners, batch, channels, POOLING);                                                           \
        else                                                                                                                   \
            max_pool<T, 1>(x, y, winners, batch, channels, POOLING);                                                           \
    }                                                                                                                          \
    KERNEL average_pool_##type(const T* x, T* y, POOLING_PARAMETERS) {                                                         \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(x) && is_aligned(y)) average_pool<T, W>(x, y, batch, channels, POOLING);           \
        else average_pool<T, 1>(x, y, batch, channels, POOLING);                                                               \
    }                                                                                                                          \
    KERNEL average_all_##type(const T* x, T* y, i64 batch, i64 pixels, i64 channels, int across) {                             \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(x) && is_aligned(y)) average_all<T, W>(x, y, batch, pixels, channels, across);     \
        else average_all<T, 1>(x, y, batch, pixels, channels, across);                                                         \
    }                                                                                                                          \
    KERNEL average_all_grad_##type(const T* dy, T* dx, i64 batch, i64 pixels, i64 channels) {                                  \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(dy) && is_aligned(dx)) average_all_grad<T, W>(dy, dx, batch, pixels, channels);    \
        else average_all_grad<T, 1>(dy, dx, batch, pixels, channels);                                                          \
    }                                                                                                                          \
    KERNEL max_pool_grad_##type(const T* dy, const int* winners, T* dx, POOLING_PARAMETERS) {                                  \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(dy) && is_aligned(dx) && is_aligned(winners))                                      \
            max_pool_grad<T, W>(dy, winners, dx, batch, channels, POOLING);                                                    \
        else                                                                                                                   \
            max_pool_grad<T, 1>(dy, winners, dx, batch, channels, POOLING);                                                    \
    }                                                                                                                          \
    KERNEL average_pool_grad_##type(const T* dy, T* dx, POOLING_PARAMETERS) {                                                  \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(dy) && is_aligned(dx)) average_pool_grad<T, W>(dy, dx, batch, channels, POOLING);  \
        else average_pool_grad<T, 1>(dy, dx, batch, channels, POOLING);                                                        \
    }
POOL(f32, float)
POOL(bf16, bf16)
