// What an LSTM does at one step between its matrix products. Tensors are [batch, steps, ...]; gates stand in the order
// input, forget, cell, output.

// `gates` come in as the sums of the products and go out after bias and activation.
KERNEL lstm_step(float* gates, const float* b_ih, const float* b_hh, float* cells, float* y, i64 batch, i64 steps, i64 hidden,
                 i64 step) {
    for (i64 i = first_index(); i < batch * hidden; i += all_threads()) {
        i64 item = divide(i, hidden), h = i - item * hidden, row = item * steps + step;
        float* gate = gates + row * 4 * hidden + h;
        float sums[4];
#pragma unroll
        for (int k = 0; k < 4; k++) sums[k] = gate[k * hidden] + (b_ih[k * hidden + h] + b_hh[k * hidden + h]);
        float enter = sigmoid_of(sums[0]), forget = sigmoid_of(sums[1]), fresh = tanhf(sums[2]), out = sigmoid_of(sums[3]);
        float cell = enter * fresh;
        if (step > 0) cell += forget * cells[(row - 1) * hidden + h];
        gate[0] = enter, gate[hidden] = forget, gate[2 * hidden] = fresh, gate[3 * hidden] = out;
        cells[row * hidden + h] = cell;
        y[row * hidden + h] = out * tanhf(cell);
    }
}

// `dstate` and `dcell` [batch, hidden] are the gradients of this step's output and cell from the future, which the last step
// does not have; `dcell` becomes that of the step before.
KERNEL lstm_grad_step(const float* dy, const float* gates, const float* cells, const float* dstate, float* dcell,
                      float* dgates, i64 batch, i64 steps, i64 hidden, i64 step) {
    bool future = step + 1 < steps;
    for (i64 i = first_index(); i < batch * hidden; i += all_threads()) {
        i64 item = divide(i, hidden), h = i - item * hidden, row = item * steps + step;
        const float* gate = gates + row * 4 * hidden + h;
        float enter = gate[0], forget = gate[hidden], fresh = gate[2 * hidden], out = gate[3 * hidden];
        float before = step > 0 ? cells[(row - 1) * hidden + h] : 0.0f;
        float state = tanhf(cells[row * hidden + h]);
        float flow = dy[row * hidden + h] + (future ? dstate[i] : 0.0f);
        float total = (future ? dcell[i] : 0.0f) + flow * out * (1.0f - state * state);
        float* to = dgates + row * 4 * hidden + h;
        to[0] = total * fresh * enter * (1.0f - enter);
        to[hidden] = total * before * forget * (1.0f - forget);
        to[2 * hidden] = total * enter * (1.0f - fresh * fresh);
        to[3 * hidden] = flow * state * out * (1.0f - out);
        dcell[i] = total * forget;
    }
}
