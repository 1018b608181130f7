/* The same model in plain loops over doubles, without a cache, without blocks and without rounding. */
#ifndef DRIVER_REFERENCE_H
#define DRIVER_REFERENCE_H

#include "driver_model.h"

/* With the weights from `first` on. */
static void plain_norm(const struct kvpool_norm *norm, int64_t first, double *x, int64_t n) {
    if (!norm->is_used) return;
    double mean = 0, square = 0;
    for (int64_t i = 0; i < n && norm->is_centered; i++) mean += x[i] / n;
    for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    for (int64_t i = 0; i < n; i++)
        x[i] = (x[i] - mean) / sqrt(square + norm->epsilon) * norm->weight[first + i] + (norm->bias ? norm->bias[first + i] : 0);
}

/* Four outputs at a time, because a sum that is written to memory after each product takes five times as long. */
static void plain_product(const struct plain_linear *linear, const double *x, double *y) {
    int64_t count = linear->k;
    for (int64_t n = 0; n < linear->n; n += 4) {
        int64_t here = linear->n - n < 4 ? linear->n - n : 4;
        const number *rows[4];
        double sums[4] = {0};
        for (int64_t i = 0; i < 4; i++) rows[i] = linear->weight + (n + (i < here ? i : 0)) * count;
        for (int64_t k = 0; k < count; k++)
            UNROLL for (int64_t i = 0; i < 4; i++) sums[i] += widen(rows[i][k]) * x[k];
        for (int64_t i = 0; i < here; i++) y[n + i] = sums[i] + (linear->bias ? linear->bias[n + i] : 0);
    }
}

static double plain_activation(int activation, double x) {
    switch (activation) {
    case KVPOOL_SILU: return x / (1 + exp(-x));
    case KVPOOL_GELU_TANH: return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case KVPOOL_GELU: return x / 2 * (1 + erf(x / sqrt(2)));
    case KVPOOL_RELU_SQUARED: return x > 0 ? x * x : 0;
    default: return x > 0 ? x : 0;
    }
}

static void plain_rotation(const struct kvpool_layer *layer, double *head, int64_t position) {
    int64_t half = layer->rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        double *a = head + (layer->rotary_is_interleaved ? 2 * i : i), *b = layer->rotary_is_interleaved ? a + 1 : a + half;
        double c = layer->cos[position * half + i], s = layer->sin[position * half + i], old = *a;
        *a = old * c - *b * s;
        *b = *b * c + old * s;
    }
}

/* One head of the token at `position`; keys and values are [tokens][kv heads][d]. */
static void plain_attention(const struct kvpool_layer *layer, const double *query, const double *keys, const double *values,
                            int64_t head, int64_t position, double *attended) {
    int64_t d = layer->head_size, kv = head / (layer->heads / layer->kv_heads);
    int64_t first = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
    double total = 0, largest = -INFINITY, *scores = malloc((position + 1) * sizeof *scores);
    for (int64_t t = first; t <= position; t++) {
        const double *key = keys + (t * layer->kv_heads + kv) * d;
        double score = 0;
        for (int64_t i = 0; i < d; i++) score += query[i] * key[i];
        score *= layer->scaling;
        if (layer->softcap != 0) score = layer->softcap * tanh(score / layer->softcap);
        scores[t] = score;
        if (score > largest) largest = score;
    }
    for (int64_t i = 0; i < d; i++) attended[i] = 0;
    for (int64_t t = first; t <= position; t++) {
        const double *value = values + (t * layer->kv_heads + kv) * d;
        double p = exp(scores[t] - largest);
        total += p;
        for (int64_t i = 0; i < d; i++) attended[i] += p * value[i];
    }
    for (int64_t i = 0; i < d; i++) attended[i] /= total;
    free(scores);
}

static void plain_embedding(const struct tiny *tiny, int64_t id, int64_t position, double *residual) {
    int64_t hidden = tiny->shape->hidden;
    for (int64_t i = 0; i < hidden; i++) {
        residual[i] = (double)widen(tiny->embedding[id * hidden + i]) * tiny->sizes.embedding_scale;
        if (tiny->positions) residual[i] += widen(tiny->positions[(position + tiny->sizes.position_offset) * hidden + i]);
    }
    plain_norm(&tiny->sizes.embedding_norm, 0, residual, hidden);
}

static void add_to_residual(const struct tiny *tiny, const struct kvpool_norm *after, double *residual, double *added) {
    plain_norm(after, 0, added, tiny->shape->hidden);
    for (int64_t i = 0; i < tiny->shape->hidden; i++) residual[i] += added[i] * tiny->sizes.residual_scale;
}

static void plain_head_norms(const struct kvpool_layer *layer, double *qkv) {
    int64_t d = layer->head_size, whole = layer->head_norms_are_whole;
    for (int64_t h = 0; h < layer->heads; h += whole ? layer->heads : 1)
        plain_norm(&layer->q_norm, h * d, qkv + h * d, whole ? layer->heads * d : d);
    for (int64_t h = 0; h < layer->kv_heads; h += whole ? layer->kv_heads : 1)
        plain_norm(&layer->k_norm, h * d, qkv + (layer->heads + h) * d, whole ? layer->kv_heads * d : d);
}

/* The token at `position` through one layer; its key and value are written into keys and values. */
static void plain_layer(const struct tiny *tiny, int64_t l, double *residual, double *keys, double *values, int64_t position) {
    const struct kvpool_layer *layer = &tiny->layers[l];
    const struct plain_layer *plain = &tiny->plain[l];
    int64_t hidden = tiny->shape->hidden, d = layer->head_size, mlp = tiny->shape->mlp;
    double x[hidden], qkv[plain->qkv.n], attended[layer->heads * d], added[hidden], gate[mlp], up[mlp];
    memcpy(x, residual, sizeof x);
    plain_norm(&layer->before_attention, 0, x, hidden);
    plain_product(&plain->qkv, x, qkv);
    for (int pass = 0; pass < 2; pass++) {
        if (pass == layer->head_norms_follow_rotation) plain_head_norms(layer, qkv);
        for (int64_t h = 0; h < layer->heads + layer->kv_heads && pass != layer->head_norms_follow_rotation; h++)
            plain_rotation(layer, qkv + h * d, position);
    }
    int64_t width = layer->kv_heads * d;
    memcpy(keys + position * width, qkv + layer->heads * d, width * sizeof *keys);
    memcpy(values + position * width, qkv + layer->heads * d + width, width * sizeof *values);
    for (int64_t h = 0; h < layer->heads; h++)
        plain_attention(layer, qkv + h * d, keys, values, h, position, attended + h * d);
    plain_product(&plain->out, attended, added);
    memcpy(x, residual, sizeof x);
    add_to_residual(tiny, &layer->after_attention, residual, added);
    if (!layer->is_parallel) memcpy(x, residual, sizeof x);
    plain_norm(&layer->before_mlp, 0, x, hidden);
    plain_product(&plain->up, x, up);
    if (layer->is_gated) plain_product(&plain->gate, x, gate);
    for (int64_t i = 0; i < mlp; i++)
        up[i] = layer->is_gated ? plain_activation(layer->activation, gate[i]) * up[i] : plain_activation(layer->activation, up[i]);
    plain_product(&plain->down, up, added);
    add_to_residual(tiny, &layer->after_mlp, residual, added);
}

static void plain_logits(const struct tiny *tiny, double *residual, double *logits) {
    plain_norm(&tiny->sizes.last_norm, 0, residual, tiny->shape->hidden);
    plain_product(&tiny->head, residual, logits);
}

/* The logits [n][vocab] of n tokens. */
static void reference(const struct tiny *tiny, const int64_t *ids, int64_t n, double *logits) {
    int64_t hidden = tiny->shape->hidden, width = tiny->shape->kv_heads * tiny->shape->head_size;
    double *residual = malloc(n * hidden * sizeof *residual);
    double *keys = malloc(n * width * sizeof *keys), *values = malloc(n * width * sizeof *values);
    for (int64_t t = 0; t < n; t++) plain_embedding(tiny, ids[t], t, residual + t * hidden);
    for (int64_t l = 0; l < tiny->shape->layers; l++)
        for (int64_t t = 0; t < n; t++) plain_layer(tiny, l, residual + t * hidden, keys, values, t);
    for (int64_t t = 0; t < n; t++) plain_logits(tiny, residual + t * hidden, logits + t * tiny->shape->vocab);
    free(residual);
    free(keys);
    free(values);
}

#endif
