// Convolutions of images with few channels, forward and for the gradient of the weights: products on matrix units (m16n8k16 in bf16,
// sums in f32) whose left side is read from the image in shared memory. Bound: the result, or its gradient, moved once.
//
// A block of warps takes bands of whole rows of the result, `band` at most, one after the other; blockIdx.y numbers 64 outputs.

#define STEM_PARAMETERS                                                                                                        \
    i64 batch, int height, int width, int depth, int rows, int columns, int outputs, int kernel_h, int kernel_w, int stride_h, \
        int stride_w, int top, int left, int band, int pitch
#define STEM                                                                                                                   \
    Stem { height, width, depth, rows, columns, outputs, kernel_h, kernel_w, stride_h, stride_w, top, left, band, pitch }

struct Stem {
    int height, width, depth, rows, columns, outputs, kernel_h, kernel_w, stride_h, stride_w, top, left, band, pitch;
};

// Where a band lies: its first row, rows, and the rows of the image under it.
struct Band {
    i64 image;
    int row, rows, under;
    __device__ __forceinline__ Band(const Stem& s, i64 index) {
        int bands = (s.rows + s.band - 1) / s.band;
        image = divide(index, bands);
        row = (int)(index - image * bands) * s.band;
        rows = min(s.band, s.rows - row);
        under = (rows - 1) * s.stride_h + s.kernel_h;
    }
};

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// i divided by what `share` is one over; exact below four million.
__device__ __forceinline__ int quotient(int i, float share) { return (int)(((float)i + 0.5f) * share); }

// Where two numbers of an image stand; below zero where there is none.
struct Pair {
    int first, second;
    __device__ __forceinline__ Pair(bool is_row, int row, int first_, int second_, int length) {
        first = is_row && (u32)first_ < (u32)length ? row * length + first_ : -1;
        second = is_row && (u32)second_ < (u32)length ? row * length + second_ : -1;
    }
};

// Writes n words of two numbers each, zero where there is none. All loads of U words are under way before the first is looked at.
template <int U, typename F> __device__ __forceinline__ void fill(u32* to, int n, const bf16* from, F pair) {
#pragma unroll 1
    for (int start = threadIdx.x; start < n; start += U * blockDim.x) {
        bf16 low[U], high[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            Pair found = pair(min(start + u * (int)blockDim.x, n - 1));
            low[u] = high[u] = 0;
            if (found.first >= 0) low[u] = from[found.first];
            if (found.second >= 0) high[u] = from[found.second];
        }
#pragma unroll
        for (int u = 0; u < U; u++)
            if (start + u * (int)blockDim.x < n) to[start + u * blockDim.x] = low[u] | (u32)high[u] << 16;
    }
}

// Two results as bf16; what is below zero becomes zero if `relu`.
__device__ __forceinline__ u32 stem_result(float first, float second, bool relu) {
    u32 pair;
    if (relu) asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    else pair = to_bf16_pair(first, second);
    return pair;
}

// Which of eight results that are not below zero are above: those of the words' lower halves in bits 0 to 3, of the upper in 4 to 7.
__device__ __forceinline__ u32 stem_gate(const u32 (&words)[4]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits |= ((words[i] + 0x7fff7fffu) >> (15 - i)) & (0x00010001u << i);
    return (bits | bits >> 12) & 0xff;
}

extern __shared__ uint4 stem_room[];

// The taps of a row of the kernel stand in pairs, the last filled up with a tap that is zero; so a step of 16 is eight pairs. A word of
// shared memory holds two numbers of the image that follow each other: one for each number, or for each second one where all windows
// begin at even ones. Output 2i + b of eight that a thread group t has in tile j is (j / 4)·32 + 8·t + 2·(j % 4) + b, so that a thread's
// results of four tiles are 16 bytes.
template <int STEPS, int TILES>
__device__ __forceinline__ void stem_forward(const bf16* x, const bf16* w, const float* bias, bf16* y, unsigned char* gate, int relu,
                                             i64 batch, const Stem& s) {
    const int pairs = (s.kernel_w * s.depth + 1) / 2, steps = STEPS ? STEPS : (s.kernel_h * pairs + 7) / 8;
    const int jump = s.depth * s.stride_w % 2 ? 1 : 2, length = s.kernel_w * s.depth, taps = s.kernel_h * length;
    u32* weights = reinterpret_cast<u32*>(stem_room);
    int* places = reinterpret_cast<int*>(weights + steps * 512);
    int* windows = places + steps * 8;
    u32* image = reinterpret_cast<u32*>(windows + s.band * s.columns);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    int outputs = min(64, s.outputs - (int)blockIdx.y * 64);
    float per_row = 1.0f / (float)s.pitch;
    w += (i64)blockIdx.y * 64 * taps;

    fill<2>(weights, steps * 512, w, [&](int i) {
        int of = i / 4 % 32, tile = i / 128 % 4 * 2 + i % 4 / 2, column = of / 4;
        int pair = i / 512 * 8 + i % 2 * 4 + of % 4, row = pair / pairs, tap = pair % pairs * 2;
        int output = tile / 4 * 32 + column / 2 * 8 + tile % 4 * 2 + column % 2;
        return Pair(row < s.kernel_h && output < outputs, output * s.kernel_h + row, tap, tap + 1, length);
    });
    for (int i = threadIdx.x; i < steps * 8; i += blockDim.x)
        places[i] = i / pairs < s.kernel_h ? i / pairs * s.pitch + i % pairs * 2 / jump : 0;
    for (int i = threadIdx.x; i < s.band * s.columns; i += blockDim.x)
        windows[i] = i / s.columns * s.stride_h * s.pitch + i % s.columns * s.stride_w * s.depth / jump;
    float add[8][2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
            int output = j / 4 * 32 + t * 8 + j % 4 * 2 + b;
            add[j][b] = bias && output < outputs ? bias[blockIdx.y * 64 + output] : 0.0f;
        }
    __syncthreads();
    u32 kept[STEPS ? STEPS : 1][16];
    int place[STEPS ? STEPS : 1][2];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint4 four = reinterpret_cast<const uint4*>(weights)[(k * 4 + q) * 32 + lane];
            kept[k][q * 4] = four.x, kept[k][q * 4 + 1] = four.y, kept[k][q * 4 + 2] = four.z, kept[k][q * 4 + 3] = four.w;
        }
        place[k][0] = places[k * 8 + t], place[k][1] = places[k * 8 + 4 + t];
    }

    i64 bands = batch * ((s.rows + s.band - 1) / s.band);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < bands; index += gridDim.x) {
        Band band(s, index);
        __syncthreads();
        const bf16* picture = x + band.image * s.height * s.width * s.depth;
        fill<8>(image, band.under * s.pitch, picture, [&](int i) {
            int row = quotient(i, per_row), first = (i - row * s.pitch) * jump - s.left * s.depth;
            int from = band.row * s.stride_h - s.top + row;
            return Pair((u32)from < (u32)s.height, from, first, first + 1, s.width * s.depth);
        });
        __syncthreads();
        int pixels = band.rows * s.columns;
        i64 start = ((band.image * s.rows + band.row) * s.columns * s.outputs + blockIdx.y * 64) / 8;
        uint4* results = reinterpret_cast<uint4*>(y) + start;
        unsigned char* passes = gate + start;
#pragma unroll 1
        for (int tile = warp * TILES; tile * 16 < pixels; tile += warps * TILES) {
            float sum[TILES][8][4];
            const u32* window[TILES][2];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) window[m][h] = image + windows[min((tile + m) * 16 + h * 8 + g, pixels - 1)];
#pragma unroll
                for (int j = 0; j < 8; j++) sum[m][j][0] = sum[m][j][2] = add[j][0], sum[m][j][1] = sum[m][j][3] = add[j][1];
            }
#pragma unroll
            for (int k = 0; k < steps; k++) {
                int first = STEPS ? place[STEPS ? k : 0][0] : places[k * 8 + t];
                int second = STEPS ? place[STEPS ? k : 0][1] : places[k * 8 + 4 + t];
                u32 b[16];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    if (STEPS) {
#pragma unroll
                        for (int i = 0; i < 4; i++) b[q * 4 + i] = kept[STEPS ? k : 0][q * 4 + i];
                    } else {
                        uint4 four = reinterpret_cast<const uint4*>(weights)[(k * 4 + q) * 32 + lane];
                        b[q * 4] = four.x, b[q * 4 + 1] = four.y, b[q * 4 + 2] = four.z, b[q * 4 + 3] = four.w;
                    }
                }
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    u32 a[4] = {window[m][0][first], window[m][1][first], window[m][0][second], window[m][1][second]};
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        if (j < 4 || outputs > 32) multiply(sum[m][j], a, b[2 * j], b[2 * j + 1]);
                }
            }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int pixel = (tile + m) * 16 + h * 8 + g;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 words[4];
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            words[i] = stem_result(sum[m][half * 4 + i][h * 2], sum[m][half * 4 + i][h * 2 + 1], relu);
                        if (pixel >= pixels || half * 32 + t * 8 >= outputs) continue;
                        int to = pixel * (s.outputs / 8) + half * 4 + t;
                        store_words(results + to, words);
                        if (gate) passes[to] = (unsigned char)stem_gate(words);
                    }
                }
        }
    }
}

#define STEM_FORWARD(name, STEPS, TILES)                                                                                       \
    KERNEL __launch_bounds__(256, 2) stem_forward_##name(const bf16* x, const bf16* w, const float* bias, bf16* y,             \
                                                         unsigned char* gate, int relu, STEM_PARAMETERS) {                     \
        stem_forward<STEPS, TILES>(x, w, bias, y, gate, relu, batch, STEM);                                                    \
    }
STEM_FORWARD(two, 2, 1)
STEM_FORWARD(any, 0, 2)

// The gradient of the weights. Rows of the product are taps, 32 for each warp (`groups` warps take all), columns outputs, and it sums over
// pixels, 16 of a row at a time; rows are filled up to whole steps with gradients of zero. Blocks leave their sums in partial[blockIdx.y][blockIdx.x][tap][64].
// With `gate`, only gradients whose bit is set count. The tap after the last is one everywhere: it sums the gradients themselves.
//
// A word of shared memory holds two numbers of one channel that stand under neighbouring pixels of the result: words[row][channel][column
// modulo the stride][column over the stride].

#define STEM_PIXELS 128

struct Gradients {
    uint4 words[4];
    u32 bits[4];
};

__device__ __forceinline__ u32 stem_mask(u32 bits, int i) {
    return select_bytes<0xcc88>(bits << (7 - i), bits << 3 >> i);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8×8 matrices, transposed.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void stem_grad(const bf16* x, const bf16* dy, const unsigned char* gate, float* partial, i64 batch, int groups,
                                          const Stem& s) {
    const int planes = s.depth * s.stride_w, taps = s.kernel_h * s.kernel_w * s.depth;
    const int across = (s.columns + 15) / 16, most = s.band * across;
    uint4* gradients = stem_room;
    // By step: its first pixel in the band, and pixels (in the lower five bits); its first word of the image.
    uint2* table = reinterpret_cast<uint2*>(stem_room + 2 * STEM_PIXELS * 8);
    u32* image = reinterpret_cast<u32*>(table + most + 8);
    for (int i = threadIdx.x; i < most + 8; i += blockDim.x) {
        int row = i / across, column = i % across * 16;
        u32 there = i < most ? min(16, s.columns - column) : 0;
        table[i] = make_uint2((row * s.columns + column) << 5 | there, row * s.stride_h * planes * s.pitch + column);
    }
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int group = warp % groups, part = warp / groups, parts = blockDim.x / 32 / groups;
    int outputs = min(64, s.outputs - (int)blockIdx.y * 64);
    float per_plane = 1.0f / (float)s.pitch, per_row = 1.0f / (float)planes, per_channel = 1.0f / (float)s.stride_w;
    // Where a thread's four taps begin, less the pixel.
    int places[2][2];
    bool one[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int tap = group * 32 + m * 16 + h * 8 + g, c = tap % s.depth, column = tap / s.depth % s.kernel_w;
            int row = tap / s.depth / s.kernel_w, plane = c * s.stride_w + column % s.stride_w;
            one[m][h] = tap == taps;
            places[m][h] = (tap < taps ? (row * planes + plane) * s.pitch + column / s.stride_w : 0) + 2 * t;
        }
    float sum[2][8][4] = {};
    __syncthreads();

    i64 bands = batch * ((s.rows + s.band - 1) / s.band);
#pragma unroll 1
    for (i64 index = blockIdx.x; index < bands; index += gridDim.x) {
        Band band(s, index);
        u32 pixels = band.rows * s.columns;
        int steps = band.rows * across;
        i64 start = ((band.image * s.rows + band.row) * s.columns * s.outputs + blockIdx.y * 64) / 8;
        const uint4* from = reinterpret_cast<const uint4*>(dy) + start;
        const unsigned char* passes = gate + start;
        Gradients next;
        auto load = [&](int chunk) {
#pragma unroll
            for (int u = 0; u < 4; u++) {
                u32 piece = threadIdx.x + u * blockDim.x, pixel = piece / 8 % 16, step = min(piece / 128, 7);
                u32 found = table[chunk * 8 + step].x, at = (found >> 5) + pixel;
                next.words[u] = make_uint4(0, 0, 0, 0), next.bits[u] = 0;
                if (piece < STEM_PIXELS * 8 && pixel < (found & 31) && at < pixels && piece % 8 * 8 < outputs) {
                    at = at * (s.outputs / 8) + piece % 8;
                    next.words[u] = from[at];
                    if (gate) next.bits[u] = passes[at];
                }
            }
        };
        load(0);
        __syncthreads();
        const bf16* picture = x + band.image * s.height * s.width * s.depth;
        fill<8>(image, band.under * planes * s.pitch, picture, [&](int i) {
            int all = quotient(i, per_plane), row = quotient(all, per_row), plane = all - row * planes, c = quotient(plane, per_channel);
            int first = ((i - all * s.pitch) * s.stride_w + plane - c * s.stride_w - s.left) * s.depth + c;
            int from = band.row * s.stride_h - s.top + row;
            return Pair((u32)from < (u32)s.height, from, first, first + s.stride_w * s.depth, s.width * s.depth);
        });
#pragma unroll 1
        for (int chunk = 0; chunk * 8 < steps; chunk++) {
            uint4* room = gradients + chunk % 2 * STEM_PIXELS * 8;
#pragma unroll
            for (int u = 0; u < 4; u++) {
                int piece = threadIdx.x + u * blockDim.x, pixel = piece / 8;
                uint4 words = next.words[u];
                if (gate) {
                    u32 bits = next.bits[u];
                    words.x &= stem_mask(bits, 0), words.y &= stem_mask(bits, 1);
                    words.z &= stem_mask(bits, 2), words.w &= stem_mask(bits, 3);
                }
                if (pixel < STEM_PIXELS) room[pixel * 8 + (piece % 8 ^ pixel % 8)] = words;
            }
            load(chunk + 1);
            __syncthreads();
#pragma unroll 1
            for (int step = part; step < 8 && chunk * 8 + step < steps; step += parts) {
                int away = table[chunk * 8 + step].y;
                u32 a[2][4], line = shared_address(room + (step * 16 + lane % 16) * 8);
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 pair = image[places[m][i % 2] + away + i / 2 * 8];
                        a[m][i] = one[m][i % 2] ? 0x3f803f80u : pair;
                    }
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    if (q * 16 >= outputs) break;
                    u32 b[4];
                    load_transposed(b, line + ((2 * q + lane / 16) ^ lane % 8) * 16);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        multiply(sum[m][2 * q], a[m], b[0], b[1]);
                        multiply(sum[m][2 * q + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
    }

    float* totals = reinterpret_cast<float*>(stem_room);
#pragma unroll 1
    for (int turn = 0; turn < parts; turn++) {
        __syncthreads();
        if (part == turn)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float* to = totals + (group * 32 + m * 16 + i / 2 * 8 + g) * 64 + j * 8 + t * 2 + i % 2;
                        *to = turn ? *to + sum[m][j][i] : sum[m][j][i];
                    }
    }
    __syncthreads();
    partial += ((i64)blockIdx.y * gridDim.x + blockIdx.x) * groups * 2048;
    for (int i = threadIdx.x; i < groups * 2048; i += blockDim.x) partial[i] = totals[i];
}

KERNEL __launch_bounds__(256, 2) stem_gradient(const bf16* x, const bf16* dy, const unsigned char* gate, float* partial, int groups, STEM_PARAMETERS) {
    stem_grad(x, dy, gate, partial, batch, groups, STEM);
}

// Adds up what blocks have found, in their order: 32 outputs of a tap by 8 parts of the blocks. The gradient of the weights goes to
// [tap][output], or to [output][tap] if `last`; the sum of the gradients to `bias`, where it is wanted.
KERNEL stem_totals(const float* partial, int blocks, int groups, int taps, int outputs, int last, float* dw, float* bias) {
    __shared__ double room[256];
    int x = threadIdx.x % 32, y = threadIdx.x / 32, tap = blockIdx.x / 2, output = blockIdx.x % 2 * 32 + x;
    const float* from = partial + (i64)blockIdx.y * blocks * groups * 2048 + tap * 64 + output;
    double sum = 0.0;
#pragma unroll 4
    for (int block = y; block < blocks; block += 8) sum += from[(i64)block * groups * 2048];
    room[threadIdx.x] = sum;
#pragma unroll 1
    for (int half = 4; half > 0; half /= 2) {
        __syncthreads();
        if (y < half) room[threadIdx.x] += room[threadIdx.x + half * 32];
    }
    output += blockIdx.y * 64;
    if (y != 0 || output >= outputs) return;
    if (tap < taps) dw[last ? (i64)output * taps + tap : (i64)tap * outputs + output] = (float)room[x];
    else if (bias) bias[output] = (float)room[x];
}
