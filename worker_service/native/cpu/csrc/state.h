/* A loaded model with its buffers, the step that it runs, and its team of threads. */
#ifndef KVPOOL_STATE_H
#define KVPOOL_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "step.h"
#include "vectors.h"

#ifndef PARTITION
#define PARTITION 256  /* keys; tests with a sanitizer build with fewer */
#endif
#define MAX_HEAD 256   /* numbers of a head */
#define SHORT_ROWS (4 * ROWS) /* a part with at most these (token, head) rows per KV head is a decode: its partitions may be split */

struct item {
    int32_t order;     /* index of the rows' first token in `order` */
    int32_t first_row; /* of the (token, query head of the group) rows from there, token first */
    int32_t num_rows;
    int32_t part;      /* whose block table is walked */
    int32_t first, end; /* partitions */
    int32_t slot;      /* of each row's slots; −1: the result is complete */
};

/* Layers with the same heads, window and blocks have the same items. */
struct kind {
    int64_t heads, kv_heads, window, group;
    struct item *items;
    int64_t num_items, room;
};

struct phase {
    _Alignas(64) atomic_llong next, done;
};

enum { NORM_1, QKV, ROTARY, ATTENTION, MERGE, OUT, NORM_2, UP, QUANTIZE, DOWN, PHASES_PER_LAYER };
enum { END = 1, NORM_3, HEAD, PHASES_AROUND = 4 }; /* the embedding first; the others count from the last layer's end */

struct kvpool_model {
    struct kvpool_sizes sizes;
    struct kvpool_layer *layers;
    int64_t num_phases;
    struct kind *kinds;    /* [num_kinds + 1] the last one is that of the last layer in a step that does not want all tokens */
    int64_t num_kinds, *kind_of_layer;

    /* Of the step, written before it is published. */
    struct kvpool_step step;
    int64_t *offsets;      /* [N + 1] of the parts */
    int32_t *context;      /* [T] keys that a token sees without a window: those before it, and itself */
    int32_t *wanted;       /* [num_wanted] tokens whose logits are wanted, in order */
    int32_t *place;        /* [T] of each token among them, or −1 */
    int64_t num_wanted;
    int32_t *order;        /* [2 (G + 1) T] tokens: of each group those of members of prefixes, by prefix; all by part; and all that
                            * once more, of wanted ones only */
    int32_t *num_slots;    /* [T] per head */
    int64_t *first_slot;   /* [T] of the token's first head, per kind alike */
    int32_t *prefix;       /* [G][N] partitions that are attended together with others */
    int64_t *num_pieces;   /* [phases] */
    float *residual;       /* [T][hidden] */
    float *last_residual;  /* [num_wanted][hidden] after the last layer's K and V are written; `residual` if all are wanted */
    float *wanted_residual; /* memory of last_residual */
    float *stored;         /* [T][hidden] a product that a norm follows */
    number *inputs;        /* [T][hidden] */
    float *qkv;            /* [T][(Hq + 2 Hkv) · D] */
    number *queries;       /* [T][Hq][D] */
    number *attended;      /* [T][Hq · D] */
    number *activated;     /* [T][mlp] */
    number *selected;      /* [rows][hidden] */
    int8_t *quantized;     /* [rows][groups][GROUP] of the next product, if weights are int8 */
    float *scales;         /* [rows][groups] of them */
    int32_t *offsets_of_groups;
    float *slots;          /* [slots][D + 2]: m, l, o */
    int64_t token_room, part_room, row_room, slot_room, wanted_room;
    int64_t widest_qkv, widest_attended, widest_mlp, widest_head, most_groups;
    int64_t quantized_room; /* rows */

    /* The team. */
    struct phase *phases;
    pthread_t *threads;
    int64_t num_threads, num_members;
    atomic_llong go, inside;
    atomic_int is_open, is_closing, tick, sleepers;
    struct timespec *times; /* [phases + 1] of the caller, if wanted */
};

#define COLUMNS 4 /* vectors of a tile's outputs, at most */

INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

/* Word i of each of a tile's vectors of outputs. Those of a single row are read once, so they are prefetched some time before;
 * `ahead`: a weight that is prefetched meanwhile, or NULL. */
INLINE void load_weights(int is_single, int columns, const word *weight, const word *ahead, int64_t k_words, int64_t i, vu w[COLUMNS]) {
    UNROLL for (int c = 0; c < columns; c++) {
        const word *at = weight + (c * k_words + i) * W;
        if (is_single) prefetch(at + 40 * W);
        if (ahead) __builtin_prefetch(ahead + (c * k_words + i) * W, 0, 2);
        w[c] = load_words(at);
    }
}

/* New memory for what `at` points to; its old contents are lost. */
static int grow(void *at, int64_t bytes) {
    void *new = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!new) return -1;
    free(*(void **)at);
    *(void **)at = new;
    return 0;
}

#endif
