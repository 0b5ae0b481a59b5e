// Rows of a table chosen by ids, and the gradient that adds into those rows in the order of the ids.

// An id outside the table gives NaN.
template <typename T, int W>
__device__ __forceinline__ void embed(const int* ids, const float* table, T* y, i64 count, i64 rows, i64 width) {
    i64 packs = divide(width, W), n = count * packs;
    for (i64 i = first_index(); i < n; i += all_threads()) {
        i64 at = divide(i, packs), column = (i - at * packs) * W;
        i64 id = ids[at];
        Pack<float, W> from;
        Pack<T, W> to;
        if (id >= 0 && id < rows) {
            from.load(table + id * width + column);
        } else {
#pragma unroll
            for (int k = 0; k < W; k++) from.v[k] = __int_as_float(0x7fc00000);
        }
#pragma unroll
        for (int k = 0; k < W; k++) to.v[k] = from.v[k];
        to.store(y + at * width + column);
    }
}

// Places of ids that a block keeps before it adds their rows.
#define PLACES 1024

// A block of 256 threads owns `span` rows of the table. It walks all ids, keeps the places of its own in their order, and
// adds those rows of dy whenever it has enough. A thread owns its columns, so every sum has one author.
template <typename T, int W>
__device__ __forceinline__ void embed_grad(const T* dy, const int* ids, float* dtable, i64 count, i64 rows, i64 width,
                                           i64 span) {
    __shared__ i64 places[PLACES];
    __shared__ int owners[PLACES];
    __shared__ int found[8];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (i64 first = blockIdx.x * span; first < rows; first += gridDim.x * span) {
        i64 last = first + span < rows ? first + span : rows;
        int kept = 0;
        bool fresh = true;
        for (i64 base = 0; base < count; base += 256) {
            i64 at = base + threadIdx.x;
            i64 id = at < count ? ids[at] : -1;
            bool mine = id >= first && id < last;
            u32 votes = __ballot_sync(0xffffffffu, mine);
            __syncthreads();
            if (lane == 0) found[warp] = __popc(votes);
            __syncthreads();
            int place = kept + __popc(votes & ((1u << lane) - 1));
#pragma unroll
            for (int w = 0; w < 8; w++) {
                if (w < warp) place += found[w];
                kept += found[w];
            }
            if (mine) places[place] = at, owners[place] = (int)(id - first);
            if (kept + 256 <= PLACES && base + 256 < count) continue;
            __syncthreads();
            if (kept > 0 || fresh) {
                for (i64 column = (i64)threadIdx.x * W; column < width; column += 256 * W) {
                    for (int owner = 0; owner < last - first; owner++) {
                        float* to = dtable + (first + owner) * width + column;
                        Pack<float, W> sum;
                        if (fresh) {
#pragma unroll
                            for (int i = 0; i < W; i++) sum.v[i] = 0.0f;
                        } else {
                            sum.load(to);
                        }
#pragma unroll 4
                        for (int k = 0; k < kept; k++) {
                            if (owners[k] == owner) {
                                Pack<T, W> next;
                                next.load(dy + places[k] * width + column);
#pragma unroll
                                for (int i = 0; i < W; i++) sum.v[i] += next.v[i];
                            }
                        }
                        sum.store(to);
                    }
                }
            }
            fresh = false;
            kept = 0;
        }
    }
}

#define EMBEDDING(type, T)                                                                                                     \
    KERNEL embedding_##type(const int* ids, const float* table, T* y, i64 count, i64 rows, i64 width) {                        \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(table) && is_aligned(y)) embed<T, W>(ids, table, y, count, rows, width);              \
        else embed<T, 1>(ids, table, y, count, rows, width);                                                                   \
    }                                                                                                                          \
    KERNEL embedding_grad_##type(const T* dy, const int* ids, float* dtable, i64 count, i64 rows, i64 width, i64 span) {       \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(dy) && is_aligned(dtable))                                                            \
            embed_grad<T, W>(dy, ids, dtable, count, rows, width, span);                                                       \
        else                                                                                                                   \
            embed_grad<T, 1>(dy, ids, dtable, count, rows, width, span);                                                       \
    }
EMBEDDING(f32, float)
EMBEDDING(bf16, bf16)
