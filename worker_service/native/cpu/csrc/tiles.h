/* Products of bfloat16 over AMX's tile registers: all of a build's, whatever their number of rows, so that bits do not depend on it.
 *
 * A packed weight is 16 words of k × W outputs for register after register, as it is; rows of inputs are read where they are. An
 * element of a register of sums depends on its own row of inputs only: the instruction adds a register's k in an order of its own, and
 * registers follow each other over k. What is left of k, fewer than 32 numbers, is added by `dot`, as in other builds.
 */
#ifndef KVPOOL_TILES_H
#define KVPOOL_TILES_H

#include "state.h"
#include "tile_registers.h"

#if HAS_TILES

/* Of a pass. 2 registers of rows × 2 of outputs take 4 loads for 4 multiplications of 16 cycles; a load takes 8. */
#define PASS_ROWS (2 * REGISTER_ROWS)

/* Rows that this thread's registers are configured for; 0: not at all. It stays from pass to pass, because LDTILECFG takes long. */
static _Thread_local int configured_rows;

/* Registers: sums in 0 to 3, inputs in 4 and 5, weights in 6 and 7. */
static void configure_tiles(int num_rows) {
    int is_high = num_rows > REGISTER_ROWS, upper = is_high ? REGISTER_ROWS : num_rows, lower = is_high ? num_rows - upper : num_rows;
    int inputs = 4 * REGISTER_WORDS, outputs = 4 * W;
    struct tile_shapes shapes = {
        .palette = 1,
        .rows = {upper, upper, lower, lower, upper, lower, REGISTER_WORDS, REGISTER_WORDS},
        .row_bytes = {outputs, outputs, outputs, outputs, inputs, inputs, outputs, outputs},
    };
    TILE_CONFIGURE(&shapes);
    configured_rows = num_rows;
}

/* Before this thread sleeps or leaves: Linux saves and restores registers that are in use. */
static void release_tiles(void) {
    if (configured_rows) TILE_RELEASE();
    configured_rows = 0;
}

/* Weights of vector c, at word i of k. The same two registers later are prefetched, or what is at `ahead`. */
#define LOAD_WEIGHTS(t, c)                                                                             \
    do {                                                                                               \
        int64_t at = ((c) * k_words + i) * W;                                                          \
        UNROLL for (int r = 0; r < REGISTER_WORDS; r++) {                                              \
            if (ahead)                                                                                 \
                __builtin_prefetch(ahead + at + r * W, 0, 2);                                          \
            else                                                                                       \
                prefetch(weight + at + (2 * REGISTER_WORDS + r) * W);                                  \
        }                                                                                              \
        TILE_LOAD(t, weight + at, 4 * W);                                                              \
    } while (0)
#define STORE_SUMS(t, r, c) TILE_STORE(t, &sums[r][c], sizeof *sums)

/* At most 16 rows, up to four vectors of outputs. */
INLINE void low_product(int columns, const word *weight, const word *ahead, int64_t k_words, const word *inputs,
                        vf (*sums)[COLUMNS]) {
    TILE_ZERO(0);
    if (columns > 1) TILE_ZERO(1);
    if (columns > 2) TILE_ZERO(2);
    if (columns > 3) TILE_ZERO(3);
    for (int64_t i = 0; i + REGISTER_WORDS <= k_words; i += REGISTER_WORDS) {
        TILE_LOAD(4, inputs + i, 4 * k_words);
        LOAD_WEIGHTS(6, 0);
        TILE_MULTIPLY_ADD(0, 4, 6);
        if (columns > 1) {
            LOAD_WEIGHTS(7, 1);
            TILE_MULTIPLY_ADD(1, 4, 7);
        }
        if (columns > 2) {
            LOAD_WEIGHTS(6, 2);
            TILE_MULTIPLY_ADD(2, 4, 6);
        }
        if (columns > 3) {
            LOAD_WEIGHTS(7, 3);
            TILE_MULTIPLY_ADD(3, 4, 7);
        }
    }
    STORE_SUMS(0, 0, 0);
    if (columns > 1) STORE_SUMS(1, 0, 1);
    if (columns > 2) STORE_SUMS(2, 0, 2);
    if (columns > 3) STORE_SUMS(3, 0, 3);
}

/* 17 to 32 rows, one or two vectors of outputs. */
INLINE void high_product(int columns, const word *weight, const word *ahead, int64_t k_words, const word *inputs,
                         vf (*sums)[COLUMNS]) {
    TILE_ZERO(0);
    TILE_ZERO(2);
    if (columns > 1) TILE_ZERO(1);
    if (columns > 1) TILE_ZERO(3);
    for (int64_t i = 0; i + REGISTER_WORDS <= k_words; i += REGISTER_WORDS) {
        TILE_LOAD(4, inputs + i, 4 * k_words);
        LOAD_WEIGHTS(6, 0);
        TILE_MULTIPLY_ADD(0, 4, 6);
        TILE_LOAD(5, inputs + REGISTER_ROWS * k_words + i, 4 * k_words);
        TILE_MULTIPLY_ADD(2, 5, 6);
        if (columns > 1) {
            LOAD_WEIGHTS(7, 1);
            TILE_MULTIPLY_ADD(1, 4, 7);
            TILE_MULTIPLY_ADD(3, 5, 7);
        }
    }
    STORE_SUMS(0, 0, 0);
    STORE_SUMS(2, REGISTER_ROWS, 0);
    if (columns > 1) STORE_SUMS(1, 0, 1);
    if (columns > 1) STORE_SUMS(3, REGISTER_ROWS, 1);
}

static void sum_in_tiles(int num_rows, int columns, const word *weight, const word *ahead, int64_t k_words, const word *inputs,
                         vf (*sums)[COLUMNS]) {
    if (num_rows <= REGISTER_ROWS) {
        switch (columns) {
        case 1: low_product(1, weight, ahead, k_words, inputs, sums); break;
        case 2: low_product(2, weight, ahead, k_words, inputs, sums); break;
        case 3: low_product(3, weight, ahead, k_words, inputs, sums); break;
        default: low_product(4, weight, ahead, k_words, inputs, sums); break;
        }
    } else {
        for (int c = 0; c < columns; c += 2) {
            const word *next = ahead ? ahead + c * k_words * W : NULL;
            vf (*at)[COLUMNS] = (vf (*)[COLUMNS])&sums[0][c];
            if (columns - c > 1)
                high_product(2, weight + c * k_words * W, next, k_words, inputs, at);
            else
                high_product(1, weight + c * k_words * W, next, k_words, inputs, at);
        }
    }
}

/* sums[r][c] = Σ over k of row r times outputs of vector c, of at most PASS_ROWS rows. `ahead`: a weight to be prefetched meanwhile,
 * or NULL. */
static __attribute__((noinline)) void product_of_rows(int num_rows, int columns, const word *weight, const word *ahead, int64_t k_words,
                                                      const word *inputs, vf (*sums)[COLUMNS]) {
    if (configured_rows != num_rows) configure_tiles(num_rows);
    sum_in_tiles(num_rows, columns, weight, ahead, k_words, inputs, sums);
    for (int64_t i = k_words / REGISTER_WORDS * REGISTER_WORDS; i < k_words; i++)
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] = dot(sums[r][c], load_words(weight + (c * k_words + i) * W), set_word(inputs[r * k_words + i]));
}

#else

static int request_tiles(void) { return 0; }
static void release_tiles(void) {}

#endif
#endif
