/* Attention in place over block tables: partitions of keys, folded from the first to the last. */
#ifndef KVPOOL_ATTENTION_H
#define KVPOOL_ATTENTION_H

#include "product.h"
#include "state.h"

#define LANES ((ROWS + W - 1) / W * W)

/* Of the keys so far: the largest score m in powers of 2, l = Σ 2^(score − m), o = Σ 2^(score − m) · v. Of no keys: −∞, 0, anything. */
struct sums {
    float m[LANES], l[LANES];
    float o[ROWS][MAX_HEAD];
};

struct rows {
    word queries[ROWS][MAX_HEAD / P]; /* copies, so that one address in a register serves all rows */
    int32_t limit[ROWS], lower[ROWS]; /* keys lower … limit − 1 are seen */
    int32_t last;                     /* the largest limit */
    int32_t begin;                    /* the smallest lower: keys before it are not read, their blocks may be gone */
};

/* What both sides are multiplied by when keys and those that follow become one; m becomes the larger one. */
INLINE void fold_factors(vf *m, vf right_m, vf *left, vf *right) {
    vf top = larger(*m, right_m);
    *left = exp2_of(*m - top);
    *right = exp2_of(right_m - top);
    *m = top;
}

/* l and o of keys, and of those that follow. A side without keys leaves the other one as it is. */
INLINE void fold(float *l, float *o, float left, float right_l, const float *right_o, float right, int64_t d) {
    if (right_l == 0) return;
    if (*l == 0) {
        *l = right_l;
        memcpy(o, right_o, d * sizeof *o);
        return;
    }
    *l = multiply_add(set(*l), set(left), set(right_l) * right)[0];
    for (int64_t i = 0; i < d; i += W)
        store_part(o + i, multiply_add(load_part(o + i, d - i), set(left), load_part(right_o + i, d - i) * right), d - i);
}

#define KEYS COLUMNS /* vectors of keys that are scored at once, at most */

struct heads {
    const word *k, *v;    /* of the KV head, in block 0 */
    const int32_t *table;
    int64_t block_words;  /* from one block to the next */
    int64_t d, block_size;
    int32_t is_cold;      /* the keys are probably not in a cache yet */
};

/* V of a key, or of its word. */
INLINE const word *value_at(const struct heads *heads, int64_t key) {
    return heads->v + heads->table[key / heads->block_size] * heads->block_words + key % heads->block_size / P * heads->d;
}

/* W keys of one block, at every word of D: where they are and the words from one D to the next. Blocks that are no multiple of W
 * are copied together, with zeros for keys before `begin`. */
INLINE const word *keys_at(const struct heads *heads, int64_t key, int64_t begin, int64_t end, word *copy, int64_t *stride) {
    int64_t size = heads->block_size, words = heads->d / P;
    if (size % W == 0) {
        *stride = size;
        return heads->k + heads->table[key / size] * heads->block_words + key % size;
    }
    *stride = W;
    for (int64_t j = 0; j < W; j++) {
        if (key + j < begin || key + j >= end) { /* there may be no block */
            for (int64_t i = 0; i < words; i++) copy[i * W + j] = 0;
            continue;
        }
        const word *from = heads->k + heads->table[(key + j) / size] * heads->block_words + (key + j) % size;
        for (int64_t i = 0; i < words; i++) copy[i * W + j] = from[i * size];
    }
    return copy;
}

/* Scores of `vectors` times W keys from `key` on, those of the partition that ends with `end`; keys before `begin` are not read. With
 * `is_cold` V of the same keys is prefetched, as many lines as K has. */
INLINE void score_keys(int num_rows, int vectors, int is_cold, int64_t begin, const struct rows *rows, const struct heads *heads,
                       int64_t key, int64_t end, float scores[ROWS][PARTITION], int64_t at) {
    word copies[KEYS][MAX_HEAD / P * W];
    const word *keys[KEYS], *values[KEYS];
    int64_t words = heads->d / P, stride;
    UNROLL for (int v = 0; v < vectors; v++) {
        int64_t here = key + v * W < end ? key + v * W : key; /* there may be no further block */
        keys[v] = keys_at(heads, here, begin, end, copies[v], &stride);
        if (is_cold) values[v] = value_at(heads, here < begin ? begin : here);
    }
    vf sum[ROWS][KEYS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = set(0);
    for (int64_t i = 0; i < words; i++) {
        vu k[KEYS];
        UNROLL for (int v = 0; v < vectors; v++) {
            k[v] = load_words(keys[v] + i * stride);
            if (is_cold) prefetch(values[v] + i * W);
        }
        UNROLL for (int r = 0; r < num_rows; r++) {
            vu q = set_word(rows->queries[r][i]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = dot(sum[r][v], k[v], q);
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int v = 0; v < vectors; v++) store(&scores[r][at + v * W], sum[r][v]);
}

/* Products q·k of a row become weights 2^(score − m), those of keys that it does not see 0; their m and l. */
static __attribute__((noinline)) void soften(const struct kvpool_layer *layer, int32_t lower, int32_t limit, int64_t first, int64_t end,
                                             float *scores, number *weights, float *m, float *l) {
    int64_t count = end - first;
    float factor = layer->scaling * 1.44269504088896341f; /* log2 e */
    if (layer->softcap != 0) {
        for (int64_t key = 0; key < count; key += W)
            store(scores + key, layer->softcap * tanh_of(load(scores + key) * layer->scaling / layer->softcap));
        factor = 1.44269504088896341f;
    }
    if (lower > first || limit < end || count % W) {
        vi lane;
        for (int i = 0; i < W; i++) lane[i] = i;
        for (int64_t key = 0; key < count; key += W) {
            vi index = lane + (int32_t)(first + key);
            store(scores + key, choose((index < limit) & (index >= lower), load(scores + key), set(-INFINITY)));
        }
    }
    vf largest = set(-INFINITY);
    for (int64_t key = 0; key < count; key += W) largest = larger(load(scores + key), largest); /* without NaN: l will have it */
    *m = largest_of(largest) * factor;
    vf subtracted = set(*m == -INFINITY ? 0 : -*m), sum = set(0);
    for (int64_t key = 0; key < count; key += W) {
        vf p = exp2_of(multiply_add(load(scores + key), set(factor), subtracted));
        sum += p;
        store_numbers(weights + key, p);
    }
    *l = sum_of(sum);
}

/* W words of V, or the last ones of a head that is no multiple of W. */
INLINE vu load_values(const word *v, int64_t width) {
    if (width >= W) return load_words(v);
    word lanes[W] = {0};
    memcpy(lanes, v, width * sizeof *lanes);
    return load_words(lanes);
}

/* o[r] = Σ over keys of p·v, without the first `skipped` keys, for `columns` vectors of dimensions; `width` of them are left in the
 * head. */
INLINE void weigh(int num_rows, int columns, int64_t width, const struct heads *heads, int64_t first, int64_t skipped, int64_t count,
                  int64_t last, int64_t at, const number weights[ROWS][PARTITION], float o[ROWS][MAX_HEAD]) {
    vf sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sum[r][c] = set(0);
    int64_t size = heads->block_size, d = heads->d;
    for (int64_t key = skipped; key < count;) {
        int64_t offset = (first + key) % size, in_block = size - offset < count - key ? size - offset : count - key;
        const word *v = value_at(heads, first + key) + at, *ahead = NULL;
        if (heads->is_cold && first + key + PARTITION < last) /* K of the next partition: as many words as V, in the same place */
            ahead = heads->k + (value_at(heads, first + key + PARTITION) - heads->v) + at;
        int64_t i = 0;
        for (; i + P <= in_block; i += P, v += d) {
            if (ahead) {
                UNROLL for (int c = 0; c < columns; c++) prefetch(ahead + c * W);
                ahead += d;
            }
            vu values[COLUMNS];
            UNROLL for (int c = 0; c < columns; c++) values[c] = load_values(v + c * W, width - c * W);
            UNROLL for (int r = 0; r < num_rows; r++) {
                word p;
                memcpy(&p, &weights[r][key + i], 4);
                vu weight = set_word(p);
                UNROLL for (int c = 0; c < columns; c++) sum[r][c] = dot(sum[r][c], values[c], weight);
            }
        }
#if BFLOAT16
        if (i < in_block) { /* the last key has no neighbour: that one's V is not written, and may be NaN */
            UNROLL for (int r = 0; r < num_rows; r++) {
                vu weight = set_word(weights[r][key + i]);
                UNROLL for (int c = 0; c < columns; c++)
                    sum[r][c] = dot(sum[r][c], load_values(v + c * W, width - c * W) & 0xffffu, weight);
            }
        }
#endif
        key += in_block;
    }
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) store(&o[r][at + c * W], sum[r][c]);
}

/* One partition: keys first … end − 1, end at most that of the row that sees most.
 *
 * Keys before the window of all rows are left out: whole vectors of them, and of the vector in which the first seen key is the keys of
 * other blocks, with V of all but a word. This changes no bit of a row. Its scores have the same lane as in the whole partition, where
 * those before its window become −∞; their weights are exact zeros, which come first in each sum, as +0 added to +0. So a row does not
 * depend on which other rows, with earlier windows, are in its pass, or on whether a block before its window still exists. */
INLINE void attend_partition(int num_rows, int is_cut, const struct kvpool_layer *layer, const struct rows *rows,
                             const struct heads *heads, int64_t first, int64_t end, struct sums *found) {
    float scores[ROWS][PARTITION];
    number weights[ROWS][PARTITION];
    int64_t begin = INT64_MIN, skipped = 0; /* constants, for the code of nearly all partitions */
    if (is_cut) {
        begin = rows->begin;
        first += (begin - first) / W * W;
        skipped = (begin - first) / P * P;
    }
    int64_t d = heads->d, count = end - first, key = 0;
    if (heads->is_cold)
        for (; key < count; key += 2 * W) score_keys(num_rows, 2, 1, begin, rows, heads, first + key, end, scores, key);
    for (; key + (KEYS - 2) * W < count; key += KEYS * W)
        score_keys(num_rows, KEYS, 0, begin, rows, heads, first + key, end, scores, key);
    for (; key < count; key += 2 * W) score_keys(num_rows, 2, 0, begin, rows, heads, first + key, end, scores, key);
    for (int r = 0; r < num_rows; r++)
        soften(layer, rows->lower[r], rows->limit[r], first, end, scores[r], weights[r], &found->m[r], &found->l[r]);
    int64_t at = 0;
    for (; at + 4 * W <= d; at += 4 * W) weigh(num_rows, 4, 4 * W, heads, first, skipped, count, rows->last, at, weights, found->o);
    for (; at + W <= d; at += W) weigh(num_rows, 1, W, heads, first, skipped, count, rows->last, at, weights, found->o);
    if (at < d) weigh(num_rows, 1, d - at, heads, first, skipped, count, rows->last, at, weights, found->o);
}

/* Each number of rows, with and without keys that are left out, is a function of its own: compilers take more than twice as long for
 * one function with all of them. */
typedef void attend(const struct kvpool_layer *layer, const struct rows *rows, const struct heads *heads, int64_t first, int64_t end,
                    struct sums *found);
#define ATTEND_AS(name, num_rows, is_cut)                                                                                     \
    static __attribute__((noinline)) void name(const struct kvpool_layer *layer, const struct rows *rows,                    \
                                               const struct heads *heads, int64_t first, int64_t end, struct sums *found) {  \
        attend_partition(num_rows, is_cut, layer, rows, heads, first, end, found);                                           \
    }
#define ATTEND(num_rows)                      \
    ATTEND_AS(attend_##num_rows, num_rows, 0) \
    ATTEND_AS(attend_cut_##num_rows, num_rows, 1)
ATTEND(1)
ATTEND(2)
ATTEND(3)
#if ROWS > 3
ATTEND(4)
ATTEND(5)
ATTEND(6)
static attend *const attends[2][ROWS] = {{attend_1, attend_2, attend_3, attend_4, attend_5, attend_6},
                                         {attend_cut_1, attend_cut_2, attend_cut_3, attend_cut_4, attend_cut_5, attend_cut_6}};
#else
static attend *const attends[2][ROWS] = {{attend_1, attend_2, attend_3}, {attend_cut_1, attend_cut_2, attend_cut_3}};
#endif

/* All partitions of an item, folded. */
static void attend_rows(int num_rows, const struct kvpool_layer *layer, const struct rows *rows, const struct heads *heads,
                        const struct item *item, struct sums *total) {
    struct sums others, *found = total;
    for (int r = 0; r < LANES; r++) {
        total->l[r] = 0;
        total->m[r] = others.m[r] = -INFINITY;
    }
    for (int64_t partition = item->first; partition < item->end; partition++) {
        int64_t first = partition * PARTITION, end = first + PARTITION < rows->last ? first + PARTITION : rows->last;
        if (end <= first) break;
        if (end <= rows->begin) continue;
        attends[rows->begin > first][num_rows - 1](layer, rows, heads, first, end, found);
        if (found == total) { /* the first one: there is nothing to fold */
            found = &others;
            continue;
        }
        float left[LANES], right[LANES];
        for (int r = 0; r < LANES; r += W) {
            vf m = load(total->m + r), a, b;
            fold_factors(&m, load(others.m + r), &a, &b);
            store(total->m + r, m);
            store(left + r, a);
            store(right + r, b);
        }
        for (int r = 0; r < num_rows; r++) fold(&total->l[r], total->o[r], left[r], others.l[r], others.o[r], right[r], heads->d);
    }
}

static void divide(number *to, const float *o, float l, int64_t d) {
    for (int64_t i = 0; i < d; i += W) store_numbers_part(to + i, load_part(o + i, d - i) / l, d - i);
}

static float *slot_of(const struct kvpool_model *model, int64_t t, int64_t head, int64_t slot) {
    return model->slots + (model->first_slot[t] + head * model->num_slots[t] + slot) * (model->widest_head + 2);
}

/* `place`: of each token among the rows of the results, NULL if tokens are these rows. */
static void attention_item(struct kvpool_model *model, const struct kvpool_layer *layer, const struct kind *kind, int64_t piece,
                           const int32_t *place) {
    const struct item *item = &kind->items[piece / layer->kv_heads];
    int64_t h = piece % layer->kv_heads, group = layer->heads / layer->kv_heads, d = layer->head_size;
    int64_t block_size = model->sizes.block_size;
    const struct kvpool_step *step = &model->step;
    const struct kvpool_group *blocks = &step->groups[layer->group];
    struct heads heads = {
        .k = (const word *)layer->k_cache + h * (d / P) * block_size,
        .v = (const word *)layer->v_cache + h * (d / P) * block_size,
        .table = blocks->tables + blocks->table_rows[item->part] * blocks->table_stride,
        .block_words = layer->kv_heads * (d / P) * block_size,
        .d = d,
        .block_size = block_size,
        .is_cold = step->lengths[item->part] * group <= SHORT_ROWS,
    };
    struct rows rows;
    rows.last = 0;
    rows.begin = INT32_MAX;
    int64_t token[ROWS], head[ROWS];
    for (int r = 0; r < item->num_rows; r++) {
        int64_t row = item->first_row + r, t = model->order[item->order + row / group];
        token[r] = t;
        head[r] = h * group + row % group;
        memcpy(rows.queries[r], model->queries + (t * layer->heads + head[r]) * d, d * sizeof(number));
        rows.limit[r] = model->context[t];
        rows.lower[r] = layer->window && layer->window < rows.limit[r] ? rows.limit[r] - layer->window : 0;
        if (rows.limit[r] > rows.last) rows.last = rows.limit[r];
        if (rows.lower[r] < rows.begin) rows.begin = rows.lower[r];
    }
    struct sums total;
    attend_rows(item->num_rows, layer, &rows, &heads, item, &total);
    for (int r = 0; r < item->num_rows; r++) {
        if (item->slot < 0) {
            int64_t to = place ? place[token[r]] : token[r];
            divide(model->attended + (to * layer->heads + head[r]) * d, total.o[r], total.l[r], d);
        } else {
            float *slot = slot_of(model, token[r], head[r], item->slot);
            slot[0] = total.m[r];
            slot[1] = total.l[r];
            if (total.l[r] != 0) memcpy(slot + 2, total.o[r], d * sizeof *slot);
        }
    }
}

/* The slots of token t become row `row` of the results; those of partitions before its window have nothing, or are not written. */
static void merge_row(struct kvpool_model *model, const struct kvpool_layer *layer, int64_t t, int64_t row) {
    if (model->num_slots[t] == 0) return;
    int64_t d = layer->head_size, first = 0;
    if (layer->window && model->context[t] > layer->window) first = (model->context[t] - layer->window) / PARTITION;
    for (int64_t h = 0; h < layer->heads; h++) {
        vf m = set(-INFINITY);
        float l = 0, o[MAX_HEAD];
        for (int64_t s = first; s < model->num_slots[t]; s++) {
            const float *slot = slot_of(model, t, h, s);
            vf left, right;
            fold_factors(&m, set(slot[0]), &left, &right);
            fold(&l, o, left[0], slot[1], slot + 2, right[0], d);
        }
        divide(model->attended + (row * layer->heads + h) * d, o, l, d);
    }
}

#endif
