/* Vectors of W words, for each instruction set, and numbers of the type. */
#ifndef KVPOOL_VECTORS_H
#define KVPOOL_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#define ROWS 6 /* 24 sums, 4 weights and a broadcast in 32 registers */
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#define ROWS 3 /* 12 sums in 16 registers */
#elif defined(__aarch64__)
#include <arm_neon.h>
#define W 4
#define ROWS 6
#else
#define W 4
#define ROWS 3
#endif

#if BFLOAT16
#define P 2
typedef uint16_t number;
#else
#define P 1
typedef float number;
#endif


typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t word;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE vf set(float x) { return (vf){0} + x; }
INLINE vu set_word(word x) { return (vu){0} + x; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vu load_words(const word *p) { return *(const vu *)p; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* The larger one, or NaN if one of them is. */
INLINE vf larger(vf a, vf b) { return choose((a > b) | (a != a), a, b); }
INLINE float larger_number(float a, float b) { return a > b || a != a ? a : b; }

INLINE float sum_of(vf x) {
    float lanes[W], sum = 0;
    store(lanes, x);
    for (int i = 0; i < W; i++) sum += lanes[i];
    return sum;
}

INLINE float largest_of(vf x) {
    float lanes[W];
    store(lanes, x);
    float largest = lanes[0];
    for (int i = 1; i < W; i++) largest = larger_number(lanes[i], largest);
    return largest;
}

/* e^x; exactly 0 below −87, infinite above 88.7; NaN stays NaN. Relative error below 2e-7. */
INLINE vf exp_of(vf x) {
    vf bounded = choose(x < -87.5f, set(-87.5f), x);
    bounded = choose(bounded > 88.7f, set(88.7f), bounded);
    vf scaled = bounded * 1.44269504088896341f;
    vf magic = set(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    vf shifted = scaled + magic;
    vf n = shifted - magic;
    vf f = bounded - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    vf y = set(1.9875691500e-4f);
    y = y * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    vi exponent = ((vi)shifted - (vi)magic + 127) << 23;
    y = y * (vf)exponent;
    y = choose(x < -87.0f, set(0), y);
    return choose(x > 88.7f, set(INFINITY), y);
}

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_of(x + x) + 1.0f); }

INLINE float as_float(word bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE word as_word(float x) {
    word bits;
    memcpy(&bits, &x, 4);
    return bits;
}

#if BFLOAT16
INLINE float widen(number x) { return as_float((word)x << 16); }

/* To the nearest, ties to even. NaN stays NaN: adding could carry its mantissa into the exponent. */
INLINE number narrow(float x) {
    word bits = as_word(x);
    return x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
INLINE float widen(number x) { return x; }
INLINE number narrow(float x) { return x; }
#endif

/* W numbers. */
INLINE void store_numbers(number *p, vf x) {
#if !BFLOAT16
    store(p, x);
#elif defined(__AVX512BF16__)
    __m256bh narrowed = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &narrowed, sizeof narrowed);
#else
    float lanes[W];
    store(lanes, x);
    UNROLL for (int i = 0; i < W; i++) p[i] = narrow(lanes[i]);
#endif
}

/* The first `count` numbers of x, all W of them if there are. */
INLINE void store_part(float *p, vf x, int64_t count) {
    if (count >= W) {
        store(p, x);
    } else {
        float lanes[W];
        store(lanes, x);
        memcpy(p, lanes, count * sizeof *lanes);
    }
}

INLINE vf load_part(const float *p, int64_t count) {
    if (count >= W) return load(p);
    float lanes[W] = {0};
    memcpy(lanes, p, count * sizeof *lanes);
    return load(lanes);
}

INLINE void store_numbers_part(number *p, vf x, int64_t count) {
    if (count >= W) {
        store_numbers(p, x);
    } else {
        float lanes[W];
        store(lanes, x);
        for (int64_t i = 0; i < count; i++) p[i] = narrow(lanes[i]);
    }
}

/* sum + Σ over the P numbers of each word. */
INLINE vf dot(vf sum, vu a, vu b) {
#if !BFLOAT16
    return sum + (vf)a * (vf)b;
#elif defined(__AVX512BF16__) && W == 16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    sum = sum + (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

#endif
