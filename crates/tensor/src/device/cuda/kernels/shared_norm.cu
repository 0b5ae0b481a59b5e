// Batch normalisation whose statistics are those of several replicas' rows: what happens between the passes
// of batch_norm.cu, for one channel a thread. The host adds the numbers up between these kernels. The
// protocol is that of the CPU (device/cpu/batch_norm/shared.rs): sums first, then squares about the mean of
// all.

// From the totals of this replica's rows, which are sums of x − pivot, of its square, and the pivot: its mean
// and variance, and what is added up first, with the number of rows behind.
KERNEL share_sums(const float* totals, i64 rows, int channels, double* moments, float* sums) {
    i64 c = first_index();
    if (c >= channels) return;
    double shift = (double)totals[c] / (double)rows, mean = (double)totals[2 * channels + c] + shift;
    moments[c] = mean;
    moments[channels + c] = fmax((double)totals[channels + c] / (double)rows - shift * shift, 0.0);
    sums[c] = (float)(mean * (double)rows);
    if (c == 0) sums[channels] = (float)rows;
}

// The mean of all, and this replica's squares about it, which follow from its moments.
KERNEL share_squares(const float* sums, const double* moments, i64 rows, int channels, float* mean, float* squares) {
    i64 c = first_index();
    if (c >= channels) return;
    float middle = (float)((double)sums[c] / (double)sums[channels]);
    double apart = moments[c] - (double)middle;
    squares[c] = (float)((double)rows * (moments[channels + c] + apart * apart));
    mean[c] = middle;
}

// The statistics of a batch-norm from the squares of all.
KERNEL share_statistics(const float* sums, const float* squares, int channels, float epsilon, float momentum, const float* mean, float* spread, float* running_mean, float* running_variance) {
    i64 c = first_index();
    if (c >= channels) return;
    double rows = sums[channels], variance = fmax((double)squares[c] / rows, 0.0), m = rows > 1.0 ? momentum : 0.0f;
    spread[c] = (float)(1.0 / sqrt(variance + (double)epsilon));
    running_mean[c] = (float)((1.0 - m) * (double)running_mean[c] + m * (double)mean[c]);
    running_variance[c] = (float)((1.0 - m) * (double)running_variance[c] + m * variance * rows / fmax(rows - 1.0, 1.0));
}

// From the totals of a gradient's first pass, Σdz and Σdz·(x − mean)/deviation: this replica's gradients of
// offset and factor, and what is added up, Σdz and Σdz·(x − mean), with the number of rows behind.
KERNEL share_gradient_sums(const float* totals, const float* spread, i64 rows, int channels, float* dbeta, float* dgamma, float* sums) {
    i64 c = first_index();
    if (c >= channels) return;
    float sum = totals[c], slope = totals[channels + c];
    dbeta[c] = sum;
    dgamma[c] = slope;
    sums[c] = sum;
    sums[channels + c] = (float)((double)slope / (double)spread[c]);
    if (c == 0) sums[2 * channels] = (float)rows;
}

// The sums of all as the totals of so many rows as this replica has, which the second pass divides by.
KERNEL share_gradient_totals(const float* sums, const float* spread, i64 rows, int channels, float* totals) {
    i64 c = first_index();
    if (c >= channels) return;
    double part = (double)rows / (double)sums[2 * channels];
    totals[c] = (float)((double)sums[c] * part);
    totals[channels + c] = (float)((double)sums[channels + c] * (double)spread[c] * part);
}
