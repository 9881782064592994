/* Attention of single queries to many short rows of keys and values, on one processor core.
 *
 * A step of decoding reads each row's own keys and values once: nothing but the speed of memory should limit it. Batched
 * matrix products of one query with keys of 32 numbers reach two thirds of that speed; these loops reach it. The scores
 * over the row's prompt, which rows share, come in as a matrix and leave as weights.
 *
 * Shapes: B rows, H key-value heads, Q new tokens, N = G x Q queries that meet one key-value head (G heads share it;
 * query n belongs to new token n % Q), C tokens that fit, P tokens of the longest prompt, R places of a prompt, D width.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const float *queries;          /* [B, H, N, D] */
    const float *new_keys;         /* element (b, h, q, d) at b * strides[0] + h * strides[1] + q * strides[2] + d */
    const float *new_values;
    int64_t key_strides[3], value_strides[3];
    float *keys, *values;          /* [B, H, C, D]; the new tokens are written behind those held */
    const int64_t *held;           /* [B] */
    const int64_t *prompt;         /* [B] tokens of the row's prompt */
    const int64_t *place;          /* [B] slot x R + place in the slot */
    float *shared;                 /* [S, H, R, N, P] scaled scores in, weights out */
    float *out;                    /* [S, H, R, N, D] weights times own values */
    int64_t H, N, Q, C, P, R;
    float scale;
} Work;

/* 2^(x / ln 2): halves of the exponent by a polynomial, relative error 2e-7; NaN stays NaN. */
static inline float exponential(float x)
{
    float y = x * 1.44269504f;
    y = y < -126.0f ? -126.0f : y;
    float whole = floorf(y + 0.5f), f = y - whole;
    float p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f
            + f * (0.00133335581f + f * 0.000154035304f)))));
    int32_t bits, power = (int32_t)whole;
    memcpy(&bits, &p, sizeof bits);
    bits += (int32_t)((uint32_t)power << 23);
    memcpy(&p, &bits, sizeof bits);
    return p;
}

static float largest(const float *values, int64_t count, float most)
{
    float lanes[16];
    int64_t i = 0;
    for (int lane = 0; lane < 16; lane++) lanes[lane] = most;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
    for (; i < count; i++) lanes[0] = values[i] > lanes[0] ? values[i] : lanes[0];
    for (int lane = 0; lane < 16; lane++) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

/* Scores to exponentials; returns their sum. */
static float exponentials(float *values, int64_t count, float most)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) values[i] = exponential(values[i] - most);
    for (int64_t i = 0; i < count; i++) sum += values[i];
    return sum;
}

#define AHEAD 16 /* tokens that are asked for before they are needed */
#define LINE 16  /* numbers that come together */

#define ATTEND(D)                                                                                                      \
    static void attend_##D(const Work *w, int64_t begin, int64_t end, float *own)                                     \
    {                                                                                                                  \
        for (int64_t b = begin; b < end; b++) {                                                                        \
            const int64_t held = w->held[b], prompt = w->prompt[b];                                                   \
            const int64_t slot = w->place[b] / w->R, place = w->place[b] % w->R;                                      \
            for (int64_t h = 0; h < w->H; h++) {                                                                       \
                float *keys = w->keys + (b * w->H + h) * w->C * D, *values = w->values + (b * w->H + h) * w->C * D;   \
                for (int64_t q = 0; q < w->Q; q++) {                                                                   \
                    memcpy(keys + (held + q) * D, w->new_keys + b * w->key_strides[0] + h * w->key_strides[1]         \
                           + q * w->key_strides[2], D * sizeof(float));                                                \
                    memcpy(values + (held + q) * D, w->new_values + b * w->value_strides[0]                            \
                           + h * w->value_strides[1] + q * w->value_strides[2], D * sizeof(float));                    \
                }                                                                                                      \
                for (int64_t n = 0; n < w->N; n++) {                                                                   \
                    const int64_t seen = held + n % w->Q + 1;                                                          \
                    const int64_t at = ((slot * w->H + h) * w->R + place) * w->N + n;                                  \
                    const float *query = w->queries + ((b * w->H + h) * w->N + n) * D;                                 \
                    float *shared = w->shared + at * w->P, *out = w->out + at * D;                                     \
                    float scaled[D], even[D], odd[D];                                                                  \
                    for (int d = 0; d < D; d++) scaled[d] = query[d] * w->scale, even[d] = odd[d] = 0.0f;              \
                    for (int64_t t = 0; t < seen; t++) {                                                               \
                        const float *key = keys + t * D;                                                               \
                        float score = 0.0f;                                                                            \
                        for (int d = 0; d < D; d += LINE) __builtin_prefetch(key + AHEAD * D + d);                     \
                        for (int d = 0; d < D; d++) score += scaled[d] * key[d];                                       \
                        own[t] = score;                                                                                \
                    }                                                                                                  \
                    for (int d = 0; d < AHEAD * D; d += LINE) __builtin_prefetch(values + d);                          \
                    const float most = largest(shared, prompt, largest(own, seen, own[0]));                            \
                    const float sum = exponentials(own, seen, most) + exponentials(shared, prompt, most);              \
                    const float share = 1.0f / sum;                                                                    \
                    for (int64_t t = 0; t < prompt; t++) shared[t] *= share;                                           \
                    for (int64_t t = prompt; t < w->P; t++) shared[t] = 0.0f;                                          \
                    for (int d = 0; d < AHEAD * D; d += LINE) __builtin_prefetch(keys + w->C * D + d);                 \
                    int64_t t = 0;                                                                                     \
                    for (; t + 2 <= seen; t += 2) {                                                                    \
                        const float *value = values + t * D;                                                           \
                        for (int d = 0; d < 2 * D; d += LINE) __builtin_prefetch(value + AHEAD * D + d);               \
                        for (int d = 0; d < D; d++) even[d] += own[t] * value[d], odd[d] += own[t + 1] * value[D + d]; \
                    }                                                                                                  \
                    if (t < seen)                                                                                      \
                        for (int d = 0; d < D; d++) even[d] += own[t] * values[t * D + d];                             \
                    for (int d = 0; d < D; d++) out[d] = (even[d] + odd[d]) * share;                                   \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

ATTEND(8)
ATTEND(16)
ATTEND(32)
ATTEND(64)
ATTEND(96)
ATTEND(128)

/* Rows begin ... end - 1. Returns 0, or 1 where memory for C scores is refused, 2 for a width that is not compiled. */
int attend(const Work *work, int64_t width, int64_t begin, int64_t end)
{
    float *own = malloc((size_t)work->C * sizeof(float));
    if (own == NULL) return 1;
    int result = 0;
    switch (width) {
    case 8: attend_8(work, begin, end, own); break;
    case 16: attend_16(work, begin, end, own); break;
    case 32: attend_32(work, begin, end, own); break;
    case 64: attend_64(work, begin, end, own); break;
    case 96: attend_96(work, begin, end, own); break;
    case 128: attend_128(work, begin, end, own); break;
    default: result = 2;
    }
    free(own);
    return result;
}
