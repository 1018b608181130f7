/* Attention in place over block tables: partitions of keys, folded from the first to the last. */
#ifndef KVPOOL_ATTENTION_H
#define KVPOOL_ATTENTION_H

#include "product.h"
#include "state.h"

/* Σ p, Σ p·v and the largest score of the keys so far; o is not divided by l. */
struct sums {
    float m[ROWS], l[ROWS];
    float o[ROWS][MAX_HEAD];
};

struct rows {
    const word *query[ROWS];
    int32_t limit[ROWS], lower[ROWS]; /* keys lower … limit − 1 are seen */
    int32_t last;                     /* the largest limit */
};

/* left = left and right; keeps the left if the right has seen nothing. */
static void fold(float *m, float *l, float *o, float right_m, float right_l, const float *right_o, int64_t d) {
    if (right_l == 0) return;
    if (*l == 0) {
        *m = right_m;
        *l = right_l;
        memcpy(o, right_o, d * sizeof *o);
        return;
    }
    float top = larger_number(*m, right_m);
    float x[W] = {*m - top, right_m - top};
    store(x, exp_of(load(x)));
    float a = x[0], b = x[1];
    *m = top;
    *l = *l * a + right_l * b;
    for (int64_t i = 0; i < d; i += W) store_part(o + i, load_part(o + i, d - i) * a + load_part(right_o + i, d - i) * b, d - i);
}

struct heads {
    const word *k, *v;    /* of the KV head, in block 0 */
    const int32_t *table;
    int64_t block_words;  /* from one block to the next */
    int64_t d, block_size;
};

/* W keys of one block, at every word of D: where they are and the words from one D to the next. Blocks that are no multiple of W
 * are copied together. */
INLINE const word *keys_at(const struct heads *heads, int64_t key, int64_t end, word *copy, int64_t *stride) {
    int64_t size = heads->block_size, words = heads->d / P;
    if (size % W == 0) {
        *stride = size;
        return heads->k + heads->table[key / size] * heads->block_words + key % size;
    }
    *stride = W;
    for (int64_t j = 0; j < W; j++) {
        if (key + j >= end) { /* there may be no further block */
            for (int64_t i = 0; i < words; i++) copy[i * W + j] = 0;
            continue;
        }
        const word *from = heads->k + heads->table[(key + j) / size] * heads->block_words + (key + j) % size;
        for (int64_t i = 0; i < words; i++) copy[i * W + j] = from[i * size];
    }
    return copy;
}

INLINE void score_keys(int num_rows, const struct rows *rows, const word *left, int64_t left_stride, const word *right,
                       int64_t right_stride, int64_t words, vf sums[ROWS][2]) {
    vf sum[ROWS][2];
    UNROLL for (int r = 0; r < num_rows; r++) sum[r][0] = sum[r][1] = set(0);
    for (int64_t i = 0; i < words; i++) {
        vu a = load_words(left + i * left_stride), b = load_words(right + i * right_stride);
        UNROLL for (int r = 0; r < num_rows; r++) {
            vu q = set_word(rows->query[r][i]);
            sum[r][0] = dot(sum[r][0], a, q);
            sum[r][1] = dot(sum[r][1], b, q);
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++) {
        sums[r][0] = sum[r][0];
        sums[r][1] = sum[r][1];
    }
}

/* W words of V, or the last ones of a head that is no multiple of W. */
INLINE vu load_values(const word *v, int64_t width) {
    if (width >= W) return load_words(v);
    word lanes[W] = {0};
    memcpy(lanes, v, width * sizeof *lanes);
    return load_words(lanes);
}

/* o[r] = Σ over keys of p·v, for `columns` vectors of dimensions; `width` of them are left in the head. */
INLINE void weigh(int num_rows, int columns, int64_t width, const struct heads *heads, int64_t first, int64_t count, int64_t at,
                  const number weights[ROWS][PARTITION], float o[ROWS][MAX_HEAD]) {
    vf sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < num_rows; r++) UNROLL for (int c = 0; c < columns; c++) sum[r][c] = set(0);
    int64_t size = heads->block_size, d = heads->d;
    for (int64_t key = 0; key < count;) {
        int64_t offset = (first + key) % size, in_block = size - offset < count - key ? size - offset : count - key;
        const word *v = heads->v + heads->table[(first + key) / size] * heads->block_words + offset / P * d + at;
        if (key + in_block < count) {
            const word *next = heads->v + heads->table[(first + key + in_block) / size] * heads->block_words + at;
            UNROLL for (int c = 0; c < columns; c++) prefetch(next + c * W);
        }
        int64_t i = 0;
        for (; i + P <= in_block; i += P, v += d) {
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

/* One partition: keys first … end − 1, end at most that of the row that sees most. */
INLINE void attend_partition(int num_rows, const struct kvpool_layer *layer, const struct rows *rows, const struct heads *heads,
                             int64_t first, int64_t end, struct sums *found) {
    float scores[ROWS][PARTITION];
    number weights[ROWS][PARTITION];
    word copies[2][MAX_HEAD / P * W];
    int64_t d = heads->d, count = end - first;
    for (int64_t key = 0; key < count; key += 2 * W) {
        int64_t strides[2];
        const word *left = keys_at(heads, first + key, end, copies[0], &strides[0]), *right = left;
        strides[1] = strides[0];
        if (key + W < count) right = keys_at(heads, first + key + W, end, copies[1], &strides[1]);
        vf sums[ROWS][2];
        score_keys(num_rows, rows, left, strides[0], right, strides[1], d / P, sums);
        UNROLL for (int r = 0; r < num_rows; r++) {
            store(&scores[r][key], sums[r][0]);
            store(&scores[r][key + W], sums[r][1]);
        }
    }
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    for (int r = 0; r < num_rows; r++) {
        vf largest = set(-INFINITY);
        for (int64_t key = 0; key < count; key += W) {
            vf s = load(&scores[r][key]) * layer->scaling;
            if (layer->softcap != 0) s = layer->softcap * tanh_of(s / layer->softcap);
            vi index = lane + (int32_t)(first + key);
            s = choose((index < rows->limit[r]) & (index >= rows->lower[r]), s, set(-INFINITY));
            store(&scores[r][key], s);
            largest = larger(s, largest);
        }
        float m = largest_of(largest);
        vf l = set(0);
        for (int64_t key = 0; key < count; key += W) {
            vf p = m == -INFINITY ? set(0) : exp_of(load(&scores[r][key]) - m);
            l += p;
            store_numbers(&weights[r][key], p);
        }
        found->m[r] = m;
        found->l[r] = sum_of(l);
    }
    int64_t at = 0;
    for (; at + 4 * W <= d; at += 4 * W) weigh(num_rows, 4, 4 * W, heads, first, count, at, weights, found->o);
    for (; at + W <= d; at += W) weigh(num_rows, 1, W, heads, first, count, at, weights, found->o);
    if (at < d) weigh(num_rows, 1, d - at, heads, first, count, at, weights, found->o);
}

/* All partitions of an item, folded. */
static __attribute__((noinline)) void attend_rows(int num_rows, const struct kvpool_layer *layer, const struct rows *rows,
                                                  const struct heads *heads, const struct item *item, struct sums *total) {
    struct sums found;
    for (int r = 0; r < num_rows; r++) total->l[r] = 0, total->m[r] = -INFINITY;
    for (int64_t partition = item->first; partition < item->end; partition++) {
        int64_t first = partition * PARTITION, end = first + PARTITION < rows->last ? first + PARTITION : rows->last;
        if (end <= first) break;
        switch (num_rows) {
        case 1: attend_partition(1, layer, rows, heads, first, end, &found); break;
        case 2: attend_partition(2, layer, rows, heads, first, end, &found); break;
        case 3: attend_partition(3, layer, rows, heads, first, end, &found); break;
#if ROWS > 3
        case 4: attend_partition(4, layer, rows, heads, first, end, &found); break;
        case 5: attend_partition(5, layer, rows, heads, first, end, &found); break;
        default: attend_partition(6, layer, rows, heads, first, end, &found); break;
#endif
        }
        for (int r = 0; r < num_rows; r++)
            fold(&total->m[r], &total->l[r], total->o[r], found.m[r], found.l[r], found.o[r], heads->d);
    }
}

static void divide(number *to, const float *o, float l, int64_t d) {
    for (int64_t i = 0; i < d; i += W) store_numbers_part(to + i, load_part(o + i, d - i) / l, d - i);
}

static float *slot_of(const struct kvpool_model *model, int64_t t, int64_t head, int64_t slot) {
    return model->slots + (model->first_slot[t] + head * model->num_slots[t] + slot) * (model->widest_head + 2);
}

static void attention_item(struct kvpool_model *model, const struct kvpool_layer *layer, const struct kind *kind, int64_t piece) {
    const struct item *item = &kind->items[piece / layer->kv_heads];
    int64_t h = piece % layer->kv_heads, group = layer->heads / layer->kv_heads, d = layer->head_size;
    int64_t block_size = model->sizes.block_size;
    const struct kvpool_step *step = &model->step;
    struct heads heads = {
        .k = (const word *)layer->k_cache + h * (d / P) * block_size,
        .v = (const word *)layer->v_cache + h * (d / P) * block_size,
        .table = step->tables + step->table_rows[item->part] * step->table_stride,
        .block_words = layer->kv_heads * (d / P) * block_size,
        .d = d,
        .block_size = block_size,
    };
    struct rows rows = {.last = 0};
    int64_t token[ROWS], head[ROWS];
    for (int r = 0; r < item->num_rows; r++) {
        int64_t row = item->first_row + r, t = model->order[item->order + row / group];
        token[r] = t;
        head[r] = h * group + row % group;
        rows.query[r] = (const word *)(model->queries + (t * layer->heads + head[r]) * d);
        rows.limit[r] = model->context[t];
        rows.lower[r] = layer->window && layer->window < rows.limit[r] ? rows.limit[r] - layer->window : 0;
        if (rows.limit[r] > rows.last) rows.last = rows.limit[r];
    }
    struct sums total;
    attend_rows(item->num_rows, layer, &rows, &heads, item, &total);
    for (int r = 0; r < item->num_rows; r++) {
        if (item->slot < 0) {
            divide(model->attended + (token[r] * layer->heads + head[r]) * d, total.o[r], total.l[r], d);
        } else {
            float *slot = slot_of(model, token[r], head[r], item->slot);
            slot[0] = total.m[r];
            slot[1] = total.l[r];
            memcpy(slot + 2, total.o[r], d * sizeof *slot);
        }
    }
}

static void merge_row(struct kvpool_model *model, const struct kvpool_layer *layer, int64_t t) {
    if (model->num_slots[t] == 0) return;
    int64_t d = layer->head_size;
    for (int64_t h = 0; h < layer->heads; h++) {
        float m = -INFINITY, l = 0, o[MAX_HEAD];
        for (int64_t s = 0; s < model->num_slots[t]; s++) {
            const float *slot = slot_of(model, t, h, s);
            fold(&m, &l, o, slot[0], slot[1], slot + 2, d);
        }
        divide(model->attended + (t * layer->heads + h) * d, o, l, d);
    }
}

#endif
