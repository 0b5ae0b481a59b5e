// Kernels over the last dim: softmax, cross-entropy and layer normalisation. A row belongs to a team, a warp or a block of
// 256 threads, as its width asks; it is read from memory once and then from cache.

template <int TEAM> struct Team;

template <> struct Team<32> {
    int rank;
    i64 row, stride;
    __device__ __forceinline__ Team() {
        rank = threadIdx.x % 32;
        row = first_index() / 32, stride = all_threads() / 32;
    }
    __device__ __forceinline__ float sum(float x) const { return sum_of_warp(x); }
    __device__ __forceinline__ float max(float x) const { return max_of_warp(x); }
};

template <> struct Team<256> {
    int rank;
    i64 row, stride;
    __device__ __forceinline__ Team() {
        rank = threadIdx.x;
        row = blockIdx.x, stride = gridDim.x;
    }
    __device__ __forceinline__ float* room() const {
        __shared__ float room[32];
        return room;
    }
    __device__ __forceinline__ float sum(float x) const { return sum_of_block(x, room()); }
    __device__ __forceinline__ float max(float x) const { return max_of_block(x, room()); }
};

// The largest of the first `seen` numbers, and the sum of the exponentials of their distances from it.
template <typename T, int W, int TEAM> struct Exponentials {
    float top, sum;
    __device__ __forceinline__ Exponentials(const Team<TEAM>& team, const T* x, i64 seen) {
        top = -__int_as_float(0x7f800000);
#pragma unroll 4
        for (i64 at = (i64)team.rank * W; at < seen; at += TEAM * W) {
            Pack<T, W> pack;
            pack.load(x + at);
#pragma unroll
            for (int i = 0; i < W; i++)
                if (at + i < seen) top = fmaxf(top, pack.v[i]);
        }
        top = team.max(top);
        sum = 0.0f;
#pragma unroll 4
        for (i64 at = (i64)team.rank * W; at < seen; at += TEAM * W) {
            Pack<T, W> pack;
            pack.load(x + at);
#pragma unroll
            for (int i = 0; i < W; i++)
                if (at + i < seen) sum += expf(pack.v[i] - top);
        }
        sum = team.sum(sum);
    }
};

template <typename T, int W, int TEAM>
__device__ __forceinline__ void softmax_rows(const T* x, T* y, i64 rows, i64 width, int causal) {
    Team<TEAM> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        const T* from = x + row * width;
        i64 seen = causal ? row % width + 1 : width;
        Exponentials<T, W, TEAM> exponentials(team, from, seen);
        float factor = 1.0f / exponentials.sum;
#pragma unroll 2
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> pack;
            pack.load(from + at);
#pragma unroll
            for (int i = 0; i < W; i++) pack.v[i] = at + i < seen ? factor * expf(pack.v[i] - exponentials.top) : 0.0f;
            pack.store(y + row * width + at);
        }
    }
}

// dx = y·(dy − Σ dy·y); dx may be dy.
template <typename T, int W, int TEAM>
__device__ __forceinline__ void softmax_grad_rows(const T* dy, const T* y, T* dx, i64 rows, i64 width) {
    Team<TEAM> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        i64 start = row * width;
        float product = 0.0f;
#pragma unroll 2
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> a, b;
            a.load(dy + start + at), b.load(y + start + at);
#pragma unroll
            for (int i = 0; i < W; i++) product += a.v[i] * b.v[i];
        }
        product = team.sum(product);
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> a, b;
            a.load(dy + start + at), b.load(y + start + at);
#pragma unroll
            for (int i = 0; i < W; i++) a.v[i] = b.v[i] * (a.v[i] - product);
            a.store(dx + start + at);
        }
    }
}

// The loss of each row. A target that is no class makes it NaN.
template <int W, int TEAM>
__device__ __forceinline__ void cross_entropy_rows(const float* logits, const int* targets, double* losses, i64 rows,
                                                   i64 classes, float smoothing) {
    Team<TEAM> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        const float* x = logits + row * classes;
        Exponentials<float, W, TEAM> exponentials(team, x, classes);
        float total = 0.0f;
        if (smoothing > 0.0f) {
            for (i64 at = (i64)team.rank * W; at < classes; at += TEAM * W) {
                Pack<float, W> pack;
                pack.load(x + at);
#pragma unroll
                for (int i = 0; i < W; i++) total += pack.v[i] - exponentials.top;
            }
            total = team.sum(total);
        }
        if (team.rank == 0) {
            int target = targets[row];
            bool known = target >= 0 && target < classes;
            double right = known ? (double)(x[target] - exponentials.top) : (double)__int_as_float(0x7fc00000);
            double share = (double)smoothing, mean = (double)total / (double)classes;
            losses[row] = log((double)exponentials.sum) - (1.0 - share) * right - share * mean;
        }
    }
}

// A sum over a block of 256 threads, given to the first.
__device__ __forceinline__ double sum_of_256(double x) {
    __shared__ double room[256];
    __syncthreads();
    room[threadIdx.x] = x;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
    }
    return room[0];
}

// One block of 256 threads.
KERNEL mean_of_losses(const double* losses, i64 rows, float* mean) {
    double sum = 0.0;
#pragma unroll 4
    for (i64 row = threadIdx.x; row < rows; row += 256) sum += losses[row];
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) *mean = (float)(sum / (double)rows);
}

template <int W, int TEAM>
__device__ __forceinline__ void cross_entropy_grad_rows(const float* dloss, const float* logits, const int* targets,
                                                        float* dlogits, i64 rows, i64 classes, float smoothing) {
    Team<TEAM> team;
    float scale = *dloss / (float)rows, spread = smoothing / (float)classes;
    for (i64 row = team.row; row < rows; row += team.stride) {
        const float* x = logits + row * classes;
        Exponentials<float, W, TEAM> exponentials(team, x, classes);
        float factor = 1.0f / exponentials.sum;
        int target = targets[row];
#pragma unroll 2
        for (i64 at = (i64)team.rank * W; at < classes; at += TEAM * W) {
            Pack<float, W> pack;
            pack.load(x + at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float share = factor * expf(pack.v[i] - exponentials.top);
                if (at + i == target) share -= 1.0f - smoothing;
                pack.v[i] = scale * (share - spread);
            }
            pack.store(dlogits + row * classes + at);
        }
    }
}

template <typename T, int W, int TEAM>
__device__ __forceinline__ void layer_norm_rows(const T* x, const float* gamma, const float* beta, T* y, float* means,
                                                float* inverses, i64 rows, i64 width, float epsilon) {
    Team<TEAM> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        const T* from = x + row * width;
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> pack;
            pack.load(from + at);
#pragma unroll
            for (int i = 0; i < W; i++) sum += pack.v[i];
        }
        float mean = team.sum(sum) / (float)width;
#pragma unroll 4
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> pack;
            pack.load(from + at);
#pragma unroll
            for (int i = 0; i < W; i++) squares += (pack.v[i] - mean) * (pack.v[i] - mean);
        }
        float inverse = 1.0f / sqrtf(team.sum(squares) / (float)width + epsilon);
        if (team.rank == 0) means[row] = mean, inverses[row] = inverse;
#pragma unroll 2
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> pack;
            Pack<float, W> scale, offset;
            pack.load(from + at), scale.load(gamma + at), offset.load(beta + at);
#pragma unroll
            for (int i = 0; i < W; i++) pack.v[i] = (pack.v[i] - mean) * inverse * scale.v[i] + offset.v[i];
            pack.store(y + row * width + at);
        }
    }
}

// dx may be dy.
template <typename T, int W, int TEAM>
__device__ __forceinline__ void layer_norm_grad_rows(const T* dy, const T* x, const float* gamma, const float* means,
                                                     const float* inverses, T* dx, i64 rows, i64 width) {
    Team<TEAM> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        i64 start = row * width;
        float mean = means[row], inverse = inverses[row], offset = 0.0f, slope = 0.0f;
#pragma unroll 2
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> a, b;
            Pack<float, W> scale;
            a.load(dy + start + at), b.load(x + start + at), scale.load(gamma + at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float product = a.v[i] * scale.v[i];
                offset += product;
                slope += product * ((b.v[i] - mean) * inverse);
            }
        }
        offset = team.sum(offset) / (float)width;
        slope = team.sum(slope) / (float)width;
        for (i64 at = (i64)team.rank * W; at < width; at += TEAM * W) {
            Pack<T, W> a, b;
            Pack<float, W> scale;
            a.load(dy + start + at), b.load(x + start + at), scale.load(gamma + at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float normal = (b.v[i] - mean) * inverse;
                a.v[i] = inverse * (a.v[i] * scale.v[i] - offset - normal * slope);
            }
            a.store(dx + start + at);
        }
    }
}

// What a row adds to the gradients of gamma and beta.
template <typename T, int W> struct AffineRow {
    const T *dy, *x;
    const float *means, *inverses;
    i64 columns;
    __device__ __forceinline__ void operator()(i64 row, i64 column, float (&run)[2][W]) const {
        Pack<T, W> a, b;
        a.load(dy + row * columns + column), b.load(x + row * columns + column);
        float mean = means[row], inverse = inverses[row];
#pragma unroll
        for (int i = 0; i < W; i++) {
            run[0][i] += a.v[i] * ((b.v[i] - mean) * inverse);
            run[1][i] += a.v[i];
        }
    }
};

#define ROWS(type, T, TEAM)                                                                                                    \
    KERNEL softmax_##TEAM##_##type(const T* x, T* y, i64 rows, i64 width, int causal) {                                        \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(x) && is_aligned(y)) softmax_rows<T, W, TEAM>(x, y, rows, width, causal);             \
        else softmax_rows<T, 1, TEAM>(x, y, rows, width, causal);                                                              \
    }                                                                                                                          \
    KERNEL softmax_grad_##TEAM##_##type(const T* dy, const T* y, T* dx, i64 rows, i64 width) {                                 \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(dy) && is_aligned(y) && is_aligned(dx))                                               \
            softmax_grad_rows<T, W, TEAM>(dy, y, dx, rows, width);                                                             \
        else                                                                                                                   \
            softmax_grad_rows<T, 1, TEAM>(dy, y, dx, rows, width);                                                             \
    }                                                                                                                          \
    KERNEL layer_norm_##TEAM##_##type(const T* x, const float* gamma, const float* beta, T* y, float* means, float* inverses,  \
                                      i64 rows, i64 width, float epsilon) {                                                    \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(x) && is_aligned(y) && is_aligned(gamma) && is_aligned(beta))                         \
            layer_norm_rows<T, W, TEAM>(x, gamma, beta, y, means, inverses, rows, width, epsilon);                             \
        else                                                                                                                   \
            layer_norm_rows<T, 1, TEAM>(x, gamma, beta, y, means, inverses, rows, width, epsilon);                             \
    }                                                                                                                          \
    KERNEL layer_norm_grad_##TEAM##_##type(const T* dy, const T* x, const float* gamma, const float* means,                    \
                                           const float* inverses, T* dx, i64 rows, i64 width) {                                \
        const int W = Wide<T>::width;                                                                                          \
        if (width % W == 0 && is_aligned(dy) && is_aligned(x) && is_aligned(gamma) && is_aligned(dx))                          \
            layer_norm_grad_rows<T, W, TEAM>(dy, x, gamma, means, inverses, dx, rows, width);                                  \
        else                                                                                                                   \
            layer_norm_grad_rows<T, 1, TEAM>(dy, x, gamma, means, inverses, dx, rows, width);                                  \
    }
ROWS(f32, float, 32)
ROWS(f32, float, 256)
ROWS(bf16, bf16, 32)
ROWS(bf16, bf16, 256)

#define CROSS_ENTROPY(TEAM)                                                                                                    \
    KERNEL cross_entropy_##TEAM(const float* logits, const int* targets, double* losses, i64 rows, i64 classes,                \
                                float smoothing) {                                                                             \
        if (classes % 4 == 0 && is_aligned(logits))                                                                            \
            cross_entropy_rows<4, TEAM>(logits, targets, losses, rows, classes, smoothing);                                    \
        else                                                                                                                   \
            cross_entropy_rows<1, TEAM>(logits, targets, losses, rows, classes, smoothing);                                    \
    }                                                                                                                          \
    KERNEL cross_entropy_grad_##TEAM(const float* dloss, const float* logits, const int* targets, float* dlogits, i64 rows,    \
                                     i64 classes, float smoothing) {                                                           \
        if (classes % 4 == 0 && is_aligned(logits) && is_aligned(dlogits))                                                     \
            cross_entropy_grad_rows<4, TEAM>(dloss, logits, targets, dlogits, rows, classes, smoothing);                       \
        else                                                                                                                   \
            cross_entropy_grad_rows<1, TEAM>(dloss, logits, targets, dlogits, rows, classes, smoothing);                       \
    }
CROSS_ENTROPY(32)
CROSS_ENTROPY(256)

#define LAYER_NORM_SUMS(type, T)                                                                                               \
    KERNEL layer_norm_sums_##type(const T* dy, const T* x, const float* means, const float* inverses, i64 rows, i64 columns,   \
                                  int across, double* partial, float* dgamma, float* dbeta) {                                  \
        const int W = Wide<T>::width;                                                                                          \
        float* const results[2] = {dgamma, dbeta};                                                                             \
        if (columns % W == 0 && is_aligned(dy) && is_aligned(x))                                                               \
            column_sums<W, 2>(AffineRow<T, W>{dy, x, means, inverses, columns}, rows, columns, across, partial, results);      \
        else                                                                                                                   \
            column_sums<1, 2>(AffineRow<T, 1>{dy, x, means, inverses, columns}, rows, columns, across, partial, results);      \
    }
LAYER_NORM_SUMS(f32, float)
LAYER_NORM_SUMS(bf16, bf16)

// Of each of the first *counted rows: its cross-entropy, whether its target has the largest logit, and whether it is among
// the five largest. Ties go to the lower class and a NaN stands before everything. [3][rows]; other rows give zeros.
KERNEL tally_rows(const float* logits, const int* targets, const u32* counted, i64 rows, i64 classes, double* tallies) {
    Team<32> team;
    for (i64 row = team.row; row < rows; row += team.stride) {
        if (row >= *counted) {
            if (team.rank < 3) tallies[team.rank * rows + row] = 0.0;
            continue;
        }
        const float* x = logits + row * classes;
        int target = targets[row];
        bool known = target >= 0 && target < classes;
        float value = known ? x[target] : __int_as_float(0x7fc00000), top = -__int_as_float(0x7f800000);
        u32 before = 0;
        for (i64 at = team.rank; at < classes; at += 32) {
            float other = x[at];
            top = fmaxf(top, other);
            before += other > value || (other == value && at < target) || other != other;
        }
        top = team.max(top);
        double sum = 0.0;
        for (i64 at = team.rank; at < classes; at += 32) sum += exp((double)(x[at] - top));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            before += __shfl_xor_sync(0xffffffffu, before, offset);
        }
        i64 place = value != value ? classes : (i64)before;
        if (team.rank == 0) {
            tallies[row] = log(sum) - (double)(value - top);
            tallies[rows + row] = known && place < 1 ? 1.0 : 0.0;
            tallies[2 * rows + row] = known && place < 5 ? 1.0 : 0.0;
        }
    }
}

// The three sums, each by a block of 256 threads.
KERNEL tally_sums(const double* tallies, i64 rows, double* sums) {
    const double* from = tallies + blockIdx.x * rows;
    double sum = 0.0;
#pragma unroll 4
    for (i64 row = threadIdx.x; row < rows; row += 256) sum += from[row];
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
