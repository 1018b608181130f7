/* Loops that reach the speed of this machine's memory and of its products, with the vectors of the native step. */
#include "vectors.h"

#define COLUMNS 4

/* Read `size` bytes, a multiple of 8 vectors. Returns a sum, so that nothing is left out. */
int64_t read_bytes(const word *data, int64_t size) {
    vu sums[8];
    for (int i = 0; i < 8; i++) sums[i] = set_word(0);
    for (const word *at = data, *end = data + size / 4; at < end; at += 8 * W) {
        UNROLL for (int i = 0; i < 8; i++) sums[i] += load_words(at + i * W);
    }
    int64_t sum = 0;
    for (int i = 0; i < 8; i++) {
        for (int lane = 0; lane < W; lane++) sum += sums[i][lane];
    }
    return sum;
}

/* Products of registers, as in a tile of the native step: `count` times its multiplications, without any loads. */
float multiply(int64_t count) {
    vf sums[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = set(0);
    vu inputs = set_word(0x3f803f80), weights[COLUMNS]; /* ones, in both types */
    UNROLL for (int c = 0; c < COLUMNS; c++) weights[c] = set_word(0x3f803f80 + c);
    for (int64_t i = 0; i < count; i++) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            inputs ^= 0x00010001u << r; /* other numbers for each row and turn, all of them about 1 */
            UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = dot(sums[r][c], weights[c], inputs);
        }
    }
    float sum = 0;
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int c = 0; c < COLUMNS; c++) sum += sum_of(sums[r][c]);
    return sum;
}

/* Multiplications and additions of one turn of `multiply`. */
int64_t operations_per_turn(void) { return 2 * ROWS * COLUMNS * W * P; }
