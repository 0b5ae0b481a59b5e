// Images of a data set that lives here, looked at: shifted, mirrored, with a hole. One thread per number.

// As `reflect` of the host: where a place is found in an image that goes on as in a mirror.
__device__ __forceinline__ int reflect(int at, int length) {
    int last = length - 1, there = at < 0 ? -at : at;
    there = there > last ? 2 * last - there : there;
    return there < 0 ? 0 : there > last ? last : there;
}

// A view: sample, top, left, 1 if mirrored and 2 more if reflected, first row and column of the hole, and those behind its last.
template <typename T>
__device__ __forceinline__ void look(const unsigned char* pixels, const float* numbers, const int* views, i64 rows, T* to,
                                     i64 elements, int height, int width, int channels) {
    i64 index = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (index >= elements) return;
    int channel = index % channels;
    i64 rest = index / channels;
    int column = rest % width;
    rest /= width;
    int row = rest % height;
    i64 image = rest / height;
    if (image >= rows) {
        to[index] = from_float<T>(0.0f);
        return;
    }
    const int* view = views + 8 * image;
    if (row >= view[4] && row < view[6] && column >= view[5] && column < view[7]) {
        to[index] = from_float<T>(numbers[256 * channels + channel]);
        return;
    }
    int from_row = row + view[1], from_column = (view[3] & 1 ? width - 1 - column : column) + view[2];
    if (view[3] & 2) {
        from_row = reflect(from_row, height);
        from_column = reflect(from_column, width);
    }
    bool inside = from_row >= 0 && from_row < height && from_column >= 0 && from_column < width;
    i64 at = ((i64)view[0] * height + from_row) * width + from_column;
    to[index] = from_float<T>(numbers[256 * channel + (inside ? pixels[at * channels + channel] : 0)]);
}

KERNEL look_f32(const unsigned char* pixels, const float* numbers, const int* views, i64 rows, float* to, i64 elements,
                int height, int width, int channels) {
    look(pixels, numbers, views, rows, to, elements, height, width, channels);
}

KERNEL look_bf16(const unsigned char* pixels, const float* numbers, const int* views, i64 rows, bf16* to, i64 elements,
                 int height, int width, int channels) {
    look(pixels, numbers, views, rows, to, elements, height, width, channels);
}
