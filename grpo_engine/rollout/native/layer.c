/* What a decoder layer computes between its matrix products and its attention. Each is so little work for a step's rows
 * that as a handful of separate operations it costs their calls, after attention has emptied the processor's caches.
 *
 * Shapes: R rows, each contiguous. */

#include <math.h>

#include "vectors.h"

/* hidden [R, W] += before, where there is one; normed = hidden / sqrt(mean of its squares + epsilon) * weight. */
void add_and_norm(float *hidden, const float *before, const float *weight, float *normed, int64_t R, int64_t W,
                  float epsilon)
{
    for (int64_t r = 0; r < R; r++, hidden += W, normed += W) {
        float sum = 0.0f;
        if (before != NULL)
            for (int64_t i = 0; i < W; i++) hidden[i] += before[r * W + i];
        for (int64_t i = 0; i < W; i++) sum += hidden[i] * hidden[i];
        const float scale = 1.0f / sqrtf(sum / (float)W + epsilon);
        for (int64_t i = 0; i < W; i++) normed[i] = hidden[i] * scale * weight[i];
    }
}

/* heads [R, H, D] turned by cosines and sines [R, D]: x cos + (-x2, x1) sin, x1 and x2 the halves of x. */
void rotate(float *heads, const float *cosines, const float *sines, int64_t R, int64_t H, int64_t D)
{
    const int64_t half = D / 2;
    for (int64_t r = 0; r < R; r++, cosines += D, sines += D)
        for (int64_t h = 0; h < H; h++, heads += D)
            for (int64_t i = 0; i < half; i++) {
                const float first = heads[i], second = heads[half + i];
                heads[i] = first * cosines[i] - second * sines[i];
                heads[half + i] = second * cosines[half + i] + first * sines[half + i];
            }
}

/* x / (1 + exp(-x)), from exp(-|x|). */
INLINE vec silu(vec x)
{
    const vec e = exponential((vec)((ivec)x | INT32_MIN));
    return x * where(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

/* gates = silu(gates) * up. */
void gate(float *gates, const float *up, int64_t count)
{
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) store(gates + i, silu(load(gates + i)) * load(up + i));
    if (i < count) {
        float last[2][WIDE] = {{0}};
        memcpy(last[0], gates + i, (size_t)(count - i) * sizeof(float));
        memcpy(last[1], up + i, (size_t)(count - i) * sizeof(float));
        store(last[0], silu(load(last[0])) * load(last[1]));
        memcpy(gates + i, last[0], (size_t)(count - i) * sizeof(float));
    }
}
