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

/* The larger one; b if one of them is NaN. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* a · b + c, rounded once where the CPU can: the compiler is free to do so elsewhere, and may choose otherwise in each place. */
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float sum_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

/* Of numbers that are not NaN. */
INLINE float largest_of(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

INLINE vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* 2^x for x ≤ 0; 0 below −126.5; NaN stays NaN. Relative error below 2e-7 down to −126: of 2^n, n the nearest integer, times a
 * minimax polynomial of the rest. */
INLINE vf exp2_of(vf x) {
    vf magic = set(12583039.0f); /* 1.5 · 2^23 + 127: adding it rounds to an integer, whose low bits are a float's exponent */
    x = larger(set(-127.0f), x); /* whose exponent is 0, and so is the float */
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf y = set(1.326472731307149e-3f);
    y = multiply_add(y, f, set(9.671512991189957e-3f));
    y = multiply_add(y, f, set(5.550733581185341e-2f));
    y = multiply_add(y, f, set(2.4022242426872253e-1f));
    y = multiply_add(y, f, set(6.931470036506653e-1f));
    y = multiply_add(y, f, set(1.0f));
    return y * (vf)((vi)shifted << 23);
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
INLINE vf load_numbers(const number *p) {
#if !BFLOAT16
    return load(p);
#elif defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    float lanes[W];
    UNROLL for (int i = 0; i < W; i++) lanes[i] = widen(p[i]);
    return load(lanes);
#endif
}

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
