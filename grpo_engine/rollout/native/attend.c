/* Attention of the rows of a decoding batch, on one processor core.
 *
 * Reading each row's own keys and values is what a step of a small model spends most of its time on, and a processor
 * reads ahead only as far as the next gap. So keys and values lie in tiles of 16 tokens: a tile holds those of all rows,
 * one row after another. Four tiles are gone through side by side, each without gaps. In a tile the keys are transposed,
 * so that 16 scores come out of a register without adding up its lanes.
 *
 * A prompt is a tile's row that several rows of the batch share. Softmax is taken over 64 tokens at a time, with the
 * largest score so far (Milakov & Gimelshein 2018, algorithm 3).
 *
 * Shapes: B rows, S prompts, H key-value heads, G query heads that share one, Q new tokens a row, D width, W = D rounded
 * up to 16. Of the new tokens, a query sees its own and those before it.
 */

#include <stdlib.h>

#include "vectors.h"

#define LANES 16  /* tokens of a tile */
#define TOKENS 64 /* that are taken together */
#define QUERIES 4 /* that are taken together */

#if defined(__AVX512F__)
#define REGISTERS 4 /* of scores, or of values, that are computed for each of the queries at a time */
#else
#define REGISTERS 2
#endif

/* With few results at a time each is summed in so many parts, since an addition to a sum waits for the one before. */
#define PARTS(results) (REGISTERS * QUERIES / (results))

typedef struct {
    const float *queries, *keys, *values;                          /* of the new tokens, by [row, head, token] */
    int64_t query_strides[3], key_strides[3], value_strides[3];
    float *const *prompt_tiles, *const *own_tiles;                 /* each [S or B, H, 2, 16 x W] */
    const int64_t *prompt, *first;                                 /* [S] tokens of a prompt; [S + 1] its first row */
    const int64_t *held;                                           /* [B] own tokens; the new ones are written behind */
    float *out;                                                    /* [B, Q, H x G, D] */
    int64_t S, H, G, Q, D, window;                                 /* a query sees so many tokens, itself included */
    float scale;
} Work;

/* What is known of a query so far: [W] scaled query, [W] sum of weights times values, [16] sums of weights, to be
 * added up, [16] largest score (the first number). */
#define STATE(W) (2 * (W) + 2 * LANES)

/* Scores of `queries` queries with `registers` registers of tokens, from register `at` on. */
INLINE void score(const int queries, const int registers, float *const *state, const float *const *tile, int64_t W,
                  int at, vec scores[QUERIES][TOKENS / WIDE])
{
    const int parts = PARTS(queries * registers) < 4 ? PARTS(queries * registers) : 4; /* 4, 2 or 1 divide W */
    vec sums[4][QUERIES][REGISTERS];
    const float *keys[REGISTERS];
    for (int r = 0; r < registers; r++) {
        keys[r] = tile[(at + r) * WIDE / LANES] + (at + r) * WIDE % LANES;
        for (int part = 0; part < parts; part++)
            for (int i = 0; i < queries; i++) sums[part][i][r] = (vec){0};
    }
    for (int64_t d = 0; d < W; d += parts)
        for (int part = 0; part < parts; part++)
            for (int r = 0; r < registers; r++) {
                const vec key = load(keys[r] + (d + part) * LANES);
                for (int i = 0; i < queries; i++) sums[part][i][r] += state[i][d + part] * key;
            }
    for (int i = 0; i < queries; i++)
        for (int r = 0; r < registers; r++) {
            scores[i][at + r] = sums[0][i][r];
            for (int part = 1; part < parts; part++) scores[i][at + r] += sums[part][i][r];
        }
}

/* Adds weights times values for `registers` registers of the width, from number `at` on. */
INLINE void mix(const int queries, const int registers, float *const *state, const float *const *tile, int64_t W,
                int64_t at, const float weights[QUERIES][TOKENS], int64_t count)
{
    const int parts = PARTS(queries * registers) < 2 ? 1 : 2;
    vec sums[2][QUERIES][REGISTERS];
    for (int i = 0; i < queries; i++)
        for (int r = 0; r < registers; r++)
            sums[0][i][r] = load(state[i] + W + at + r * WIDE), sums[1][i][r] = (vec){0};
    for (int64_t t = 0; t < count; t += parts)
        for (int part = 0; part < parts && t + part < count; part++) {
            const float *value = tile[(t + part) / LANES] + (LANES + (t + part) % LANES) * W + at;
            for (int r = 0; r < registers; r++) {
                const vec numbers = load(value + r * WIDE);
                for (int i = 0; i < queries; i++) sums[part][i][r] += weights[i][t + part] * numbers;
            }
        }
    for (int i = 0; i < queries; i++)
        for (int r = 0; r < registers; r++)
            store(state[i] + W + at + r * WIDE, parts == 2 ? sums[0][i][r] + sums[1][i][r] : sums[0][i][r]);
}

/* Takes `count` tokens, at most 64, into what is known of some queries; of query i those from skip[i] on. */
INLINE void take(const int queries, float *const *state, const float *const *tile, int64_t W, int64_t count,
                 const int64_t *skip)
{
    static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int registers = (int)((count + WIDE - 1) / WIDE);
    vec scores[QUERIES][TOKENS / WIDE];
    float weights[QUERIES][TOKENS];
    ivec lane;
    memcpy(&lane, numbers, sizeof lane);
    int r = 0;
    for (; r + REGISTERS <= registers; r += REGISTERS) score(queries, REGISTERS, state, tile, W, r, scores);
    for (; r + 2 <= registers; r += 2) score(queries, 2, state, tile, W, r, scores);
    for (; r < registers; r++) score(queries, 1, state, tile, W, r, scores);
    for (int i = 0; i < queries; i++) {
        const float before = state[i][2 * W + LANES];
        const int32_t from = (int32_t)skip[i], to = (int32_t)count;
        vec most = splat(before);
        for (r = 0; r < registers; r++) {
            const ivec seen = (lane < to - r * WIDE) & (lane >= from - r * WIDE);
            most = where((scores[i][r] > most) & seen, scores[i][r], most);
        }
        const float now = largest(most);
        const vec share = exponential(splat(before - now));
        vec sum = load(state[i] + 2 * W) * share;
        for (r = 0; r < registers; r++) {
            const ivec seen = (lane < to - r * WIDE) & (lane >= from - r * WIDE);
            const vec weight = (vec)((ivec)exponential(scores[i][r] - now) & seen);
            sum += weight;
            store(weights[i] + r * WIDE, weight);
        }
        store(state[i] + 2 * W, sum);
        state[i][2 * W + LANES] = now;
        for (int64_t d = W; d < 2 * W; d += WIDE) store(state[i] + d, load(state[i] + d) * share);
    }
    int64_t at = 0;
    for (; at + REGISTERS * WIDE <= W; at += REGISTERS * WIDE) mix(queries, REGISTERS, state, tile, W, at, weights, count);
    for (; at + 2 * WIDE <= W; at += 2 * WIDE) mix(queries, 2, state, tile, W, at, weights, count);
    for (; at < W; at += WIDE) mix(queries, 1, state, tile, W, at, weights, count);
}

static void take_some(int64_t queries, float *const *state, const float *const *tile, int64_t W, int64_t count,
                      const int64_t *skip)
{
    switch (queries) {
    case 1: take(1, state, tile, W, count, skip); break;
    case 2: take(2, state, tile, W, count, skip); break;
    case 3: take(3, state, tile, W, count, skip); break;
    default: take(4, state, tile, W, count, skip);
    }
}

/* Rows begin ... end - 1 of the work, which one thread does. */
typedef struct {
    const Work *work;
    int64_t begin, end, W, N; /* N = G x Q queries meet one key-value head; query n is of new token n % Q */
    float *states;            /* [end - begin, H, N, STATE(W)] */
} Part;

INLINE float *state_of(const Part *p, int64_t b, int64_t h, int64_t n)
{
    return p->states + (((b - p->begin) * p->work->H + h) * p->N + n) * STATE(p->W);
}

INLINE const float *element(const float *from, const int64_t *strides, int64_t b, int64_t h, int64_t q)
{
    return from + b * strides[0] + h * strides[1] + q * strides[2];
}

/* The queries of rows begin ... end - 1 that meet head h take in the tokens from `from` on, as far as 64 and `tokens`
 * go; sequence `at` of the tiles holds them. Row b's queries come `before` + held[b] tokens behind the first of them. */
static void take_chunk(const Part *p, int64_t begin, int64_t end, int64_t h, float *const *tiles, int64_t at,
                       int64_t from, int64_t tokens, int64_t before)
{
    const Work *w = p->work;
    const int64_t count = tokens - from < TOKENS ? tokens - from : TOKENS;
    const float *tile[TOKENS / LANES];
    float *state[QUERIES];
    int64_t skip[QUERIES], found = 0;
    for (int64_t t = 0; t * LANES < count; t++) tile[t] = tiles[from / LANES + t] + (at * w->H + h) * 2 * LANES * p->W;
    for (int64_t b = begin; b < end; b++)
        for (int64_t n = 0; n < p->N; n++) {
            const int64_t unseen = before + w->held[b] + n % w->Q + 1 - w->window - from;
            if (unseen >= count) continue;
            skip[found] = unseen < 0 ? 0 : unseen;
            state[found++] = state_of(p, b, h, n);
            if (found == QUERIES) take_some(found, state, tile, p->W, count, skip), found = 0;
        }
    if (found) take_some(found, state, tile, p->W, count, skip);
}

/* A query begins with the new tokens that it sees: its own and earlier ones. */
static void begin_query(const Part *p, int64_t b, int64_t h, int64_t n)
{
    const Work *w = p->work;
    const int64_t W = p->W, q = n % w->Q;
    const float *query = element(w->queries, w->query_strides, b, h * w->G + n / w->Q, q);
    float *state = state_of(p, b, h, n), *sum = state + 2 * W, *most = sum + LANES;
    memset(state, 0, (size_t)STATE(W) * sizeof(float));
    for (int64_t d = 0; d < w->D; d++) state[d] = query[d] * w->scale;
    for (int64_t r = q; r >= 0 && q - r < w->window; r--) {
        const float *key = element(w->keys, w->key_strides, b, h, r);
        const float *value = element(w->values, w->value_strides, b, h, r);
        float one = 0.0f, share = 0.0f, weight = 1.0f;
        for (int64_t d = 0; d < w->D; d++) one += state[d] * key[d];
        if (r < q) {
            const float now = one > *most ? one : *most;
            share = exponential(splat(*most - now))[0], weight = exponential(splat(one - now))[0];
            one = now;
        }
        *most = one;
        *sum = *sum * share + weight;
        for (int64_t d = 0; d < w->D; d++) state[W + d] = state[W + d] * share + weight * value[d];
    }
}

static void write_new(const Part *p, int64_t b, int64_t h)
{
    const Work *w = p->work;
    const int64_t W = p->W;
    for (int64_t q = 0; q < w->Q; q++) {
        const int64_t at = w->held[b] + q;
        const float *key = element(w->keys, w->key_strides, b, h, q);
        const float *value = element(w->values, w->value_strides, b, h, q);
        float *tile = w->own_tiles[at / LANES] + (b * w->H + h) * 2 * LANES * W;
        for (int64_t d = 0; d < W; d++) tile[d * LANES + at % LANES] = d < w->D ? key[d] : 0.0f;
        for (int64_t d = 0; d < W; d++) tile[(LANES + at % LANES) * W + d] = d < w->D ? value[d] : 0.0f;
    }
}

static void end_query(const Part *p, int64_t b, int64_t h, int64_t n)
{
    const Work *w = p->work;
    const float *state = state_of(p, b, h, n);
    float sum = 0.0f, *out = w->out + ((b * w->Q + n % w->Q) * w->H * w->G + h * w->G + n / w->Q) * w->D;
    for (int64_t lane = 0; lane < LANES; lane++) sum += state[2 * p->W + lane];
    for (int64_t d = 0; d < w->D; d++) out[d] = state[p->W + d] / sum;
}

static void attend_part(const Part *p)
{
    const Work *w = p->work;
    int64_t longest = 0;
    for (int64_t b = p->begin; b < p->end; b++) {
        if (w->held[b] > longest) longest = w->held[b];
        for (int64_t h = 0; h < w->H; h++)
            for (int64_t n = 0; n < p->N; n++) begin_query(p, b, h, n);
    }
    for (int64_t s = 0; s < w->S; s++) {
        const int64_t begin = w->first[s] > p->begin ? w->first[s] : p->begin;
        const int64_t end = w->first[s + 1] < p->end ? w->first[s + 1] : p->end;
        for (int64_t t = 0; begin < end && t < w->prompt[s]; t += TOKENS)
            for (int64_t h = 0; h < w->H; h++)
                take_chunk(p, begin, end, h, w->prompt_tiles, s, t, w->prompt[s], w->prompt[s]);
    }
    for (int64_t t = 0; t <= longest; t += TOKENS)
        for (int64_t b = p->begin; b < p->end; b++)
            for (int64_t h = 0; h < w->H; h++) {
                if (t < w->held[b]) take_chunk(p, b, b + 1, h, w->own_tiles, b, t, w->held[b], 0);
                if (t == w->held[b] / TOKENS * TOKENS) write_new(p, b, h); /* the tile is at hand */
            }
    for (int64_t b = p->begin; b < p->end; b++)
        for (int64_t h = 0; h < w->H; h++)
            for (int64_t n = 0; n < p->N; n++) end_query(p, b, h, n);
}

/* Returns 0, or 1 where memory for what is known of the queries is refused. */
int attend(const Work *work, int64_t begin, int64_t end)
{
    Part part = {work, begin, end, (work->D + LANES - 1) / LANES * LANES, work->G * work->Q, NULL};
    part.states = aligned_alloc(64, (size_t)((end - begin) * work->H * part.N * STATE(part.W)) * sizeof(float));
    if (part.states == NULL) return 1;
    attend_part(&part);
    free(part.states);
    return 0;
}
