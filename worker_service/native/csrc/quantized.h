/* Weights of int8 with one scale per output, activations of int8 with one scale per GROUP numbers of a row: sums of a group are
 * exact integers, and groups are added from the first to the last. */
#ifndef KVPOOL_QUANTIZED_H
#define KVPOOL_QUANTIZED_H

#include "state.h"

#define BYTES 4           /* of a word */
#define GROUP 64          /* numbers; few, because one large activation makes all others of its group coarse */
#define BYTE_ROWS (ROWS / 2) /* rows of a pass: each has a sum of integers and one of numbers */
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
#else
    UNROLL for (int i = 0; i < BYTES; i++) sum += (vi)(w >> (8 * i) & 255u) * ((vi)(x << (24 - 8 * i)) >> 24);
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
    vf largest_of_lanes = set(0), nothing = set(0);
    for (int64_t i = 0; i < GROUP; i += W) {
        vf x = load_numbers(from + i);
        nothing += x * 0;
        largest_of_lanes = larger((vf)((vi)x & 0x7fffffff), largest_of_lanes);
    }
    float largest = largest_of(largest_of_lanes), factor = largest > 0 ? 127 / largest : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < GROUP; i += W) {
        vi rounded = (vi)(load_numbers(from + i) * factor + 12582912.0f); /* the low bits of 1.5 · 2^23 + x are x, rounded */
        UNROLL for (int lane = 0; lane < W; lane++) {
            to[i + lane] = (int8_t)rounded[lane];
            sum += (int8_t)rounded[lane];
        }
    }
    *scale = largest / 127 + sum_of(nothing);
    *offset = -ADDED * sum;
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

/* sums[r][c] = Σ over groups of the scale of row r times its integers times those of vector c. */
INLINE void byte_product(int num_rows, int columns, const struct kvpool_model *model, const struct kvpool_linear *linear, int64_t row,
                         const word *weight, const word *ahead, vf sums[ROWS][COLUMNS]) {
    int64_t k_words = linear->k / BYTES, groups = groups_of(linear);
    const word *inputs = (const word *)model->quantized + row * groups * (GROUP / BYTES);
    const float *scales = model->scales + row * groups;
    const int32_t *offsets = model->offsets_of_groups + row * groups;
    vf sum[BYTE_ROWS][COLUMNS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sum[r][c] = set(0);
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * (GROUP / BYTES), end = first + GROUP / BYTES < k_words ? first + GROUP / BYTES : k_words;
        vi whole[BYTE_ROWS][COLUMNS];
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
        UNROLL for (int r = 0; r < num_rows; r++) {
            vf scale = set(scales[r * groups + g]);
            UNROLL for (int c = 0; c < columns; c++)
                sum[r][c] = multiply_add(__builtin_convertvector(whole[r][c], vf), scale, sum[r][c]);
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = sum[r][c];
}

#define BYTE_PRODUCT(num_rows, columns) byte_product(num_rows, columns, model, linear, row, weight, ahead, sums)

/* Of at most BYTE_ROWS rows of the quantized inputs, from `row` on; the scales of outputs included, which begin with `first`. */
static __attribute__((noinline)) void product_of_bytes(int num_rows, int columns, const struct kvpool_model *model,
                                                       const struct kvpool_linear *linear, int64_t row, int64_t first,
                                                       const word *weight, const word *ahead, vf sums[ROWS][COLUMNS]) {
    switch (num_rows * 8 + columns) {
    case 1 * 8 + 1: BYTE_PRODUCT(1, 1); break;
    case 1 * 8 + 2: BYTE_PRODUCT(1, 2); break;
    case 1 * 8 + 3: BYTE_PRODUCT(1, 3); break;
    case 1 * 8 + 4: BYTE_PRODUCT(1, 4); break;
#if BYTE_ROWS > 1
    case 2 * 8 + 1: BYTE_PRODUCT(2, 1); break;
    case 2 * 8 + 2: BYTE_PRODUCT(2, 2); break;
    case 2 * 8 + 3: BYTE_PRODUCT(2, 3); break;
    case 2 * 8 + 4: BYTE_PRODUCT(2, 4); break;
    case 3 * 8 + 1: BYTE_PRODUCT(3, 1); break;
    case 3 * 8 + 2: BYTE_PRODUCT(3, 2); break;
    case 3 * 8 + 3: BYTE_PRODUCT(3, 3); break;
    case 3 * 8 + 4: BYTE_PRODUCT(3, 4); break;
#endif
    default: __builtin_unreachable();
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = sums[r][c] * load(linear->scales + first + c * W);
}

#endif
