// What follows the gradients: are they numbers, how long are they, the step of the optimizer. And small things for convolutions.

// Flags and numbers of a step, written by the host before it: see `Moment` in session.rs.
struct Rule {
    int kind;
    float c[9];
};
struct Moment {
    u64 seed, step, first_sample, samples;
    float norm_max;
    u32 rows;
    Rule rules[2];
};
// What the device finds out: whether all gradients are numbers, their norm, and what they are multiplied by.
struct Verdict {
    u32 spoiled;
    float factor;
    double norm;
};

// Squares of the gradients by chunk; one that is not a number makes its chunk's sum so.
KERNEL gradient_squares(const float* gradients, i64 elements, double* partial) {
    double sum = 0.0;
    for (i64 i = first_index() * 4; i < elements; i += all_threads() * 4) {
        float4 g = *reinterpret_cast<const float4*>(gradients + i);
        double x = g.x, y = g.y, z = g.z, w = g.w;
        sum += x * x + y * y + z * z + w * w;
        if (!(isfinite(g.x) && isfinite(g.y) && isfinite(g.z) && isfinite(g.w))) sum = __longlong_as_double(0x7ff8000000000000ll);
    }
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block. The loss, where it is given, must be a number too.
KERNEL gradient_verdict(const double* partial, int chunks, const double* loss, const Moment* moment, Verdict* verdict) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < chunks; i += 256) sum += partial[i];
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) {
        double norm = sqrt(sum);
        u32 spoiled = isnan(norm) ? 2 : 0;
        if (loss && !isfinite(*loss)) spoiled = 1;
        verdict->spoiled = spoiled;
        verdict->norm = norm;
        // As on the CPU, which adds a little to the norm.
        verdict->factor = (float)fmin((double)moment->norm_max / (norm + 1e-6), 1.0);
    }
}

// Sums of the squares of weights and gradients of one piece of a layer each; in f64 throughout, as on the CPU. Layers begin at multiples of
// 16, so that a load of four stays in a layer's lines.
KERNEL layer_squares(const float* weights, const float* gradients, const i64* pieces, const Verdict* verdict, double* sums) {
    i64 end = pieces[blockIdx.x * 2 + 1];
    float factor = verdict->factor;
    double sum[2] = {0.0, 0.0};
    for (i64 i = pieces[blockIdx.x * 2] + threadIdx.x * 4; i < end; i += 256 * 4) {
        Pack<float, 4> w, g;
        w.load(weights + i);
        g.load(gradients + i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (i + j < end) {
                double x = w.v[j], y = g.v[j] * factor;
                sum[0] += x * x;
                sum[1] += y * y;
            }
        }
    }
    for (int k = 0; k < 2; k++) {
        double all = sum_of_256(sum[k]);
        if (threadIdx.x == 0) sums[blockIdx.x * 2 + k] = all;
    }
}

// A layer's own rate by LARS, one block for each: c‖w‖/(‖g‖+λ‖w‖), and 1 where there is nothing to compare.
KERNEL layer_rates(const double* sums, const u32* firsts, const Moment* moment, float coefficient, float* rates) {
    double sum[2] = {0.0, 0.0};
    for (u32 i = firsts[blockIdx.x] + threadIdx.x; i < firsts[blockIdx.x + 1]; i += 256) {
        for (int k = 0; k < 2; k++) sum[k] += sums[i * 2 + k];
    }
    for (int k = 0; k < 2; k++) sum[k] = sum_of_256(sum[k]);
    if (threadIdx.x == 0) {
        double w = sqrt(sum[0]), g = sqrt(sum[1]);
        // λ of a rule of momentum.
        double decay = moment->rules[1].c[3];
        rates[blockIdx.x + 1] = w == 0.0 || g == 0.0 ? 1.0f : (float)((double)coefficient * w / (g + decay * w));
    }
}

// `rate` is the layer's own: 1 for every rule but LARS.
__device__ __forceinline__ void update_one(const Rule& rule, float rate, float& w, float g, float& m, float& s) {
    const float* c = rule.c;
    switch (rule.kind) {
        case 0:
            w -= c[0] * (g + c[1] * w);
            break;
        case 1:
            m = c[0] * m + c[1] * rate * (g + c[3] * w);
            w -= c[2] * m;
            break;
        case 2:
            g = c[1] * rate * (g + c[3] * w);
            m = c[0] * m + g;
            w -= c[2] * (g + c[0] * m);
            break;
        case 3:
            g = g + c[2] * w;
            m += g * g;
            w -= c[0] * g / (sqrtf(m) + c[1]);
            break;
        default:
            g = g + c[7] * w;
            m = c[2] * m + c[4] * g;
            s = c[3] * s + c[5] * g * g;
            w = c[8] * w - c[0] * m / (sqrtf(s) * c[1] + c[6]);
    }
}

// One step over all parameters: weights, what the rule keeps, and the rounded twins. `layers` has a number for every 16 elements, 0 where
// they do not decay; `rates`, where it is given, has a rate for every number.
KERNEL update_parameters(float* weights, const float* gradients, float* first, float* second, bf16* rounded, const unsigned short* layers, const float* rates, i64 elements, const Moment* moment, const Verdict* verdict) {
    if (verdict->spoiled) return;
    float factor = verdict->factor;
    for (i64 i = first_index() * 4; i < elements; i += all_threads() * 4) {
        u32 layer = layers[i / 16];
        const Rule& rule = moment->rules[layer ? 1 : 0];
        float rate = rates ? rates[layer] : 1.0f;
        Pack<float, 4> w, g, m, s;
        w.load(weights + i);
        g.load(gradients + i);
        if (first) m.load(first + i);
        if (second) s.load(second + i);
#pragma unroll
        for (int j = 0; j < 4; j++) update_one(rule, rate, w.v[j], g.v[j] * factor, m.v[j], s.v[j]);
        w.store(weights + i);
        if (first) m.store(first + i);
        if (second) s.store(second + i);
        *reinterpret_cast<uint2*>(rounded + i) = make_uint2(to_bf16_pair(w.v[0], w.v[1]), to_bf16_pair(w.v[2], w.v[3]));
    }
}

// Gradients of a batch's parts: the first begins a sum, others are added to it, and the last becomes it.
KERNEL add_gradients(float* sum, float* gradients, i64 elements, int first, int last) {
    for (i64 i = first_index(); i < elements; i += all_threads()) {
        float value = first ? gradients[i] : sum[i] + gradients[i];
        if (last) {
            gradients[i] = value;
        } else {
            sum[i] = value;
        }
    }
}

// Numbers in −1..1 that depend on their index alone.
template <typename T> __device__ __forceinline__ void noise(T* data, i64 elements) {
    for (i64 i = first_index(); i < elements; i += all_threads()) {
        u32 word = (u32)i * 0x9e3779b9u + 0x7f4a7c15u;
        word = (word ^ (word >> 16)) * 0x7feb352du;
        word = (word ^ (word >> 15)) * 0x846ca68bu;
        word ^= word >> 16;
        data[i] = from_float<T>((float)(int)word * (1.0f / 2147483648.0f));
    }
}
KERNEL noise_f32(float* data, i64 elements) { noise(data, elements); }
KERNEL noise_bf16(bf16* data, i64 elements) { noise(data, elements); }

// Pixel (h, w) of the result is pixel (h, w) + shift of the source, or zero where there is none.
template <typename T> __device__ __forceinline__ void place_image(const T* from, T* to, i64 elements, int from_h, int from_w, int to_h, int to_w, int channels, int shift_h, int shift_w) {
    for (i64 i = first_index(); i < elements; i += all_threads()) {
        i64 pixel = i / channels;
        int c = (int)(i % channels), w = (int)(pixel % to_w), h = (int)(pixel / to_w % to_h);
        i64 n = pixel / to_w / to_h;
        int y = h + shift_h, x = w + shift_w;
        bool inside = y >= 0 && y < from_h && x >= 0 && x < from_w;
        to[i] = inside ? from[((n * from_h + y) * from_w + x) * channels + c] : (T)0;
    }
}
KERNEL place_image_2(const bf16* from, bf16* to, i64 elements, int from_h, int from_w, int to_h, int to_w, int channels, int shift_h, int shift_w) {
    place_image(from, to, elements, from_h, from_w, to_h, to_w, channels, shift_h, shift_w);
}
KERNEL place_image_4(const u32* from, u32* to, i64 elements, int from_h, int from_w, int to_h, int to_w, int channels, int shift_h, int shift_w) {
    place_image(from, to, elements, from_h, from_w, to_h, to_w, channels, shift_h, shift_w);
}

// Adds a bias to every row; with `relu`, what is below zero becomes zero. W divides the channels.
template <typename T, int W> __device__ __forceinline__ void add_bias(T* y, const float* bias, i64 elements, i64 channels, int relu) {
    for (i64 i = first_index() * W; i < elements; i += all_threads() * W) {
        Pack<T, W> pack;
        pack.load(y + i);
        int c = (int)(i % channels);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float value = pack.v[j] + bias[c + j];
            pack.v[j] = relu && value < 0.0f ? 0.0f : value;
        }
        pack.store(y + i);
    }
}
KERNEL add_bias_f32(float* y, const float* bias, i64 elements, i64 channels, int relu) { add_bias<float, 1>(y, bias, elements, channels, relu); }
KERNEL add_bias_bf16(bf16* y, const float* bias, i64 elements, i64 channels, int relu) { add_bias<bf16, 1>(y, bias, elements, channels, relu); }
KERNEL add_bias_f32_wide(float* y, const float* bias, i64 elements, i64 channels, int relu) { add_bias<float, 4>(y, bias, elements, channels, relu); }
KERNEL add_bias_bf16_wide(bf16* y, const float* bias, i64 elements, i64 channels, int relu) { add_bias<bf16, 8>(y, bias, elements, channels, relu); }

template <typename T> __device__ __forceinline__ void relu_in_place(T* y, i64 elements) {
    for (i64 i = first_index(); i < elements; i += all_threads()) {
        float value = to_float(y[i]);
        if (value < 0.0f) y[i] = from_float<T>(0.0f);
    }
}
KERNEL relu_f32(float* y, i64 elements) { relu_in_place(y, elements); }
KERNEL relu_bf16(bf16* y, i64 elements) { relu_in_place(y, elements); }

// An image of few channels with pixels folded into channels: result (h, w, (a, b, c)) is source (step_h·h + a − top, step_w·w + b − left, c)
// for a < A and b < B, zero outside of the image; what is left of `channels`, a multiple of eight, is filled up with zeros. A thread writes
// eight channels.
KERNEL fold_image(const bf16* from, bf16* to, i64 pieces, int from_h, int from_w, int depth, int to_h, int to_w, int channels, int step_h, int step_w, int A, int B, int top, int left) {
    const u32 groups = channels / 8;
    for (i64 piece = first_index(); piece < pieces; piece += all_threads()) {
        u32 group = (u32)(piece % groups);
        i64 pixel = piece / groups;
        u32 line = (u32)(pixel / to_w);
        int w = (int)(pixel - (i64)line * to_w), h = (int)(line % to_h);
        i64 n = line / to_h;
        u32 slot = group * 8, pair = slot / depth;
        int c = slot - pair * depth, a = pair / B, b = pair - a * B;
        int y = h * step_h + a - top, x = w * step_w + b - left;
        const bf16* image = from + n * from_h * from_w * depth;
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bool inside = a < A && y >= 0 && y < from_h && x >= 0 && x < from_w;
            u32 value = inside ? image[((i64)y * from_w + x) * depth + c] : 0;
            words[i / 2] |= value << (i % 2 * 16);
            if (++c == depth) {
                c = 0;
                ++x;
                if (++b == B) {
                    b = 0;
                    x -= B;
                    ++a;
                    ++y;
                }
            }
        }
        reinterpret_cast<uint4*>(to)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The weights that go with it: tap (i, j, (a, b, c)) is tap (step_h·i + a, B·j + b, c) of [outputs, rows, columns, depth], or zero.
KERNEL fold_weight(const bf16* from, bf16* to, i64 elements, int rows, int columns, int depth, int to_rows, int to_columns, int channels, int step_h, int A, int B) {
    for (i64 n = first_index(); n < elements; n += all_threads()) {
        int slot = (int)(n % channels);
        i64 tap = n / channels;
        int j = (int)(tap % to_columns), i = (int)(tap / to_columns % to_rows);
        i64 output = tap / to_columns / to_rows;
        int c = slot % depth, b = slot / depth % B, a = slot / depth / B;
        int row = step_h * i + a, column = B * j + b;
        bool inside = a < A && row < rows && column < columns;
        to[n] = inside ? from[((output * rows + row) * columns + column) * depth + c] : (bf16)0;
    }
}

// And back, for their gradient.
KERNEL unfold_weight(const bf16* from, bf16* to, i64 elements, int rows, int columns, int depth, int to_rows, int to_columns, int channels, int step_h, int A, int B) {
    for (i64 n = first_index(); n < elements; n += all_threads()) {
        int c = (int)(n % depth);
        i64 tap = n / depth;
        int column = (int)(tap % columns), row = (int)(tap / columns % rows);
        i64 output = tap / columns / rows;
        int i = row / step_h, a = row % step_h, j = column / B, b = column % B;
        to[n] = from[((output * to_rows + i) * to_columns + j) * channels + (a * B + b) * depth + c];
    }
}

