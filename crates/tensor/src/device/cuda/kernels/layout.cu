// Kernels that move elements and compute nothing, by units of 2 to 16 bytes.

struct __align__(2) Unit2 { unsigned short v; };
struct __align__(4) Unit4 { u32 v; };
struct __align__(8) Unit8 { u32 v[2]; };
struct __align__(16) Unit16 { u32 v[4]; };

// Runs of `length` units, one per `outer`: each tensor has its own distance between the runs.
template <typename U>
__device__ __forceinline__ void copy_runs(const U* from, i64 from_stride, U* to, i64 to_stride, i64 outer, i64 length) {
    i64 n = outer * length;
    for (i64 i = first_index(); i < n; i += all_threads()) {
        i64 run = divide(i, length), at = i - run * length;
        to[run * to_stride + at] = from[run * from_stride + at];
    }
}

// As above into runs of `size` units, with zeros before the first `before` and after what was copied.
template <typename U>
__device__ __forceinline__ void pad_runs(const U* from, i64 from_stride, U* to, i64 size, i64 before, i64 outer, i64 length) {
    i64 n = outer * size;
    for (i64 i = first_index(); i < n; i += all_threads()) {
        i64 run = divide(i, size), at = i - run * size - before;
        to[i] = at >= 0 && at < length ? from[run * from_stride + at] : U{};
    }
}

// y in its own order; each of its dims has a size and a distance in x.
template <typename U>
__device__ __forceinline__ void permute_units(const U* from, U* to, i64 n, const i64 (&sizes)[8], const i64 (&strides)[8]) {
    for (i64 i = first_index(); i < n; i += all_threads()) {
        i64 rest = i, at = 0;
#pragma unroll
        for (int dim = 7; dim > 0; dim--) {
            if (sizes[dim] > 1) {
                i64 next = divide(rest, sizes[dim]);
                at += (rest - next * sizes[dim]) * strides[dim];
                rest = next;
            }
        }
        to[i] = from[at + rest * strides[0]];
    }
}

// Matrices [rows, columns] to [columns, rows], each in tiles of 32 by 32 through shared memory. Blocks of 256 threads.
template <typename U>
__device__ __forceinline__ void transpose_units(const U* from, U* to, i64 batch, i64 rows, i64 columns) {
    __shared__ U tile[32][33];
    i64 down = (rows + 31) / 32, across = (columns + 31) / 32, tiles = batch * down * across;
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        i64 line = divide(index, across), matrix = divide(line, down);
        i64 row = (line - matrix * down) * 32, column = (index - line * across) * 32;
        const U* source = from + matrix * rows * columns;
        U* target = to + matrix * rows * columns;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; k += 8)
            if (row + y + k < rows && column + x < columns) tile[y + k][x] = source[(row + y + k) * columns + column + x];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; k += 8)
            if (column + y + k < columns && row + x < rows) target[(column + y + k) * rows + row + x] = tile[x][y + k];
    }
}

#define LAYOUT(bytes)                                                                                                          \
    KERNEL copy_runs_##bytes(const Unit##bytes* from, i64 from_stride, Unit##bytes* to, i64 to_stride, i64 outer,              \
                             i64 length) {                                                                                     \
        copy_runs(from, from_stride, to, to_stride, outer, length);                                                            \
    }                                                                                                                          \
    KERNEL pad_runs_##bytes(const Unit##bytes* from, i64 from_stride, Unit##bytes* to, i64 size, i64 before, i64 outer,        \
                            i64 length) {                                                                                      \
        pad_runs(from, from_stride, to, size, before, outer, length);                                                          \
    }                                                                                                                          \
    KERNEL permute_##bytes(const Unit##bytes* from, Unit##bytes* to, i64 n, i64 n0, i64 n1, i64 n2, i64 n3, i64 n4, i64 n5,    \
                           i64 n6, i64 n7, i64 s0, i64 s1, i64 s2, i64 s3, i64 s4, i64 s5, i64 s6, i64 s7) {                   \
        const i64 sizes[8] = {n0, n1, n2, n3, n4, n5, n6, n7}, strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};                  \
        permute_units(from, to, n, sizes, strides);                                                                            \
    }
LAYOUT(2)
LAYOUT(4)
LAYOUT(8)
LAYOUT(16)

KERNEL transpose_2(const Unit2* from, Unit2* to, i64 batch, i64 rows, i64 columns) {
    transpose_units(from, to, batch, rows, columns);
}
KERNEL transpose_4(const Unit4* from, Unit4* to, i64 batch, i64 rows, i64 columns) {
    transpose_units(from, to, batch, rows, columns);
}
