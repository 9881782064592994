/* Registers as wide as the processor has them, in the vector extensions of gcc and clang. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDE 16 /* numbers in a register */
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE)));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec where(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

INLINE float largest(vec v)
{
    float lanes[WIDE];
    store(lanes, v);
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

/* 2^(x / ln 2) for x <= 0, not below 2^-126: a polynomial for halves of the exponent, relative error 2e-7. NaN stays. */
INLINE vec exponential(vec x)
{
    vec y = x * 1.44269504f;
    y = where(y < -126.0f, splat(-126.0f), y);
    const ivec whole = __builtin_convertvector(y - 0.5f, ivec);
    const vec f = y - __builtin_convertvector(whole, vec);
    const vec p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f
                  + f * (0.00133335581f + f * 0.000154035304f)))));
    return (vec)((ivec)p + (whole << 23));
}
