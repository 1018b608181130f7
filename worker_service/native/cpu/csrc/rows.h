/* What is computed for each token by itself: embedding, norms, rotary, and the writing of K and V. */
#ifndef KVPOOL_ROWS_H
#define KVPOOL_ROWS_H

#include "quantized.h"
#include "state.h"

INLINE void narrow_all(const float *from, number *to, int64_t count) {
    for (int64_t i = 0; i < count; i += W) store_numbers_part(to + i, load_part(from + i, count - i), count - i);
}

/* y = x normed, with the weights from `first` on; y may be x. */
static void norm_floats(const struct kvpool_norm *norm, int64_t first, const float *x, float *y, int64_t n) {
    float mean = 0, sum;
    int64_t whole = n / W * W;
    if (norm->is_centered) {
        vf sums = set(0);
        for (int64_t i = 0; i < whole; i += W) sums += load(x + i);
        sum = sum_of(sums);
        for (int64_t i = whole; i < n; i++) sum += x[i];
        mean = sum / n;
    }
    vf squares = set(0);
    for (int64_t i = 0; i < whole; i += W) {
        vf d = load(x + i) - mean;
        squares += d * d;
    }
    sum = sum_of(squares);
    for (int64_t i = whole; i < n; i++) sum += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / sqrtf(sum / n + norm->epsilon);
    for (int64_t i = 0; i < n; i += W) {
        vf v = (load_part(x + i, n - i) - mean) * factor;
        if (norm->weight) v = v * load_part(norm->weight + first + i, n - i);
        if (norm->bias) v = v + load_part(norm->bias + first + i, n - i);
        store_part(y + i, v, n - i);
    }
}

static void embed(struct kvpool_model *model, int64_t t) {
    const struct kvpool_sizes *sizes = &model->sizes;
    int64_t hidden = sizes->hidden, id = model->step.ids[t];
    float *row = model->residual + t * hidden;
    if (sizes->embedding_is_packed && sizes->head.scales) {
        const word *words = (const word *)sizes->embedding + id / W * (sizes->head.k / BYTES) * W + id % W;
        for (int64_t i = 0; i < hidden; i++) row[i] = ((int)(words[i / BYTES * W] >> (8 * (i % BYTES)) & 255) - ADDED) * sizes->head.scales[id];
    } else if (sizes->embedding_is_packed) { /* the head's weight */
        const word *words = (const word *)sizes->embedding + id / W * (hidden / P) * W + id % W;
        for (int64_t i = 0; i < hidden / P; i++) {
            number pair[P];
            memcpy(pair, words + i * W, 4);
            for (int p = 0; p < P; p++) row[i * P + p] = widen(pair[p]);
        }
    } else {
        const number *from = (const number *)sizes->embedding + id * hidden;
        for (int64_t i = 0; i < hidden; i++) row[i] = widen(from[i]);
    }
    for (int64_t i = 0; i < hidden; i++) row[i] *= sizes->embedding_scale;
    if (sizes->positions) {
        const number *from = (const number *)sizes->positions + (model->step.positions[t] + sizes->position_offset) * hidden;
        for (int64_t i = 0; i < hidden; i++) row[i] += widen(from[i]);
    }
    if (sizes->embedding_norm.is_used) norm_floats(&sizes->embedding_norm, 0, row, row, hidden);
}

/* Add what a product has stored for a row to its residual, normed if the norm is used. `room` [hidden] is overwritten. */
static void add_stored(const struct kvpool_model *model, float *residual, int64_t row, const struct kvpool_norm *norm, float *room) {
    int64_t hidden = model->sizes.hidden;
    float scale = model->sizes.residual_scale;
    const float *added = model->stored + row * hidden;
    if (norm->is_used) {
        norm_floats(norm, 0, added, room, hidden);
        added = room;
    }
    for (int64_t i = 0; i < hidden; i++) residual[i] += added[i] * scale;
}

/* A residual as row `row` of a product's inputs, normed if the norm is used. `room` [hidden] is overwritten. */
static void norm_residual(const struct kvpool_model *model, const float *from, const struct kvpool_norm *norm,
                          const struct kvpool_linear *linear, number *all_inputs, int64_t row, float *room) {
    int64_t hidden = model->sizes.hidden;
    number *inputs = all_inputs + row * hidden;
    if (norm->is_used) {
        norm_floats(norm, 0, from, room, hidden);
        from = room;
    }
    narrow_all(from, inputs, hidden);
    if (linear->scales) quantize_row(model, row, inputs, hidden, linear);
}

static int are_finite(const float *x, int64_t count) {
    vf zero = set(0);
    for (int64_t i = 0; i < count; i += W) zero += load_part(x + i, count - i) * 0;
    return sum_of(zero) == 0;
}

/* Pairs (i, i + half), or (2i, 2i + 1) if interleaved. */
static void rotate(const struct kvpool_layer *layer, float *head, int64_t position) {
    int64_t half = layer->rotary / 2;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    if (layer->rotary_is_interleaved) {
        for (int64_t i = 0; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = a * cos[i] - b * sin[i];
            head[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += W) {
        int64_t count = half - i;
        vf a = load_part(head + i, count), b = load_part(head + half + i, count);
        vf c = load_part(cos + i, count), s = load_part(sin + i, count);
        store_part(head + i, a * c - b * s, count);
        store_part(head + half + i, b * c + a * s, count);
    }
}

static void norm_heads(const struct kvpool_layer *layer, const struct kvpool_norm *norm, float *first, int64_t heads) {
    int64_t all = heads * layer->head_size, each = layer->head_norms_are_whole ? all : layer->head_size;
    for (int64_t i = 0; i < all && norm->is_used; i += each) norm_floats(norm, i, first + i, first + i, each);
}

static void norm_queries_and_keys(const struct kvpool_layer *layer, float *queries) {
    norm_heads(layer, &layer->q_norm, queries, layer->heads);
    norm_heads(layer, &layer->k_norm, queries + layer->heads * layer->head_size, layer->kv_heads);
}

/* Norms and rotation of a token's heads; its K and V go into the cache. */
static void rotary_row(struct kvpool_model *model, const struct kvpool_layer *layer, int64_t t) {
    int64_t d = layer->head_size, block_size = model->sizes.block_size, position = model->step.positions[t];
    float *queries = model->qkv + t * layer->qkv.n, *keys = queries + layer->heads * d, *values = keys + layer->kv_heads * d;
    if (!layer->head_norms_follow_rotation) norm_queries_and_keys(layer, queries);
    for (float *head = queries; head < values; head += d) rotate(layer, head, position);
    if (layer->head_norms_follow_rotation) norm_queries_and_keys(layer, queries);
    int64_t width = layer->heads * d, all = layer->kv_heads * d;
    narrow_all(queries, model->queries + t * width, width);
    int64_t slot = model->step.groups[layer->group].slots[t], block = slot / block_size, offset = slot % block_size;
    word *k = (word *)layer->k_cache + block * all / P * block_size + offset;
    number *v = (number *)layer->v_cache + (block * all * block_size + offset / P * P * d + offset % P);
    _Alignas(64) number narrowed[all];
    narrow_all(keys, narrowed, all);
    for (int64_t i = 0; i < all / P; i++) memcpy(k + i * block_size, narrowed + i * P, sizeof *k);
    narrow_all(values, narrowed, all);
    for (int64_t h = 0; h < layer->kv_heads; h++, v += d * block_size)
        for (int64_t i = 0; i < d; i++) v[i * P] = narrowed[h * d + i];
}

#endif
