/* Weights of int8 with one scale per output, activations of int8 with one scale per GROUP numbers of a row: sums of a group are
 * exact integers, and groups are added from the first to the last. */
#ifndef KVPOOL_QUANTIZED_H
#define KVPOOL_QUANTIZED_H

#include "state.h"

#define BYTES 4           /* of a word */
#define GROUP 64          /* numbers; few, because one large activation makes all others of its group coarse */
#define NOT_A_NUMBER 0x7fc00000u /* these two: bits of a float */
#define INFINITE 0x7f800000u
/* CPUs multiply unsigned by signed bytes. So weights are stored with 128 added, and sums start at −128 · Σ activations. */
#define ADDED 128

static int64_t groups_of(const struct kvpool_linear *linear) { return (linear->k + GROUP - 1) / GROUP; }

/* sum + Σ over the 4 bytes of each word: those of w unsigned, those of x signed. */
INLINE vi dot_bytes(vi sum, vu w, vu x) {
#if defined(__AVX512VNNI__) && W == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && W == 8
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX512BW__) && W == 16
    __m512i a = (__m512i)w, b = (__m512i)x; /* as below */
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return (vi)_mm512_add_epi32((__m512i)sum, _mm512_add_epi32(even, odd));
#elif defined(__AVX2__) && W == 8
    /* In 16 bits: even bytes, then odd ones. maddubs would saturate. */
    __m256i a = (__m256i)w, b = (__m256i)x;
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x);
#else
    UNROLL for (int i = 0; i < BYTES; i++) sum += (vi)(w >> (8 * i) & 255u) * ((vi)(x << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

typedef int8_t vb __attribute__((vector_size(W), aligned(1), may_alias));

INLINE int32_t largest_integer_of(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];
    UNROLL for (int lane = 1; lane < W; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

INLINE int32_t sum_of_integers(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    UNROLL for (int lane = 0; lane < W; lane++) sum += x[lane];
    return sum;
#endif
}

/* A group: `count` numbers, the others are zero. NaN and infinity make its scale NaN. */
static void quantize_group(const number *from, int64_t count, int8_t *to, float *scale, int32_t *offset) {
    number padded[GROUP] = {0};
    if (count < GROUP) {
        memcpy(padded, from, count * sizeof *from);
        from = padded;
    }
    vi largest_of_lanes = {0}, sum = {0};
    UNROLL for (int i = 0; i < GROUP; i += W) { /* bits without the sign: in the order of sizes, NaN last */
        vi size = (vi)load_numbers(from + i) & 0x7fffffff, is_larger = size > largest_of_lanes;
        largest_of_lanes = (size & is_larger) | (largest_of_lanes & ~is_larger);
    }
    word bits = largest_integer_of(largest_of_lanes);
    float largest = as_float(bits < INFINITE ? bits : NOT_A_NUMBER), factor = largest > 0 ? 127 / largest : 0;
    UNROLL for (int i = 0; i < GROUP; i += W) {
        vf shifted = load_numbers(from + i) * factor + 12582912.0f; /* the low bits of 1.5 · 2^23 + x are x, rounded */
        vi rounded = (vi)((vu)shifted << 24) >> 24;
        sum += rounded;
        *(vb *)(to + i) = __builtin_convertvector(rounded, vb);
    }
    *scale = largest / 127;
    *offset = -ADDED * sum_of_integers(sum);
}

/* Row t of a quantized product's inputs: `count` numbers, then zeros. */
static void quantize_row(const struct kvpool_model *model, int64_t t, const number *from, int64_t count,
                         const struct kvpool_linear *linear) {
    int64_t groups = groups_of(linear);
    for (int64_t g = 0; g < groups; g++) {
        int64_t left = count - g * GROUP;
        quantize_group(from + g * GROUP, left < GROUP ? (left < 0 ? 0 : left) : GROUP, model->quantized + (t * groups + g) * GROUP,
                       &model->scales[t * groups + g], &model->offsets_of_groups[t * groups + g]);
    }
}

/* sums[r][c] = Σ over groups of the scale of row r times its integers times those of vector c. Registers hold the sums of a group,
 * memory those of numbers: so a pass has as many rows as one of the model's type, and weights are loaded as seldom. */
INLINE void byte_product(int num_rows, int columns, const struct kvpool_model *model, const struct kvpool_linear *linear, int64_t row,
                         int64_t first_output, const word *weight, const word *ahead, vf sums[ROWS][COLUMNS]) {
    int64_t k_words = linear->k / BYTES, groups = groups_of(linear);
    const word *inputs = (const word *)model->quantized + row * groups * (GROUP / BYTES);
    const float *scales = model->scales + row * groups;
    const int32_t *offsets = model->offsets_of_groups + row * groups;
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = set(0);
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * (GROUP / BYTES), end = first + GROUP / BYTES < k_words ? first + GROUP / BYTES : k_words;
        vi whole[ROWS][COLUMNS];
        UNROLL for (int r = 0; r < num_rows; r++)
            UNROLL for (int c = 0; c < columns; c++) whole[r][c] = (vi)set_word((word)offsets[r * groups + g]);
        for (int64_t i = first; i < end; i++) {
            vu w[COLUMNS];
            load_weights(num_rows == 1, columns, weight, ahead, k_words, i, w);
            UNROLL for (int r = 0; r < num_rows; r++) {
                vu x = set_word(inputs[r * groups * (GROUP / BYTES) + i]);
                UNROLL for (int c = 0; c < columns; c++) whole[r][c] = dot_bytes(whole[r][c], w[c], x);
            }
        }
        /* Compilers would copy the numbers' sums into registers too, and the integers' out of them. */
        __asm__ volatile("" ::: "memory");
        UNROLL for (int r = 0; r < num_rows; r++) {
            vf scale = set(scales[r * groups + g]);
            UNROLL for (int c = 0; c < columns; c++)
                sums[r][c] = multiply_add(__builtin_convertvector(whole[r][c], vf), scale, sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sums[r][c] = sums[r][c] * load(linear->scales + first_output + c * W);
}

INLINE void byte_product_of_columns(int num_rows, int columns, const struct kvpool_model *model, const struct kvpool_linear *linear,
                                    int64_t row, int64_t first_output, const word *weight, const word *ahead, vf sums[ROWS][COLUMNS]) {
    switch (columns) {
    case 1: byte_product(num_rows, 1, model, linear, row, first_output, weight, ahead, sums); break;
    case 2: byte_product(num_rows, 2, model, linear, row, first_output, weight, ahead, sums); break;
    case 3: byte_product(num_rows, 3, model, linear, row, first_output, weight, ahead, sums); break;
    default: byte_product(num_rows, 4, model, linear, row, first_output, weight, ahead, sums); break;
    }
}

/* Of at most ROWS rows of the quantized inputs, from `row` on; the scales of outputs included. */
static __attribute__((noinline)) void product_of_bytes(int num_rows, int columns, const struct kvpool_model *model,
                                                       const struct kvpool_linear *linear, int64_t row, int64_t first_output,
                                                       const word *weight, const word *ahead, vf sums[ROWS][COLUMNS]) {
    switch (num_rows) {
    case 1: byte_product_of_columns(1, columns, model, linear, row, first_output, weight, ahead, sums); break;
    case 2: byte_product_of_columns(2, columns, model, linear, row, first_output, weight, ahead, sums); break;
    case 3: byte_product_of_columns(3, columns, model, linear, row, first_output, weight, ahead, sums); break;
#if ROWS > 3
    case 4: byte_product_of_columns(4, columns, model, linear, row, first_output, weight, ahead, sums); break;
    case 5: byte_product_of_columns(5, columns, model, linear, row, first_output, weight, ahead, sums); break;
    default: byte_product_of_columns(6, columns, model, linear, row, first_output, weight, ahead, sums); break;
#endif
    }
}

#endif
