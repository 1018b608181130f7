/* Small models with random weights, as the driver's tests need them. */
#ifndef DRIVER_MODEL_H
#define DRIVER_MODEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"
#include "vectors.h" /* the number type: number, P, W, widen, narrow */

#define CHECK(condition, ...)                                     \
    do {                                                          \
        if (!(condition)) {                                       \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);       \
            fprintf(stderr, __VA_ARGS__);                         \
            fprintf(stderr, "\n");                                \
            exit(1);                                              \
        }                                                         \
    } while (0)

struct shape {
    const char *name;
    int64_t layers, hidden, heads, kv_heads, head_size, mlp, vocab, block_size;
    int64_t window; /* of every second layer */
    int64_t groups; /* layers take turns; 0: one. With a window, blocks of the second one leave with it */
    int64_t rotary;
    int rotary_is_interleaved, is_gated, activation, has_biases, has_qk_norms, has_post_norms, is_centered, has_positions;
    int head_norms_are_whole, head_norms_follow_rotation, is_parallel, has_no_norms_before, has_embedding_norm, embedding_is_packed, is_quantized;
    float softcap, embedding_scale, residual_scale;
    int64_t longest; /* of a sequence */
};

/* Row-major, as a checkpoint has it. */
struct plain_linear {
    number *weight; /* [n][k] */
    float *bias;    /* [n] or NULL */
    int64_t n, k;
};

struct plain_layer {
    struct plain_linear qkv, out, gate, up, down;
};

struct tiny {
    const struct shape *shape;
    struct kvpool_sizes sizes;
    struct kvpool_layer *layers;
    struct plain_layer *plain;
    struct plain_linear head;
    number *embedding, *positions; /* row-major */
    int64_t num_blocks;
    void **owned;
    int64_t num_owned;
};

static uint64_t random_state = 88172645463325252u;

static uint64_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 11;
}

static int64_t random_below(int64_t n) { return random_bits() % n; }

static void shuffle(int64_t *values, int64_t count) {
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = random_below(i + 1), value = values[i];
        values[i] = values[j];
        values[j] = value;
    }
}

static float random_float(void) { return (random_below(1 << 20) + 0.5f) / (1 << 19) - 1; }

/* Zeros that live as long as the model. */
static void *own(struct tiny *tiny, int64_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    CHECK(memory, "no memory for %lld bytes", (long long)bytes);
    tiny->owned = realloc(tiny->owned, (tiny->num_owned + 1) * sizeof *tiny->owned);
    return tiny->owned[tiny->num_owned++] = memset(memory, 0, bytes);
}

static number *random_numbers(struct tiny *tiny, int64_t count, float scale) {
    number *numbers = own(tiny, count * sizeof *numbers);
    for (int64_t i = 0; i < count; i++) numbers[i] = narrow(random_float() * scale);
    return numbers;
}

static float *random_floats(struct tiny *tiny, int64_t count, float middle, float scale) {
    float *floats = own(tiny, count * sizeof *floats);
    for (int64_t i = 0; i < count; i++) floats[i] = middle + random_float() * scale;
    return floats;
}

static struct plain_linear random_linear(struct tiny *tiny, int64_t n, int64_t k) {
    return (struct plain_linear){.weight = random_numbers(tiny, n * k, 1.7f / sqrtf(k)),
                                 .bias = tiny->shape->has_biases ? random_floats(tiny, n, 0, 0.3f) : NULL,
                                 .n = n,
                                 .k = k};
}

/* int8: rows [n][k] with 128 added, and the scale of each. */
static uint8_t *byte_rows(struct tiny *tiny, const struct plain_linear *plain, float *scales) {
    uint8_t *rows = own(tiny, plain->n * plain->k);
    for (int64_t n = 0; n < plain->n; n++) {
        const number *from = plain->weight + n * plain->k;
        float largest = 0;
        for (int64_t i = 0; i < plain->k; i++) largest = fmaxf(largest, fabsf(widen(from[i])));
        scales[n] = largest / 127;
        for (int64_t i = 0; i < plain->k; i++) rows[n * plain->k + i] = 128 + (int)rintf(widen(from[i]) / scales[n]);
    }
    return rows;
}

static struct kvpool_linear packed_bytes(struct tiny *tiny, const struct plain_linear *plain) {
    int64_t padded = (plain->n + W - 1) / W * W;
    float *scales = own(tiny, padded * sizeof *scales);
    uint8_t *weight = own(tiny, padded * plain->k);
    kvpool_pack(weight, byte_rows(tiny, plain, scales), 0, plain->n, plain->k / 4);
    return (struct kvpool_linear){.weight = weight, .scales = scales, .bias = plain->bias, .n = plain->n, .k = plain->k};
}

static struct kvpool_linear packed(struct tiny *tiny, const struct plain_linear *plain) {
    if (tiny->shape->is_quantized) return packed_bytes(tiny, plain);
    int64_t padded = (plain->n + W - 1) / W * W;
    number *weight = own(tiny, padded * plain->k * sizeof *weight);
    kvpool_pack(weight, plain->weight, 0, plain->n, plain->k / P);
    return (struct kvpool_linear){.weight = weight, .bias = plain->bias, .n = plain->n, .k = plain->k};
}

/* W outputs of gate, W of up, in turn. */
static struct kvpool_linear packed_pair(struct tiny *tiny, const struct plain_linear *gate, const struct plain_linear *up) {
    int64_t n = 2 * gate->n;
    if (tiny->shape->is_quantized) { /* the rows of both in the order of a product, which then packs them */
        struct plain_linear both = {.weight = own(tiny, n * gate->k * sizeof(number)), .n = n, .k = gate->k};
        for (int64_t i = 0; i < gate->n; i += W) {
            memcpy(both.weight + 2 * i * gate->k, gate->weight + i * gate->k, W * gate->k * sizeof(number));
            memcpy(both.weight + (2 * i + W) * gate->k, up->weight + i * gate->k, W * gate->k * sizeof(number));
        }
        return packed_bytes(tiny, &both);
    }
    number *weight = own(tiny, n * gate->k * sizeof *weight);
    float *bias = gate->bias ? own(tiny, n * sizeof *bias) : NULL;
    for (int64_t i = 0; i < gate->n; i += W) {
        kvpool_pack(weight, gate->weight + i * gate->k, 2 * i, W, gate->k / P);
        kvpool_pack(weight, up->weight + i * gate->k, 2 * i + W, W, gate->k / P);
        if (bias) {
            memcpy(bias + 2 * i, gate->bias + i, W * sizeof *bias);
            memcpy(bias + 2 * i + W, up->bias + i, W * sizeof *bias);
        }
    }
    return (struct kvpool_linear){.weight = weight, .bias = bias, .n = n, .k = gate->k};
}

static struct kvpool_norm random_norm(struct tiny *tiny, int64_t n, int is_used) {
    if (!is_used) return (struct kvpool_norm){.is_used = 0};
    int is_centered = tiny->shape->is_centered;
    return (struct kvpool_norm){.weight = random_floats(tiny, n, 1, 0.3f),
                                .bias = is_centered ? random_floats(tiny, n, 0, 0.2f) : NULL,
                                .epsilon = 1e-5f,
                                .is_centered = is_centered,
                                .is_used = 1};
}

static int64_t kv_bytes(const struct tiny *tiny) {
    const struct shape *shape = tiny->shape;
    return tiny->num_blocks * shape->kv_heads * shape->head_size * shape->block_size * sizeof(number);
}

/* A block of a group becomes NaN. */
static void forget_block(const struct tiny *tiny, int64_t group, int64_t block) {
    int64_t bytes = kv_bytes(tiny) / tiny->num_blocks;
    for (int64_t l = 0; l < tiny->shape->layers; l++) {
        if (tiny->layers[l].group != group) continue;
        memset((char *)tiny->layers[l].k_cache + block * bytes, 0xff, bytes);
        memset((char *)tiny->layers[l].v_cache + block * bytes, 0xff, bytes);
    }
}

/* All slots become NaN: what was not written since must not count. */
static void forget_kv(struct tiny *tiny) {
    for (int64_t l = 0; l < tiny->shape->layers; l++) {
        memset(tiny->layers[l].k_cache, 0xff, kv_bytes(tiny));
        memset(tiny->layers[l].v_cache, 0xff, kv_bytes(tiny));
    }
}

static struct tiny *make_tiny(const struct shape *shape, int64_t num_blocks) {
    struct tiny *tiny = calloc(1, sizeof *tiny);
    CHECK(tiny, "no memory");
    tiny->shape = shape;
    tiny->num_blocks = num_blocks;
    int64_t hidden = shape->hidden, d = shape->head_size, half = shape->rotary / 2;
    tiny->layers = own(tiny, shape->layers * sizeof *tiny->layers);
    tiny->plain = own(tiny, shape->layers * sizeof *tiny->plain);
    float *cos_table = own(tiny, shape->longest * half * sizeof(float)), *sin_table = own(tiny, shape->longest * half * sizeof(float));
    for (int64_t p = 0; p < shape->longest; p++)
        for (int64_t i = 0; i < half; i++) {
            cos_table[p * half + i] = cos(p * pow(1e4, -2.0 * i / shape->rotary));
            sin_table[p * half + i] = sin(p * pow(1e4, -2.0 * i / shape->rotary));
        }
    for (int64_t l = 0; l < shape->layers; l++) {
        struct plain_layer *plain = &tiny->plain[l];
        struct kvpool_layer *layer = &tiny->layers[l];
        *plain = (struct plain_layer){.qkv = random_linear(tiny, (shape->heads + 2 * shape->kv_heads) * d, hidden),
                                      .out = random_linear(tiny, hidden, shape->heads * d),
                                      .up = random_linear(tiny, shape->mlp, hidden),
                                      .down = random_linear(tiny, hidden, shape->mlp)};
        if (shape->is_gated) plain->gate = random_linear(tiny, shape->mlp, hidden);
        *layer = (struct kvpool_layer){
            .heads = shape->heads,
            .kv_heads = shape->kv_heads,
            .head_size = d,
            .window = l % 2 ? shape->window : 0,
            .group = shape->groups ? l % shape->groups : 0,
            .before_attention = random_norm(tiny, hidden, !shape->has_no_norms_before),
            .q_norm = random_norm(tiny, shape->heads * d, shape->has_qk_norms),
            .k_norm = random_norm(tiny, shape->kv_heads * d, shape->has_qk_norms),
            .after_attention = random_norm(tiny, hidden, shape->has_post_norms),
            .before_mlp = random_norm(tiny, hidden, !shape->has_no_norms_before),
            .after_mlp = random_norm(tiny, hidden, shape->has_post_norms),
            .qkv = packed(tiny, &plain->qkv),
            .out = packed(tiny, &plain->out),
            .up = shape->is_gated ? packed_pair(tiny, &plain->gate, &plain->up) : packed(tiny, &plain->up),
            .down = packed(tiny, &plain->down),
            .cos = cos_table,
            .sin = sin_table,
            .rotary = shape->rotary,
            .rotary_is_interleaved = shape->rotary_is_interleaved,
            .is_gated = shape->is_gated,
            .activation = shape->activation,
            .scaling = 1 / sqrtf(d),
            .softcap = shape->softcap,
            .head_norms_are_whole = shape->head_norms_are_whole,
            .head_norms_follow_rotation = shape->head_norms_follow_rotation,
            .is_parallel = shape->is_parallel,
            .k_cache = own(tiny, kv_bytes(tiny)),
            .v_cache = own(tiny, kv_bytes(tiny)),
        };
    }
    tiny->head = random_linear(tiny, shape->vocab, hidden);
    struct kvpool_linear head = packed(tiny, &tiny->head);
    tiny->embedding = shape->embedding_is_packed ? tiny->head.weight : random_numbers(tiny, shape->vocab * hidden, 1);
    tiny->positions = shape->has_positions ? random_numbers(tiny, (shape->longest + 2) * hidden, 0.5f) : NULL;
    tiny->sizes = (struct kvpool_sizes){
        .hidden = hidden,
        .vocab = shape->vocab,
        .num_layers = shape->layers,
        .num_groups = shape->groups ? shape->groups : 1,
        .block_size = shape->block_size,
        .embedding = shape->embedding_is_packed ? head.weight : tiny->embedding,
        .positions = tiny->positions,
        .position_offset = tiny->positions ? 2 : 0,
        .embedding_norm = random_norm(tiny, hidden, shape->has_embedding_norm),
        .last_norm = random_norm(tiny, hidden, 1),
        .head = head,
        .embedding_scale = shape->embedding_scale,
        .residual_scale = shape->residual_scale,
        .embedding_is_packed = shape->embedding_is_packed,
    };
    return tiny;
}

static void free_tiny(struct tiny *tiny) {
    for (int64_t i = 0; i < tiny->num_owned; i++) free(tiny->owned[i]);
    free(tiny->owned);
    free(tiny);
}

#endif
