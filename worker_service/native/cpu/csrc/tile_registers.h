/* AMX's tile registers: the operations that products need, by the CPU, or in plain C with -DKVPOOL_TILES_IN_C, which tests use.
 *
 * There are eight registers, each of up to 16 rows of up to 64 bytes; a configuration gives each its shape, per thread. Registers are
 * numbers that the compiler sees as such (0, not a variable), because they are part of an instruction.
 *
 * HAS_TILES: this build multiplies with them. -DKVPOOL_NO_TILES: it does not, although the compiler may use the instructions.
 */
#ifndef KVPOOL_TILE_REGISTERS_H
#define KVPOOL_TILE_REGISTERS_H

#include "vectors.h"

#if !BFLOAT16 || defined(KVPOOL_NO_TILES)
#define HAS_TILES 0
#elif defined(KVPOOL_TILES_IN_C) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && W == 16)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#if HAS_TILES

enum { NUM_REGISTERS = 8, REGISTER_ROWS = 16, REGISTER_WORDS = 16 /* of a row, at most */ };

/* The operand of LDTILECFG. */
struct tile_shapes {
    uint8_t palette; /* 1: eight registers */
    uint8_t start_row, reserved[14];
    uint16_t row_bytes[16]; /* of registers 0 to 7; the others are 0 */
    uint8_t rows[16];       /* 0 if row_bytes is */
};

#ifdef KVPOOL_TILES_IN_C

#include "tile_registers_in_c.h"

#define TILE_CONFIGURE(shapes) tile_configure(shapes)
#define TILE_RELEASE() tile_release()
#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define TILE_MULTIPLY_ADD(sums, a, b) tile_multiply_add(sums, a, b)

static int request_tiles(void) { return 0; }

#else

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not the compilers' functions: gcc's do not say what memory they read. */
#define TILE_CONFIGURE(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(shapes)))
#define TILE_RELEASE() __asm__ volatile("tilerelease" : :)
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
/* Rows are `stride` bytes apart in memory. */
#define TILE_LOAD(t, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
/* sums [rows][words] += a [rows][k] · b [k][words], where a word of a and of b is a pair of numbers. */
#define TILE_MULTIPLY_ADD(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :)

/* Linux gives the registers to a process that asks for them, once for all its threads. 0, or its error. */
static int request_tiles(void) {
    enum { REQUEST = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_DATA = 18 /* XFEATURE_XTILEDATA */ };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? errno : 0;
}

#endif
#endif
#endif
