/* Products of packed weights, in tiles, and what becomes of their sums. */
#ifndef KVPOOL_PRODUCT_H
#define KVPOOL_PRODUCT_H

#include "quantized.h"
#include "state.h"
#include "tiles.h"

#define TILE_ROWS 96   /* rows of a tile, at most */

#if !HAS_TILES

#define PASS_ROWS ROWS /* rows of a pass, at most */

/* sums[r][c] = Σ over k of row r times outputs of vector c. `ahead`: a weight to be prefetched meanwhile, or NULL. */
INLINE void product(int num_rows, int columns, const word *weight, const word *ahead, int64_t k_words, const word *inputs,
                    vf sums[ROWS][COLUMNS]) {
    vf sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sum[r][c] = set(0);
    for (int64_t i = 0; i < k_words; i++) {
        vu w[COLUMNS];
        load_weights(num_rows == 1, columns, weight, ahead, k_words, i, w);
        UNROLL for (int r = 0; r < num_rows; r++) {
            vu x = set_word(inputs[r * k_words + i]);
            UNROLL for (int c = 0; c < columns; c++) sum[r][c] = dot(sum[r][c], w[c], x);
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = sum[r][c];
}

INLINE void product_of_columns(int num_rows, int columns, const word *weight, const word *ahead, int64_t k_words, const word *inputs,
                               vf sums[ROWS][COLUMNS]) {
    switch (columns) {
    case 1: product(num_rows, 1, weight, ahead, k_words, inputs, sums); break;
    case 2: product(num_rows, 2, weight, ahead, k_words, inputs, sums); break;
    case 3: product(num_rows, 3, weight, ahead, k_words, inputs, sums); break;
    default: product(num_rows, 4, weight, ahead, k_words, inputs, sums); break;
    }
}

static __attribute__((noinline)) void product_of_rows(int num_rows, int columns, const word *weight, const word *ahead, int64_t k_words,
                                                      const word *inputs, vf sums[ROWS][COLUMNS]) {
    switch (num_rows) {
    case 1: product_of_columns(1, columns, weight, ahead, k_words, inputs, sums); break;
    case 2: product_of_columns(2, columns, weight, ahead, k_words, inputs, sums); break;
    case 3: product_of_columns(3, columns, weight, ahead, k_words, inputs, sums); break;
#if ROWS > 3
    case 4: product_of_columns(4, columns, weight, ahead, k_words, inputs, sums); break;
    case 5: product_of_columns(5, columns, weight, ahead, k_words, inputs, sums); break;
    default: product_of_columns(6, columns, weight, ahead, k_words, inputs, sums); break;
#endif
    }
}

#endif

/* Vectors of outputs in a tile: narrower ones where tiles are few, so that every thread gets work. A narrow tile of several rows
 * loads more inputs for each product. */
static int64_t tile_columns(const struct kvpool_model *model, const struct kvpool_linear *linear, int64_t rows, int64_t least) {
    int64_t vectors = (linear->n + W - 1) / W, down = (rows + TILE_ROWS - 1) / TILE_ROWS, columns = COLUMNS;
    while (columns > least && (vectors + columns - 1) / columns * down < 8 * model->num_threads) columns /= 2;
    return columns;
}

static int64_t tiles_of(const struct kvpool_model *model, const struct kvpool_linear *linear, int64_t rows, int64_t least) {
    int64_t vectors = (linear->n + W - 1) / W, columns = tile_columns(model, linear, rows, least);
    return (vectors + columns - 1) / columns * ((rows + TILE_ROWS - 1) / TILE_ROWS);
}

/* What becomes of the sums of a product. */
struct result {
    enum { STORE, ADD, ACTIVATE } action;
    float *floats;   /* [rows][n] */
    number *numbers; /* [rows][n / 2 or n] of ACTIVATE */
    float scale;     /* of ADD */
    int32_t activation, is_gated;
};

static vf activate(vf x, int32_t activation) {
    switch (activation) {
    case KVPOOL_GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case KVPOOL_GELU: {
        float lanes[W];
        store(lanes, x);
        for (int i = 0; i < W; i++) lanes[i] = 0.5f * lanes[i] * (1.0f + erff(lanes[i] * 0.70710678118654752f));
        return load(lanes);
    }
    case KVPOOL_RELU_SQUARED: return choose((x > 0) | (x != x), x * x, set(0));
    default: return choose((x > 0) | (x != x), x, set(0));
    }
}

/* x / (1 + e^−x), of e^−|x|. */
INLINE vf silu(vf x) {
    vf small = exp2_of(absolute(x) * -1.44269504088896341f); /* log2 e */
    return x * choose(x < 0, small, set(1)) / (1.0f + small);
}

/* The sums of one row, `columns` vectors from output `first` on. `is_whole`: all of them are outputs, none is padding. */
INLINE void finish_row(int is_whole, int columns, vf sums[COLUMNS], int64_t row, int64_t first, const struct kvpool_linear *linear,
                       const struct result *result) {
    int64_t n = linear->n;
#define LEFT(at, end) (is_whole ? W : (end) - (at))
    if (linear->bias)
        UNROLL for (int c = 0; c < columns; c++) sums[c] += load_part(linear->bias + first + c * W, LEFT(first + c * W, n));
    if (result->action == ACTIVATE && result->is_gated) { /* W outputs of gate, W of up, in turn */
        UNROLL for (int c = 0; c < columns; c += 2) {
            int64_t at = (first + c * W) / 2;
            vf gate = result->activation == KVPOOL_SILU ? silu(sums[c]) : activate(sums[c], result->activation);
            store_numbers_part(result->numbers + row * (n / 2) + at, gate * sums[c + 1], LEFT(at, n / 2));
        }
        return;
    }
    UNROLL for (int c = 0; c < columns; c++) {
        int64_t at = first + c * W, count = LEFT(at, n);
        if (count <= 0) return;
        float *floats = result->floats + row * n + at;
        if (result->action == ACTIVATE) {
            vf y = result->activation == KVPOOL_SILU ? silu(sums[c]) : activate(sums[c], result->activation);
            store_numbers_part(result->numbers + row * n + at, y, count);
        } else if (result->action == ADD) {
            store_part(floats, multiply_add(sums[c], set(result->scale), load_part(floats, count)), count);
        } else {
            store_part(floats, sums[c], count);
        }
    }
#undef LEFT
}

static void finish(int num_rows, int columns, vf sums[PASS_ROWS][COLUMNS], int64_t row, int64_t first, const struct kvpool_linear *linear,
                   const struct result *result) {
    if (columns == COLUMNS && first + COLUMNS * W <= linear->n)
        for (int r = 0; r < num_rows; r++) finish_row(1, COLUMNS, sums[r], row + r, first, linear, result);
    else
        for (int r = 0; r < num_rows; r++) finish_row(0, columns, sums[r], row + r, first, linear, result);
}

/* The lines that finish() reads and writes. */
INLINE void prefetch_result(int num_rows, int columns, int64_t row, int64_t first, const struct kvpool_linear *linear,
                            const struct result *result) {
    for (int r = 0; r < num_rows && result->action != ACTIVATE; r++)
        for (int c = 0; c < columns; c++) __builtin_prefetch(result->floats + (row + r) * linear->n + first + c * W, 1, 3);
}

/* One tile: columns first, so that threads next to each other read other weights of the same rows. Inputs [rows][k] are read
 * from the quantized ones if the weight is int8. */
static void tile(const struct kvpool_model *model, const struct kvpool_linear *linear, int64_t least, const number *inputs,
                 int64_t rows, int64_t piece, const struct result *result) {
    int64_t vectors = (linear->n + W - 1) / W, columns = tile_columns(model, linear, rows, least);
    int64_t across = (vectors + columns - 1) / columns, k_words = linear->k / (linear->scales ? BYTES : P);
    int64_t column = piece % across * columns, row = piece / across * TILE_ROWS;
    int64_t num_rows = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
    int here = vectors - column < columns ? vectors - column : columns;
    int64_t each = linear->scales ? ROWS : PASS_ROWS, passes = (num_rows + each - 1) / each;
    const word *weight = (const word *)linear->weight + column * k_words * W;
    for (int64_t pass = 0; pass < passes; pass++) {
        int64_t first = row + num_rows * pass / passes, end = row + num_rows * (pass + 1) / passes;
        _Alignas(64) vf sums[PASS_ROWS][COLUMNS];
        prefetch_result(end - first, here, first, column * W, linear, result);
        /* The last of several passes has its weights in a cache, so memory can bring those that this thread probably takes next. */
        const word *ahead = pass && pass + 1 == passes ? weight + model->num_threads * columns * k_words * W : NULL;
        if (linear->scales)
            product_of_bytes(end - first, here, model, linear, first, column * W, weight, ahead, sums);
        else
            product_of_rows(end - first, here, weight, ahead, k_words, (const word *)(inputs + first * linear->k), sums);
        finish(end - first, here, sums, first, column * W, linear, result);
    }
}

#endif
