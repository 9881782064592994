/* From logits to tokens and log-probabilities, in two or three passes over a row where separate operations make ten.
 *
 * Shapes: B rows of V ids, each contiguous. Ids are taken in blocks of 128: what a block's ids add up to is float32,
 * everything cumulative is float64. */

#include <math.h>

#include "vectors.h"

#define BLOCK 128

typedef uint8_t bytes __attribute__((vector_size(WIDE)));

typedef struct {
    const float *logits;    /* [B, V], divided by the temperature */
    const uint8_t *kept;    /* [B, V], 1 = kept by truncation; NULL = all */
    const double *uniforms; /* [B], in [0, 1); NULL = the likeliest */
    double *sums;           /* [B, blocks], to work with */
    int64_t *tokens;        /* [B] */
    float *logprobs, *full; /* [B] of the token, under the distribution sampled from and without truncation */
    float *all;             /* [B, V] of every id, minus infinity where it is not kept; NULL = unwanted */
    int64_t V;
} Pick;

INLINE int64_t length(int64_t V, int64_t block) { return V - block * BLOCK < BLOCK ? V - block * BLOCK : BLOCK; }

/* exp(x) for x <= 0, 0 from where float32 begins to lose digits; NaN stays. */
INLINE vec weight(vec x) { return where(x < -87.0f, splat(0.0f), exponential(x)); }

/* `count` numbers of a row, at most a register full, and what stands in for those beyond its end. */
INLINE vec load_some(const float *from, int64_t count, float beyond)
{
    float numbers[WIDE];
    if (count >= WIDE) return load(from);
    for (int64_t i = 0; i < WIDE; i++) numbers[i] = i < count ? from[i] : beyond;
    return load(numbers);
}

INLINE ivec load_kept(const uint8_t *from, int64_t count)
{
    bytes kept = {0};
    memcpy(&kept, from, (size_t)(count < WIDE ? count : WIDE));
    return -__builtin_convertvector(kept, ivec);
}

INLINE double sum(vec v)
{
    float lanes[WIDE];
    store(lanes, v);
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

static float highest(const float *logits, int64_t V)
{
    vec most = splat(-INFINITY);
    for (int64_t v = 0; v < V; v += WIDE) {
        const vec x = load_some(logits + v, V - v, -INFINITY);
        most = where(x > most, x, most);
    }
    return largest(most);
}

/* Weights of `count` <= 128 ids: what they add up to, and what the kept ones do; written to `out` where it is given. */
INLINE double block(const float *logits, const uint8_t *kept, float top, int64_t count, double *full, float *out)
{
    vec sampled = {0}, all = {0};
    for (int64_t i = 0; i < count; i += WIDE) {
        vec w = weight(load_some(logits + i, count - i, -INFINITY) - top);
        all += w;
        if (kept != NULL) w = (vec)((ivec)w & load_kept(kept + i, count - i));
        sampled += w;
        if (out != NULL) store(out + i, w);
    }
    *full = sum(all);
    return kept == NULL ? *full : sum(sampled);
}

/* First id whose cumulative weight exceeds `number` times their sum; never one of weight 0. */
static int64_t search(const float *logits, const uint8_t *kept, float top, int64_t V, const double *sums, double number)
{
    const int64_t blocks = (V + BLOCK - 1) / BLOCK;
    const double target = number * sums[blocks - 1];
    float weights[BLOCK];
    double before = 0.0, unused;
    int64_t b = 0, found = 0;
    while (b < blocks - 1 && !(sums[b] > target)) b++; /* a number below 1 times a sum stays below it */
    if (b > 0) before = sums[b - 1];
    const int64_t count = length(V, b);
    block(logits + b * BLOCK, kept == NULL ? NULL : kept + b * BLOCK, top, count, &unused, weights);
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] > 0.0f) found = i; /* the block's last one where rounding made its ids less than the block */
        before += weights[i];
        if (before > target) break;
    }
    return b * BLOCK + found;
}

/* In float64, so that the compiler does not join what is taken off: large logits would lose digits. */
INLINE float logprob(float logit, float top, double log_total) { return (float)((double)(logit - top) - log_total); }

static void pick_row(const Pick *p, int64_t b)
{
    const int64_t V = p->V, blocks = (V + BLOCK - 1) / BLOCK;
    const float *logits = p->logits + b * V, top = highest(logits, V);
    const uint8_t *kept = p->kept == NULL ? NULL : p->kept + b * V;
    double *sums = p->sums + b * blocks, total = 0.0, full = 0.0, one;
    for (int64_t i = 0; i < blocks; i++) {
        const uint8_t *part = kept == NULL ? NULL : kept + i * BLOCK;
        total += block(logits + i * BLOCK, part, top, length(V, i), &one, NULL);
        sums[i] = total;
        full += one;
    }
    if (full != full) total = full; /* NaN shows also where truncation removed it */
    int64_t token = 0;
    if (p->uniforms != NULL) token = search(logits, kept, top, V, sums, p->uniforms[b]);
    else while (token < V - 1 && !(logits[token] == top)) token++;
    p->tokens[b] = token;
    p->logprobs[b] = logprob(logits[token], top, log(total));
    p->full[b] = logprob(logits[token], top, log(full));
    if (p->all == NULL) return;
    float *all = p->all + b * V;
    const int64_t is_all = kept == NULL || total != total;
    total = log(total);
    for (int64_t v = 0; v < V; v++) all[v] = is_all || kept[v] ? logprob(logits[v], top, total) : -INFINITY;
}

/* Rows begin ... end - 1. */
void pick_tokens(const Pick *p, int64_t begin, int64_t end)
{
    for (int64_t b = begin; b < end; b++) pick_row(p, b);
}
