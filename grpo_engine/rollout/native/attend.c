/* Attention of the rows of a decoding batch, on one processor core.
 *
 * Reading each row's own keys and values is what a step of a small model spends most of its time on, and memory is read
 * twice as fast in one run as in pieces of 16 KB with gaps between them. So keys and values lie in tiles of 16 tokens:
 * a tile holds those of all rows, one row after another, and is read from its first number to its last. In a tile the
 * keys are transposed, so that 16 scores come out of a register without adding up its lanes.
 *
 * A prompt is a tile's row that several rows of the batch share. Softmax is taken over 64 tokens at a time, with the
 * largest score so far (Milakov & Gimelshein 2018, algorithm 3).
 *
 * Shapes: B rows, S prompts, H key-value heads, G query heads that share one, Q new tokens a row, D width, W = D rounded
 * up to 16. Of the new tokens, a query sees its own and those before it.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define TILES 4   /* that are taken together: 64 tokens */
#define QUERIES 4 /* that are taken together */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

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

/* What is known of a query so far: [W] scaled query, [W] sum of weights times values, [16] sum of weights, [16] largest
 * score (the first number). */
#define STATE(W) (2 * (W) + 2 * LANES)

INLINE vec load(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* 2^(x / ln 2) for x <= 0, not below 2^-126: a polynomial for halves of the exponent, relative error 2e-7. NaN stays. */
INLINE vec exponential(vec x)
{
    vec y = x * 1.44269504f;
    y = pick(y < -126.0f, splat(-126.0f), y);
    const ivec whole = __builtin_convertvector(y - 0.5f, ivec);
    const vec f = y - __builtin_convertvector(whole, vec);
    const vec p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f
                  + f * (0.00133335581f + f * 0.000154035304f)))));
    return (vec)((ivec)p + (whole << 23));
}

INLINE float largest(vec v)
{
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

INLINE float total(vec v)
{
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Scores of `queries` queries with the keys of `tiles` tiles. */
INLINE void score(const int queries, const int tiles, float *const *state, const float *const *tile, int64_t W,
                  vec scores[QUERIES][TILES])
{
    const int parts = queries * tiles <= 4 ? 4 : queries * tiles <= 8 ? 2 : 1; /* sums that wait for each other */
    vec sums[4][QUERIES][TILES];
    for (int part = 0; part < parts; part++)
        for (int i = 0; i < queries; i++)
            for (int t = 0; t < tiles; t++) sums[part][i][t] = (vec){0};
    for (int64_t d = 0; d < W; d += parts)
        for (int part = 0; part < parts; part++)
            for (int t = 0; t < tiles; t++) {
                const vec key = load(tile[t] + (d + part) * LANES);
                for (int i = 0; i < queries; i++) sums[part][i][t] += state[i][d + part] * key;
            }
    for (int i = 0; i < queries; i++)
        for (int t = 0; t < tiles; t++) {
            scores[i][t] = sums[0][i][t];
            for (int part = 1; part < parts; part++) scores[i][t] += sums[part][i][t];
        }
}

/* Adds weights times values for `vecs` registers of the width, from number `at` on. */
INLINE void mix(const int queries, const int vecs, float *const *state, const float *const *tile, int64_t W, int64_t at,
                const float weights[QUERIES][TILES * LANES], int64_t count)
{
    const int parts = queries * vecs <= 4 ? 2 : 1;
    vec sums[2][QUERIES][4];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vecs; v++) sums[0][i][v] = load(state[i] + W + at + v * LANES), sums[1][i][v] = (vec){0};
    for (int64_t t = 0; t < count; t += parts)
        for (int part = 0; part < parts && t + part < count; part++) {
            const float *value = tile[(t + part) / LANES] + (LANES + (t + part) % LANES) * W + at;
            for (int v = 0; v < vecs; v++) {
                const vec numbers = load(value + v * LANES);
                for (int i = 0; i < queries; i++) sums[part][i][v] += weights[i][t + part] * numbers;
            }
        }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vecs; v++)
            store(state[i] + W + at + v * LANES, parts == 2 ? sums[0][i][v] + sums[1][i][v] : sums[0][i][v]);
}

/* Takes `count` tokens, at most 64, into what is known of some queries; of query i those from skip[i] on. */
INLINE void take(const int queries, float *const *state, const float *const *tile, int64_t W, int64_t count,
                 const int64_t *skip)
{
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int tiles = (int)((count + LANES - 1) / LANES);
    vec scores[QUERIES][TILES];
    float weights[QUERIES][TILES * LANES];
    switch (tiles) {
    case 1: score(queries, 1, state, tile, W, scores); break;
    case 2: score(queries, 2, state, tile, W, scores); break;
    case 3: score(queries, 3, state, tile, W, scores); break;
    default: score(queries, 4, state, tile, W, scores);
    }
    for (int i = 0; i < queries; i++) {
        const float before = state[i][2 * W + LANES];
        vec most = splat(before);
        for (int t = 0; t < tiles; t++) {
            const ivec seen = (lane < (int32_t)count - t * LANES) & (lane >= (int32_t)skip[i] - t * LANES);
            most = pick((scores[i][t] > most) & seen, scores[i][t], most);
        }
        const float now = largest(most);
        const vec share = exponential(splat(before - now));
        vec sum = load(state[i] + 2 * W) * share;
        for (int t = 0; t < tiles; t++) {
            const ivec seen = (lane < (int32_t)count - t * LANES) & (lane >= (int32_t)skip[i] - t * LANES);
            const vec weight = (vec)((ivec)exponential(scores[i][t] - now) & seen);
            sum += weight;
            store(weights[i] + t * LANES, weight);
        }
        store(state[i] + 2 * W, sum);
        state[i][2 * W + LANES] = now;
        for (int64_t d = W; d < 2 * W; d += LANES) store(state[i] + d, load(state[i] + d) * share);
    }
    int64_t at = 0;
    for (; at + 4 * LANES <= W; at += 4 * LANES) mix(queries, 4, state, tile, W, at, weights, count);
    for (; at + 2 * LANES <= W; at += 2 * LANES) mix(queries, 2, state, tile, W, at, weights, count);
    for (; at < W; at += LANES) mix(queries, 1, state, tile, W, at, weights, count);
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

/* The queries of rows begin ... end - 1 that meet head h take in the tokens from `from` on, as far as `tokens` and 64
 * go; the tiles' row `at` holds them. A row's queries sit `before + held` tokens behind the first token. */
static void take_chunk(const Work *w, float *states, int64_t W, int64_t first, int64_t begin, int64_t end, int64_t h,
                       float *const *tiles, int64_t at, int64_t from, int64_t tokens, int64_t before)
{
    const int64_t N = w->G * w->Q, count = tokens - from < TILES * LANES ? tokens - from : TILES * LANES;
    const float *tile[TILES];
    float *state[QUERIES];
    int64_t skip[QUERIES], found = 0;
    for (int64_t t = 0; t * LANES < count; t++) tile[t] = tiles[from / LANES + t] + (at * w->H + h) * 2 * LANES * W;
    for (int64_t b = begin; b < end; b++)
        for (int64_t n = 0; n < N; n++) {
            skip[found] = before + w->held[b] + n % w->Q + 1 - w->window - from;
            if (skip[found] < 0) skip[found] = 0;
            if (skip[found] < count) state[found++] = states + (((b - first) * w->H + h) * N + n) * STATE(W);
            if (found == QUERIES) take_some(found, state, tile, W, count, skip), found = 0;
        }
    if (found) take_some(found, state, tile, W, count, skip);
}

/* A query begins with the new tokens that it sees. */
static void begin_query(const Work *w, float *state, int64_t W, int64_t b, int64_t h, int64_t g, int64_t q)
{
    const float *query = w->queries + b * w->query_strides[0] + (h * w->G + g) * w->query_strides[1]
                         + q * w->query_strides[2];
    memset(state, 0, (size_t)STATE(W) * sizeof(float));
    for (int64_t d = 0; d < w->D; d++) state[d] = query[d] * w->scale;
    for (int64_t r = q; r >= 0 && q - r < w->window; r--) {
        const float *key = w->keys + b * w->key_strides[0] + h * w->key_strides[1] + r * w->key_strides[2];
        const float *value = w->values + b * w->value_strides[0] + h * w->value_strides[1] + r * w->value_strides[2];
        float one = 0.0f, *most = state + 2 * W + LANES;
        for (int64_t d = 0; d < w->D; d++) one += state[d] * key[d];
        const float now = r == q || one > *most ? one : *most;
        const float share = r == q ? 0.0f : exponential(splat(*most - now))[0], weight = exponential(splat(one - now))[0];
        *most = now;
        state[2 * W] = state[2 * W] * share + weight;
        for (int64_t d = 0; d < w->D; d++) state[W + d] = state[W + d] * share + weight * value[d];
    }
}

static void write_new(const Work *w, int64_t W, int64_t b, int64_t h)
{
    for (int64_t q = 0; q < w->Q; q++) {
        const int64_t at = w->held[b] + q;
        const float *key = w->keys + b * w->key_strides[0] + h * w->key_strides[1] + q * w->key_strides[2];
        const float *value = w->values + b * w->value_strides[0] + h * w->value_strides[1] + q * w->value_strides[2];
        float *tile = w->own_tiles[at / LANES] + (b * w->H + h) * 2 * LANES * W;
        for (int64_t d = 0; d < W; d++) tile[d * LANES + at % LANES] = d < w->D ? key[d] : 0.0f;
        for (int64_t d = 0; d < W; d++) tile[(LANES + at % LANES) * W + d] = d < w->D ? value[d] : 0.0f;
    }
}

/* Rows begin ... end - 1. Returns 0, or 1 where memory for what is known of their queries is refused. */
int attend(const Work *w, int64_t begin, int64_t end)
{
    const int64_t W = (w->D + LANES - 1) / LANES * LANES, N = w->G * w->Q;
    float *states = aligned_alloc(64, (size_t)((end - begin) * w->H * N * STATE(W)) * sizeof(float));
    if (states == NULL) return 1;
    int64_t longest = 0;
    for (int64_t b = begin; b < end; b++) {
        if (w->held[b] > longest) longest = w->held[b];
        for (int64_t h = 0; h < w->H; h++)
            for (int64_t n = 0; n < N; n++)
                begin_query(w, states + (((b - begin) * w->H + h) * N + n) * STATE(W), W, b, h, n / w->Q, n % w->Q);
    }
    for (int64_t s = 0; s < w->S; s++) {
        const int64_t from = w->first[s] > begin ? w->first[s] : begin;
        const int64_t to = w->first[s + 1] < end ? w->first[s + 1] : end;
        for (int64_t t = 0; from < to && t < w->prompt[s]; t += TILES * LANES)
            for (int64_t h = 0; h < w->H; h++)
                take_chunk(w, states, W, begin, from, to, h, w->prompt_tiles, s, t, w->prompt[s], w->prompt[s]);
    }
    for (int64_t t = 0; t <= longest; t += TILES * LANES)
        for (int64_t b = begin; b < end; b++)
            for (int64_t h = 0; h < w->H; h++) {
                if (t < w->held[b]) take_chunk(w, states, W, begin, b, b + 1, h, w->own_tiles, b, t, w->held[b], 0);
                if (t == w->held[b] / (TILES * LANES) * (TILES * LANES)) write_new(w, W, b, h);
            }
    for (int64_t b = begin; b < end; b++)
        for (int64_t h = 0; h < w->H; h++)
            for (int64_t n = 0; n < N; n++) {
                const float *state = states + (((b - begin) * w->H + h) * N + n) * STATE(W);
                const float share = 1.0f / total(load(state + 2 * W));
                float *out = w->out + ((b * w->Q + n % w->Q) * w->H * w->G + h * w->G + n / w->Q) * w->D;
                for (int64_t d = 0; d < w->D; d++) out[d] = state[W + d] * share;
            }
    free(states);
    return 0;
}
