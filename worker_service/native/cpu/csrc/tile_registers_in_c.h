/* AMX's tile registers in plain C, after the instructions' documented operation. What the CPU would answer with an exception ends
 * the process, with a line on stderr. Included by tile_registers.h. */
#ifndef KVPOOL_TILE_REGISTERS_IN_C_H
#define KVPOOL_TILE_REGISTERS_IN_C_H

#include <stdio.h>
#include <stdlib.h>

static _Thread_local struct {
    struct tile_shapes shapes; /* palette 0: there is no configuration */
    word words[NUM_REGISTERS][REGISTER_ROWS][REGISTER_WORDS];
} tile_registers;

static void tile_demand(int is_met, const char *what) {
    if (is_met) return;
    fprintf(stderr, "tile registers: %s\n", what);
    abort();
}

static void tile_release(void) { memset(&tile_registers, 0, sizeof tile_registers); }

static void tile_configure(const struct tile_shapes *shapes) {
    static const uint8_t zeros[sizeof shapes->reserved];
    tile_demand(shapes->palette == 1 && shapes->start_row == 0, "palette 1 and no start row are needed");
    tile_demand(!memcmp(shapes->reserved, zeros, sizeof zeros), "reserved bytes are zero");
    for (int t = 0; t < 16; t++) {
        tile_demand(t < NUM_REGISTERS || shapes->rows[t] == 0, "there are eight registers");
        tile_demand(shapes->rows[t] <= REGISTER_ROWS && shapes->row_bytes[t] <= 4 * REGISTER_WORDS, "a shape is too large");
        tile_demand(!shapes->rows[t] == !shapes->row_bytes[t], "a shape has rows without bytes, or bytes without rows");
    }
    tile_release();
    tile_registers.shapes = *shapes;
}

static void tile_zero(int t) {
    tile_demand(tile_registers.shapes.rows[t], "zeroed without a shape");
    memset(tile_registers.words[t], 0, sizeof tile_registers.words[t]);
}

static void tile_load(int t, const void *from, int64_t stride) {
    tile_zero(t);
    for (int r = 0; r < tile_registers.shapes.rows[t]; r++)
        memcpy(tile_registers.words[t][r], (const char *)from + r * stride, tile_registers.shapes.row_bytes[t]);
}

static void tile_store(int t, void *to, int64_t stride) {
    tile_demand(tile_registers.shapes.rows[t], "stored without a shape");
    for (int r = 0; r < tile_registers.shapes.rows[t]; r++)
        memcpy((char *)to + r * stride, tile_registers.words[t][r], tile_registers.shapes.row_bytes[t]);
}

/* The instruction takes denormals for zeros, and gives none. Everything else is unchanged, NaN too. */
INLINE vf without_denormals(vf x) { return choose(((vi)x & 0x7f800000) == 0, (vf)((vi)x & INT32_MIN), x); }

/* TDPBF16PS: sums over the even and over the odd numbers of k, each multiplication and addition rounded once, then both together. */
static void tile_multiply_add(int sums, int a, int b) {
    const struct tile_shapes *shapes = &tile_registers.shapes;
    tile_demand(sums != a && sums != b && a != b, "three registers are needed");
    tile_demand(shapes->rows[sums] && shapes->rows[sums] == shapes->rows[a], "a's rows are those of the sums");
    tile_demand(shapes->rows[b] && shapes->row_bytes[a] == 4 * shapes->rows[b], "b's rows are a's words");
    tile_demand(shapes->row_bytes[sums] && shapes->row_bytes[sums] == shapes->row_bytes[b], "b's words are those of the sums");
    for (int m = 0; m < shapes->rows[sums]; m++)
        for (int n = 0; n < shapes->row_bytes[sums] / 4; n += W) {
            vf even = set(0), odd = set(0);
            for (int k = 0; k < shapes->rows[b]; k++) {
                vu x = set_word(tile_registers.words[a][m][k]), y = load_words(&tile_registers.words[b][k][n]);
                even = without_denormals(multiply_add(without_denormals((vf)(x << 16)), without_denormals((vf)(y << 16)), even));
                odd = without_denormals(
                    multiply_add(without_denormals((vf)(x & 0xffff0000u)), without_denormals((vf)(y & 0xffff0000u)), odd));
            }
            float *sum = (float *)&tile_registers.words[sums][m][n];
            store(sum, without_denormals(without_denormals(load(sum)) + without_denormals(even + odd)));
        }
}

#endif
