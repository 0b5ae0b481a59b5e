// Convolutions of few channels, multiples of 16, by kernels of 3×3 or 1×1: products on matrix units (m16n8k16 in bf16, sums in f32) whose
// sides are read from shared memory. Bound: images and results moved once.
//
// What a block has in shared memory at one time is a stage: `images` whole images, or `band` rows of the result of one image, with all of
// the image that lies under them, zeros around it included. Two stages have room, so that the next one is on its way while one is
// computed with. Eight channels of a pixel are a piece of 16 bytes; pieces of the same channels stand together, pixel after
// pixel, in a plane: those of eight neighbours are 128 bytes, one of each bank. A plane is 8n + 4 pieces long, so that the next one begins half
// of the banks further on: the pieces of four neighbours in two planes lie in different banks too.

#define NARROW_PARAMETERS                                                                                                      \
    int batch, int height, int width, int channels, int rows, int columns, int outputs, int stride, int top, int left,         \
        int band, int images
#define NARROW                                                                                                                 \
    { batch, height, width, channels, rows, columns, outputs, stride, top, left, band, images }

extern __shared__ uint4 narrow_room[];

template <int SIZE> struct Narrow {
    int batch, height, width, channels, rows, columns, outputs, stride, top, left, band, images;
    // From one window to the next in a stage, and from one pixel to the next in the image: a kernel of one pixel leaves out what it skips.
    __device__ __forceinline__ int step() const { return SIZE == 1 ? 1 : stride; }
    __device__ __forceinline__ int jump() const { return SIZE == 1 ? stride : 1; }
    // Rows and columns of an image in a stage, pixels of the result in a stage, and stages.
    __device__ __forceinline__ int under() const { return (band - 1) * step() + SIZE; }
    __device__ __forceinline__ int across() const { return (columns - 1) * step() + SIZE; }
    __device__ __forceinline__ int pixels() const { return images * band * columns; }
    __device__ __forceinline__ int bands() const { return (rows + band - 1) / band; }
    __device__ __forceinline__ int stages() const { return (batch + images - 1) / images * bands(); }
    // Pieces of a plane with room for so many.
    __device__ __forceinline__ static int plane(int pieces) { return (pieces + 3) / 8 * 8 + 4; }
};

// Where a stage lies, and how many pixels of the result it has.
struct Stage {
    int image, row, images, pixels;
    template <int SIZE> __device__ __forceinline__ Stage(const Narrow<SIZE>& s, int index) {
        image = index / s.bands() * s.images, row = index % s.bands() * s.band;
        images = min(s.images, s.batch - image), pixels = images * min(s.band, s.rows - row) * s.columns;
    }
};

// 16 bytes from global to shared memory; zeros if there is nothing.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most so many groups of copies are under way.
template <int GROUPS> __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }

// Four 8×8 matrices.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// The same, transposed if all threads of the warp say so. A branch would keep other loads from starting before it.
__device__ __forceinline__ void load_either(u32 (&to)[4], u32 address, bool transposed) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 "@!p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n}"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address), "r"((u32)transposed)
                 : "memory");
}

// One over a whole number, for `quotient`, without the branches of a division. It is at most two units of the last place off, with which
// `quotient` is exact for i below 1.6 million; the largest i here counts pieces in shared memory, of which there are at most 6144.
__device__ __forceinline__ float share(int of) { return __fdividef(1.0f, (float)of); }

// Fetches the images of a stage: so many pieces of each pixel.
template <int SIZE>
__device__ __forceinline__ void fetch_images(u32 to, const bf16* x, int pieces, const Narrow<SIZE>& s, const Stage& stage) {
    const int across = s.across(), under = s.under(), pixels = s.images * under * across, plane = s.plane(pixels);
    const float per_piece = share(pieces), per_line = share(across), per_image = share(under);
    x += (i64)stage.image * s.height * s.width * s.channels;
#pragma unroll 2
    for (int i = threadIdx.x; i < pixels * pieces; i += blockDim.x) {
        int pixel = quotient(i, per_piece), piece = i - pixel * pieces, line = quotient(pixel, per_line);
        int image = quotient(line, per_image), row = stage.row * s.stride - s.top + (line - image * under) * s.jump();
        int column = (pixel - line * across) * s.jump() - s.left;
        bool there = image < stage.images && (u32)row < (u32)s.height && (u32)column < (u32)s.width;
        int from = ((image * s.height + row) * s.width + column) * s.channels + piece * 8;
        copy_piece(to + (piece * plane + pixel) * 16, x + (there ? from : 0), there);
    }
}

// By pixel of a stage: the first pixel of the image under it. Those that fill up the last step of 16 have the first.
template <int SIZE> __device__ __forceinline__ void list_windows(int* windows, const Narrow<SIZE>& s) {
    const int in_image = s.band * s.columns, pixels = s.pixels();
    for (int i = threadIdx.x; i < (pixels + 15) / 16 * 16; i += blockDim.x) {
        int image = i / in_image, row = i % in_image / s.columns, column = i % s.columns;
        windows[i] = i < pixels ? (image * s.under() + row * s.step()) * s.across() + column * s.step() : 0;
    }
}

// Goes through a block's stages, the first two of which are `fetch`ed before the first is `use`d; both get a stage and the slot that it
// is in.
template <int SIZE, typename F, typename G> __device__ __forceinline__ void each_stage(const Narrow<SIZE>& s, F fetch, G use) {
    const int stages = s.stages();
#pragma unroll 1
    for (int ahead = 0; ahead < 2; ahead++) {
        int index = blockIdx.x + ahead * gridDim.x;
        if (index < stages) fetch(Stage(s, index), ahead);
        close_copies();
    }
    int slot = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < stages; index += gridDim.x) {
        await_copies<1>();
        __syncthreads();
        use(Stage(s, index), slot);
        int next = index + 2 * gridDim.x;
        if (next < stages) {
            __syncthreads();
            fetch(Stage(s, next), slot);
        }
        close_copies();
        slot = 1 - slot;
    }
    await_copies<0>();
    __syncthreads();
}

// The gradient of the weights. Rows of the product are 16 outputs, columns 16 channels (blockIdx.y says which: channels first), and it sums
// over pixels, 16 at a time. A warp takes a row of the kernel and each nth step. Blocks leave their sums in
// partial[blockIdx.y][blockIdx.x][tap][output][channel].
#define NARROW_WARPS 12

template <int SIZE>
__device__ __forceinline__ void narrow_grad(const bf16* x, const bf16* dy, float* partial, const Narrow<SIZE>& s) {
    const int PARTS = NARROW_WARPS / SIZE, TAPS = SIZE * SIZE;
    const int across = s.across(), steps = (s.pixels() + 15) / 16;
    const int plane = s.plane(s.images * s.under() * across), line = s.plane(steps * 16), slot_bytes = (plane + line) * 32;
    int* windows = reinterpret_cast<int*>(narrow_room);
    const u32 slots = shared_address(narrow_room) + steps * 64;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, row = warp / PARTS, part = warp % PARTS;
    // Which pixel of 16, and which of its two pieces, a thread has the address of.
    int of = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    x += blockIdx.y % (s.channels / 16) * 16, dy += blockIdx.y / (s.channels / 16) * 16;
    float sum[SIZE][2][4] = {};
    list_windows(windows, s);
    each_stage(
        s,
        [&](const Stage& stage, int slot) {
            u32 to = slots + slot * slot_bytes;
            fetch_images(to, x, 2, s, stage);
            to += plane * 32;
            const bf16* from = dy + ((i64)stage.image * s.rows + stage.row) * s.columns * s.outputs;
            for (int i = threadIdx.x; i < steps * 32; i += blockDim.x) {
                bool there = i / 2 < stage.pixels;
                copy_piece(to + (i % 2 * line + i / 2) * 16, from + (there ? i / 2 * s.outputs + i % 2 * 8 : 0), there);
            }
        },
        [&](const Stage& stage, int slot) {
            u32 image = slots + slot * slot_bytes + (half * plane + row * across) * 16;
            u32 gradient = slots + slot * slot_bytes + (plane * 2 + half * line + of) * 16;
            int window = windows[min(part, steps - 1) * 16 + of];
#pragma unroll 2
            for (int step = part; step * 16 < stage.pixels; step += PARTS) {
                u32 a[4], from = image + window * 16;
                window = windows[min(step + PARTS, steps - 1) * 16 + of];
                load_transposed(a, gradient + step * 256);
#pragma unroll
                for (int column = 0; column < SIZE; column++) {
                    u32 b[4];
                    load_transposed(b, from + column * 16);
                    multiply(sum[column][0], a, b[0], b[2]);
                    multiply(sum[column][1], a, b[1], b[3]);
                }
            }
        });

    float* totals = reinterpret_cast<float*>(narrow_room);
#pragma unroll
    for (int column = 0; column < SIZE; column++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float* to = totals + ((part * TAPS + row * SIZE + column) * 16 + h * 8 + g) * 16 + j * 8 + t * 2;
                *reinterpret_cast<float2*>(to) = make_float2(sum[column][j][h * 2], sum[column][j][h * 2 + 1]);
            }
    __syncthreads();
    partial += ((i64)blockIdx.y * gridDim.x + blockIdx.x) * TAPS * 256;
    for (int i = threadIdx.x; i < TAPS * 256; i += blockDim.x) {
        float all = 0.0f;
#pragma unroll
        for (int of_warps = 0; of_warps < PARTS; of_warps++) all += totals[of_warps * TAPS * 256 + i];
        partial[i] = all;
    }
}

#define NARROW_GRADIENT(SIZE)                                                                                                  \
    KERNEL __launch_bounds__(NARROW_WARPS * 32, 2) narrow_gradient_##SIZE(const bf16* x, const bf16* dy, float* partial, NARROW_PARAMETERS) { \
        wait_for_last();                                                                                                       \
        narrow_grad<SIZE>(x, dy, partial, NARROW);                                                                             \
    }
NARROW_GRADIENT(1)
NARROW_GRADIENT(3)

// Adds up what blocks have found, in their order: 32 sums by 8 parts of the blocks. The gradient of the weights goes to
// [tap][channel][output], or to [output][tap][channel] if `last`.
KERNEL narrow_totals(const float* partial, int blocks, int taps, int channels, int outputs, int last, float* dw) {
    wait_for_last();
    __shared__ float room[256];
    int x = threadIdx.x % 32, y = threadIdx.x / 32, i = blockIdx.x * 32 + x;
    const float* from = partial + (i64)blockIdx.y * blocks * taps * 256 + i;
    float sum = 0.0f;
#pragma unroll 16
    for (int block = y; block < blocks; block += 8) sum += from[(i64)block * taps * 256];
    room[threadIdx.x] = sum;
#pragma unroll 1
    for (int half = 4; half > 0; half /= 2) {
        __syncthreads();
        if (y < half) room[threadIdx.x] += room[threadIdx.x + half * 32];
    }
    if (y != 0) return;
    int tap = i / 256, output = blockIdx.y / (channels / 16) * 16 + i / 16 % 16, c = blockIdx.y % (channels / 16) * 16 + i % 16;
    dw[last ? (output * taps + tap) * channels + c : (tap * channels + c) * outputs + output] = room[x];
}

// Four threads have a word each of four vectors of four words; each gets the vector of its number.
__device__ __forceinline__ void exchange_words(u32 (&words)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(0xffffffffu, t & 1 ? words[i] : words[i + 1], 1);
        if (t & 1) words[i] = got;
        else words[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 got = __shfl_xor_sync(0xffffffffu, t & 2 ? words[i] : words[i + 2], 2);
        if (t & 2) words[i] = got;
        else words[i + 2] = got;
    }
}

// The forward pass: rows of the product are pixels, 16·TILES for a warp, columns 16·WIDE outputs (blockIdx.y says which), and it sums over
// channels, 16 at a time, of each tap. `turned` is the gradient of the image at stride 1: the same with a kernel that is
// mirrored and whose outputs are channels; `channels` and `outputs` are then those of this pass, and weights stand as
// [channel][tap][output]. A kernel of 3×3 is for 16 channels, and its weights are kept in registers.
template <int SIZE, int WIDE>
__device__ __forceinline__ void narrow_pass(const bf16* x, const bf16* w, bf16* y, bool turned, const Narrow<SIZE>& s) {
    const bool KEPT = SIZE == 3;
    const int TAPS = SIZE * SIZE, SLICE = WIDE * 16, TILES = KEPT ? 2 : 1;
    const int across = s.across(), steps = (s.pixels() + 15) / 16, pieces = s.channels / 8, deep = KEPT ? 1 : s.channels / 16;
    const int plane = s.plane(s.images * s.under() * across), slot_bytes = plane * pieces * 16;
    // Lines of weights, with one piece more than they have, so that eight lines lie in different banks.
    const int lines = turned ? s.channels : SLICE, of_tap = turned ? WIDE * 2 : pieces, pitch = TAPS * of_tap + 1;
    int* windows = reinterpret_cast<int*>(narrow_room);
    const u32 weights = shared_address(narrow_room) + steps * 64, slots = weights + lines * pitch * 16;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    int first = blockIdx.y * SLICE;

    const float per_line = share(TAPS * of_tap), per_tap = share(of_tap);
    for (int i = threadIdx.x; i < lines * TAPS * of_tap; i += blockDim.x) {
        int line = quotient(i, per_line), piece = i - line * TAPS * of_tap, tap = quotient(piece, per_tap);
        int from = turned ? (line * TAPS + tap) * s.outputs + first + (piece - tap * of_tap) * 8 : first * TAPS * s.channels + i * 8;
        copy_piece(weights + (line * pitch + piece) * 16, w + from, true);
    }
    list_windows(windows, s);
    // Where a thread's part of the first matrices of weights stands, and how far the next tap, channels and outputs are.
    const u32 own = weights + (turned ? lane % 16 * pitch + lane / 16 + (TAPS - 1) * of_tap : (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2) * 16;
    const int next_tap = (turned ? -of_tap : of_tap) * 16, next_deep = (turned ? 16 * pitch : 2) * 16, next_wide = (turned ? 2 : 16 * pitch) * 16;
    auto load_weights = [&](u32 (&b)[4], int tap, int d, int q) {
        load_either(b, own + tap * next_tap + d * next_deep + q * next_wide, turned);
    };
    u32 kept[KEPT ? TAPS : 1][WIDE][4];
    bool loaded = false;
    each_stage(
        s, [&](const Stage& stage, int slot) { fetch_images(slots + slot * slot_bytes, x, pieces, s, stage); },
        [&](const Stage& stage, int slot) {
            if (KEPT && !loaded) {
                loaded = true;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
                    for (int q = 0; q < WIDE; q++) load_weights(kept[KEPT ? tap : 0][q], tap, 0, q);
            }
            u32 image = slots + slot * slot_bytes + lane / 16 * plane * 16;
            bf16* results = y + ((i64)stage.image * s.rows + stage.row) * s.columns * s.outputs + first;
#pragma unroll 1
            for (int tile = warp * TILES; tile * 16 < stage.pixels; tile += warps * TILES) {
                float sum[TILES][WIDE * 2][4] = {};
                u32 from[TILES];
#pragma unroll
                for (int m = 0; m < TILES; m++) from[m] = image + windows[min(tile + m, steps - 1) * 16 + lane % 16] * 16;
#pragma unroll 1
                for (int d = 0; d < deep; d++) {
#pragma unroll
                    for (int tap = 0; tap < TAPS; tap++) {
                        u32 a[TILES][4];
#pragma unroll
                        for (int m = 0; m < TILES; m++)
                            load_matrices(a[m], from[m] + (d * 2 * plane + tap / SIZE * across + tap % SIZE) * 16);
#pragma unroll
                        for (int q = 0; q < WIDE; q++) {
                            u32 b[4];
                            if (!KEPT) load_weights(b, tap, d, q);
#pragma unroll
                            for (int i = 0; i < 4; i++) b[i] = KEPT ? kept[KEPT ? tap : 0][q][i] : b[i];
#pragma unroll
                            for (int m = 0; m < TILES; m++) {
                                multiply(sum[m][q * 2], a[m], b[0], b[1]);
                                multiply(sum[m][q * 2 + 1], a[m], b[2], b[3]);
                            }
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int q = 0; q < WIDE; q++) {
                        u32 words[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float* two = sum[m][q * 2 + i % 2] + i / 2 * 2;
                            words[i] = to_bf16_pair(two[0], two[1]);
                        }
                        exchange_words(words, t);
                        int pixel = (tile + m) * 16 + t / 2 * 8 + g;
                        if (pixel < stage.pixels) store_words(results + pixel * s.outputs + q * 16 + t % 2 * 8, words);
                    }
            }
        });
}

#define NARROW_PASS(SIZE, SLICE)                                                                                               \
    KERNEL __launch_bounds__(256, 2)                                                                                           \
        narrow_pass_##SIZE##_##SLICE(const bf16* x, const bf16* w, bf16* y, int turned, NARROW_PARAMETERS) {                   \
        wait_for_last();                                                                                                       \
        narrow_pass<SIZE, SLICE / 16>(x, w, y, turned, NARROW);                                                                \
    }
NARROW_PASS(1, 32)
NARROW_PASS(3, 16)
NARROW_PASS(3, 32)
