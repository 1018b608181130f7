/* What is computed for each token by itself: embedding, norms, rotary, and the writing of K and V. */
#ifndef KVPOOL_ROWS_H
#define KVPOOL_ROWS_H

#include "state.h"

static void embed(struct kvpool_model *model, int64_t t) {
    const struct kvpool_sizes *sizes = &model->sizes;
    int64_t hidden = sizes->hidden, id = model->step.ids[t];
    float *row = model->residual + t * hidden;
    if (sizes->embedding_is_packed) { /* the head's weight */
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
}

/* y = x normed; y may be x. */
static void norm_floats(const struct kvpool_norm *norm, const float *x, float *y, int64_t n) {
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
        if (norm->weight) v = v * load_part(norm->weight + i, n - i);
        if (norm->bias) v = v + load_part(norm->bias + i, n - i);
        store_part(y + i, v, n - i);
    }
}

/* The residual of a token, with what a product stored for it if that is normed first; then the inputs of the next product. */
static void norm_row(struct kvpool_model *model, int64_t t, const struct kvpool_norm *after, const struct kvpool_norm *before,
                     number *inputs, float *normed) {
    int64_t hidden = model->sizes.hidden;
    float *residual = model->residual + t * hidden;
    if (after && after->is_used) {
        norm_floats(after, model->stored + t * hidden, normed, hidden);
        for (int64_t i = 0; i < hidden; i++) residual[i] += normed[i] * model->sizes.residual_scale;
    }
    if (!inputs) return;
    const float *from = residual;
    if (before->is_used) {
        norm_floats(before, residual, normed, hidden);
        from = normed;
    }
    for (int64_t i = 0; i < hidden; i += W) store_numbers_part(inputs + i, load_part(from + i, hidden - i), hidden - i);
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

static void rotary_row(struct kvpool_model *model, const struct kvpool_layer *layer, int64_t t) {
    int64_t d = layer->head_size, block_size = model->sizes.block_size, position = model->step.positions[t];
    float *head = model->qkv + t * layer->qkv.n;
    number *query = model->queries + t * layer->heads * d;
    for (int64_t h = 0; h < layer->heads; h++, head += d, query += d) {
        if (layer->q_norm.is_used) norm_floats(&layer->q_norm, head, head, d);
        rotate(layer, head, position);
        for (int64_t i = 0; i < d; i += W) store_numbers_part(query + i, load_part(head + i, d - i), d - i);
    }
    int64_t slot = model->step.slots[t], block = slot / block_size, offset = slot % block_size;
    number *k = (number *)layer->k_cache + (block * layer->kv_heads * d * block_size + offset * P);
    for (int64_t h = 0; h < layer->kv_heads; h++, head += d, k += d * block_size) {
        if (layer->k_norm.is_used) norm_floats(&layer->k_norm, head, head, d);
        rotate(layer, head, position);
        for (int64_t i = 0; i < d; i++) k[i / P * P * block_size + i % P] = narrow(head[i]);
    }
    number *v = (number *)layer->v_cache + (block * layer->kv_heads * d * block_size + offset / P * P * d + offset % P);
    for (int64_t h = 0; h < layer->kv_heads; h++, head += d, v += d * block_size)
        for (int64_t i = 0; i < d; i++) v[i * P] = narrow(head[i]);
}

#endif
