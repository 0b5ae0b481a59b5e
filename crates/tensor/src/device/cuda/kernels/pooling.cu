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

typedef unsigned char u8;

// Winners are bytes, by their place in the window before it was cut at the image's edges, or pixels of the image (int).
template <typename I> struct Winner;
template <> struct Winner<int> {
    static __device__ __forceinline__ int at(const Pooling& p, int row, int column, int window_row, int window_column) {
        return row * p.width + column;
    }
};
template <> struct Winner<u8> {
    static __device__ __forceinline__ int at(const Pooling& p, int row, int column, int window_row, int window_column) {
        return (row - window_row * p.stride_h + p.top) * p.kernel_w + column - window_column * p.stride_w + p.left;
    }
};

template <int W> __device__ __forceinline__ void store_winners(int* to, const int (&winner)[W]) {
    if (W % 4 == 0) {
#pragma unroll
        for (int k = 0; k < W; k += 4)
            *reinterpret_cast<int4*>(to + k) =
                make_int4(winner[k], winner[(k + 1) % W], winner[(k + 2) % W], winner[(k + 3) % W]);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) to[k] = winner[k];
    }
}

template <int W> __device__ __forceinline__ void store_winners(u8* to, const int (&winner)[W]) {
    if (W % 4 == 0) {
#pragma unroll
        for (int k = 0; k < W; k += 4)
            *reinterpret_cast<u32*>(to + k) =
                winner[k] | winner[(k + 1) % W] << 8 | winner[(k + 2) % W] << 16 | winner[(k + 3) % W] << 24;
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) to[k] = (u8)winner[k];
    }
}

template <int W> __device__ __forceinline__ void load_winners(const int* from, int (&winner)[W]) {
    if (W % 4 == 0) {
#pragma unroll
        for (int k = 0; k < W; k += 4) {
            int4 four = *reinterpret_cast<const int4*>(from + k);
            winner[k] = four.x, winner[(k + 1) % W] = four.y;
            winner[(k + 2) % W] = four.z, winner[(k + 3) % W] = four.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) winner[k] = from[k];
    }
}

template <int W> __device__ __forceinline__ void load_winners(const u8* from, int (&winner)[W]) {
#pragma unroll
    for (int k = 0; k < W; k++) winner[k] = W % 4 == 0 ? reinterpret_cast<const u32*>(from)[k / 4] >> k % 4 * 8 & 0xff : from[k];
}

template <typename T, int W, typename I>
__device__ __forceinline__ void max_pool(const T* x, T* y, I* winners, i64 batch, i64 channels, const Pooling& p) {
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
                winner[k] = Winner<I>::at(p, down.start, across.start, line.row, place);
            }
#pragma unroll 1
            for (int row = down.start; row < down.end; row++) {
#pragma unroll 1
                for (int column = across.start; column < across.end; column += POOL_AHEAD) {
                    Pack<T, W> next[POOL_AHEAD];
                    int pixel = row * p.width + column, name = Winner<I>::at(p, row, column, line.row, place);
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end) next[a].load(image + (i64)(pixel + a) * channels);
#pragma unroll
                    for (int a = 0; a < POOL_AHEAD; a++)
                        if (column + a < across.end)
#pragma unroll
                            for (int k = 0; k < W; k++) {
                                float v = next[a].v[k];
                                if (v > best.v[k] || v != v) best.v[k] = v, winner[k] = name + a;
                            }
                }
            }
            best.store(y + to);
            store_winners<W>(winners + to, winner);
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

template <typename T, int W, typename I>
__device__ __forceinline__ void max_pool_grad(const T* dy, const I* winners, T* dx, i64 batch, i64 channels, const Pooling& p) {
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
#pragma unroll 2
                for (int column = across.start; column < across.end; column++) {
                    int name = Winner<I>::at(p, line.row, place, row, column);
                    i64 at = (image + row * p.columns + column) * channels + channel * W;
                    Pack<T, W> next;
                    next.load(dy + at);
                    int winner[W];
                    load_winners<W>(winners + at, winner);
#pragma unroll
                    for (int k = 0; k < W; k++) sum.v[k] += winner[k] == name ? next.v[k] : 0.0f;
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

// Windows of 2×2 that lie side by side and cover the image, eight channels of one at a time; x is counted in packs. Winners are bytes
// with one of four bits set, so that the gradient is dy under masks, and every pixel of dx is written once.
KERNEL max_pool_2x2_bf16(const uint4* x, uint4* y, uint2* winners, i64 lines, int columns, int packs) {
#pragma unroll 1
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x)
#pragma unroll 2
        for (int i = threadIdx.x; i < columns * packs; i += blockDim.x) {
            const bf16* from = reinterpret_cast<const bf16*>(x + line * columns * packs * 4 + i + i / packs * packs);
            Raw<bf16, 8> raw[4];
#pragma unroll
            for (int k = 0; k < 4; k++) raw[k].load(from + ((i64)(k / 2) * columns * 2 + k % 2) * packs * 8);
            Pack<bf16, 8> best;
            u32 bits[2] = {0, 0};
#pragma unroll
            for (int c = 0; c < 8; c++) {
                float most = raw[0].at(c);
                u32 winner = 1;
#pragma unroll
                for (int k = 1; k < 4; k++) {
                    float v = raw[k].at(c);
                    if (v > most || v != v) most = v, winner = 1 << k;
                }
                best.v[c] = most;
                bits[c / 4] |= winner << c % 4 * 8;
            }
            best.store(reinterpret_cast<bf16*>(y + line * columns * packs + i));
            winners[line * columns * packs + i] = make_uint2(bits[0], bits[1]);
        }
}

KERNEL max_pool_2x2_grad_bf16(const uint4* dy, const uint2* winners, uint4* dx, i64 lines, int columns, int packs) {
#pragma unroll 1
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x)
#pragma unroll 2
        for (int i = threadIdx.x; i < columns * packs; i += blockDim.x) {
            uint4 g = dy[line * columns * packs + i];
            uint2 bits = winners[line * columns * packs + i];
            uint4* to = dx + line * columns * packs * 4 + i + i / packs * packs;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 low = bits.x << (7 - k), high = bits.y << (7 - k);
                // Each byte's upper bit becomes 16 bits.
                to[((i64)(k / 2) * columns * 2 + k % 2) * packs] =
                    make_uint4(g.x & select_bytes<0x9988>(low, 0), g.y & select_bytes<0xbbaa>(low, 0),
                               g.z & select_bytes<0x9988>(high, 0), g.w & select_bytes<0xbbaa>(high, 0));
            }
        }
}

// Windows of 3×3 every second pixel, eight channels at a time; tensors are counted in packs of them, winners are bytes as above.
KERNEL max_pool_3x3_bf16(const uint4* x, uint4* y, uint2* winners, i64 batch, int height, int width, int rows, int columns, int top,
                         int left, int packs) {
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * rows; index += gridDim.x) {
        Line line(index, rows);
        const uint4* image = x + line.image * height * width * packs;
        int above = line.row * 2 - top;
#pragma unroll 1
        for (int i = threadIdx.x; i < columns * packs; i += blockDim.x) {
            int column = i / packs, before = column * 2 - left;
            const uint4* from = image + ((i64)above * width + before) * packs + i - column * packs;
            Raw<bf16, 8> raw[9];
#pragma unroll
            for (int k = 0; k < 9; k++) {
                raw[k].v = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);
                bool inside = (u32)(above + k / 3) < (u32)height && (u32)(before + k % 3) < (u32)width;
                if (inside) raw[k].v = from[((i64)(k / 3) * width + k % 3) * packs];
            }
            u32 first = max(-above, 0) * 3 + max(-before, 0), bits[2] = {0, 0};
            Pack<bf16, 8> best;
#pragma unroll
            for (int c = 0; c < 8; c++) {
                float most = -__int_as_float(0x7f800000);
                u32 winner = first;
#pragma unroll
                for (int k = 0; k < 9; k++) {
                    float v = raw[k].at(c);
                    if (v > most || v != v) most = v, winner = k;
                }
                best.v[c] = most;
                bits[c / 4] |= winner << c % 4 * 8;
            }
            best.store(reinterpret_cast<bf16*>(y + index * columns * packs + i));
            winners[index * columns * packs + i] = make_uint2(bits[0], bits[1]);
        }
    }
}

// A thread writes the 2×2 pixels of dx that the same four windows cover: row `down` of them lies in row a (0 or 1) of window `down`, and its
// first in row 2 of the window before.
KERNEL max_pool_3x3_grad_bf16(const uint4* dy, const uint2* winners, uint4* dx, i64 batch, int height, int width, int rows, int columns,
                              int top, int left, int packs) {
    int lines = (height + top + 1) / 2, places = (width + left + 1) / 2;
#pragma unroll 1
    for (i64 index = blockIdx.x; index < batch * lines; index += gridDim.x) {
        Line line(index, lines);
        i64 windows = line.image * rows * columns * packs, pixels = line.image * height * width * packs;
#pragma unroll 1
        for (int i = threadIdx.x; i < places * packs; i += blockDim.x) {
            int place = i / packs, channel = i - place * packs;
            Raw<bf16, 8> g[4];
            uint2 won[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int row = line.row - 1 + k / 2, column = place - 1 + k % 2;
                g[k].v = make_uint4(0, 0, 0, 0), won[k] = make_uint2(~0u, ~0u);
                if ((u32)row < (u32)rows && (u32)column < (u32)columns) {
                    i64 at = windows + (row * columns + column) * packs + channel;
                    g[k].v = dy[at], won[k] = winners[at];
                }
            }
#pragma unroll
            for (int a = 0; a < 2; a++)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    int row = line.row * 2 - top + a, column = place * 2 - left + b;
                    if ((u32)row >= (u32)height || (u32)column >= (u32)width) continue;
                    Pack<bf16, 8> sum;
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        sum.v[c] = 0.0f;
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            if ((k < 2 && a) || (k % 2 == 0 && b)) continue;
                            u32 name = (k < 2 ? 2 : a) * 3 + (k % 2 ? b : 2), winner = (c < 4 ? won[k].x : won[k].y) >> c % 4 * 8 & 0xff;
                            sum.v[c] += winner == name ? g[k].at(c) : 0.0f;
                        }
                    }
                    sum.store(reinterpret_cast<bf16*>(dx + pixels + (row * width + column) * packs + channel));
                }
        }
    }
}

#define MAX_POOL(name, T, I)                                                                                                   \
    KERNEL max_pool_##name(const T* x, T* y, I* winners, POOLING_PARAMETERS) {                                                 \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(x) && is_aligned(y) && is_aligned(winners))                                        \
            max_pool<T, W, I>(x, y, winners, batch, channels, POOLING);                                                        \
        else                                                                                                                   \
            max_pool<T, 1, I>(x, y, winners, batch, channels, POOLING);                                                        \
    }                                                                                                                          \
    KERNEL max_pool_grad_##name(const T* dy, const I* winners, T* dx, POOLING_PARAMETERS) {                                    \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(dy) && is_aligned(dx) && is_aligned(winners))                                      \
            max_pool_grad<T, W, I>(dy, winners, dx, batch, channels, POOLING);                                                 \
        else                                                                                                                   \
            max_pool_grad<T, 1, I>(dy, winners, dx, batch, channels, POOLING);                                                 \
    }
MAX_POOL(f32, float, u8)
MAX_POOL(bf16, bf16, u8)
MAX_POOL(large_f32, float, int)
MAX_POOL(large_bf16, bf16, int)

#define POOL(type, T)                                                                                                          \
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
    KERNEL average_pool_grad_##type(const T* dy, T* dx, POOLING_PARAMETERS) {                                                  \
        const int W = Wide<T>::width;                                                                                          \
        if (channels % W == 0 && is_aligned(dy) && is_aligned(dx)) average_pool_grad<T, W>(dy, dx, batch, channels, POOLING);  \
        else average_pool_grad<T, 1>(dy, dx, batch, channels, POOLING);                                                        \
    }
POOL(f32, float)
POOL(bf16, bf16)
