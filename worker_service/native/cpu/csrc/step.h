/* The interface of step.c. All sizes are in numbers of the model's type unless they say otherwise; library.py has the same
 * structures. Pointers belong to the caller and live as long as the model, those of a step as long as the call. */
#ifndef KVPOOL_STEP_H
#define KVPOOL_STEP_H

#include <stdint.h>

enum { KVPOOL_NO_MEMORY = 1 };
enum { KVPOOL_SILU, KVPOOL_GELU_TANH, KVPOOL_GELU, KVPOOL_RELU, KVPOOL_RELU_SQUARED };

/* outputs [n] = weight [n][k] · inputs [k] + bias. All linears of a model have scales, or none has. */
struct kvpool_linear {
    const void *weight;   /* packed, n padded with zeros to whole vectors */
    const float *bias;    /* [n] or NULL */
    const float *scales;  /* [n, padded] of a weight of int8, 128 added to each number; NULL: the weight has the model's type */
    int64_t n, k;         /* k: a multiple of the numbers in a word */
};

struct kvpool_norm {
    const float *weight, *bias; /* or NULL */
    float epsilon;
    int32_t is_centered; /* LayerNorm; else RMSNorm */
    int32_t is_used;
    int32_t unused;
};

struct kvpool_layer {
    int64_t heads, kv_heads, head_size;
    int64_t window; /* tokens that a token sees, itself included; 0: all */
    int64_t group;  /* of the step's groups: that of its blocks */
    /* weights of q_norm and k_norm: [heads][head_size] */
    struct kvpool_norm before_attention, q_norm, k_norm, after_attention, before_mlp, after_mlp;
    struct kvpool_linear qkv; /* outputs: heads of Q, of K, of V */
    struct kvpool_linear out;
    struct kvpool_linear up; /* gated: W outputs of gate, W of up, in turn; n counts both */
    struct kvpool_linear down;
    const float *cos, *sin; /* [positions][rotary / 2] */
    int64_t rotary;         /* leading numbers of a head that are rotated */
    int32_t rotary_is_interleaved;
    int32_t is_gated;
    int32_t activation;
    float scaling;
    float softcap; /* 0: none */
    int32_t head_norms_are_whole;       /* over all heads together; else over each */
    int32_t head_norms_follow_rotation;
    int32_t is_parallel;                /* the MLP gets the residual without what attention adds */
    void *k_cache, *v_cache;
};

struct kvpool_sizes {
    int64_t hidden, vocab, num_layers, num_groups, block_size;
    const void *embedding; /* [vocab][hidden], or the head's packed weight */
    const void *positions; /* [.., hidden] learned, or NULL */
    int64_t position_offset;
    struct kvpool_norm embedding_norm, last_norm; /* after the positions; before the head */
    struct kvpool_linear head;
    float embedding_scale, residual_scale;
    int32_t embedding_is_packed;
    int32_t stores_products; /* set by kvpool_open */
};

/* The blocks of layers that have them in common. Entries of blocks that no layer of the group sees any more, because of its window,
 * and entries after the last token are not read, and may have any value. */
struct kvpool_group {
    const int64_t *slots;      /* [tokens] */
    const int64_t *table_rows; /* [parts] */
    const int32_t *tables;     /* [.., table_stride] block ids */
    int64_t table_stride;
    int64_t num_prefixes;
    const int64_t *prefix_parts;  /* parts that share leading blocks, one set after the other */
    const int64_t *prefix_ends;   /* [prefixes] index after a set's last part */
    const int64_t *prefix_blocks; /* [prefixes] leading blocks that are shared, full, and not written in this step */
};

struct kvpool_step {
    int64_t num_tokens, num_parts, num_rows;
    const int64_t *ids, *positions;     /* [tokens] */
    const int64_t *starts, *lengths;    /* [parts] */
    const struct kvpool_group *groups;  /* [num_groups] */
    const int64_t *rows;                /* [rows] tokens that need logits */
    float *logits;                      /* [rows][vocab] */
    uint8_t *is_finite;                 /* [tokens] the last layer's K and V, and the last residual of those that need logits */
};

struct kvpool_build {
    int64_t words_per_vector, numbers_per_word, rows_per_pass, max_head_size;
    int64_t sizes_bytes, layer_bytes, group_bytes, step_bytes;
    int64_t has_tiles; /* 1: products are computed in AMX's tile registers */
};

struct kvpool_model;

/* NULL: no memory, no threads, or no permission for tile registers; kvpool_problem says which. */
struct kvpool_model *kvpool_open(const struct kvpool_sizes *sizes, const struct kvpool_layer *layers, int64_t num_threads);
/* Why this thread's last kvpool_open returned NULL. Valid until its next one. */
const char *kvpool_problem(void);
/* 0, or KVPOOL_NO_MEMORY, with which no KV has been written. One call at a time. */
int kvpool_run(struct kvpool_model *model, const struct kvpool_step *step);
void kvpool_close(struct kvpool_model *model);
int64_t kvpool_num_phases(const struct kvpool_model *model);
int kvpool_phase_seconds(struct kvpool_model *model, double *seconds);
void kvpool_pack(void *packed, const void *rows, int64_t first, int64_t count, int64_t words);
void kvpool_describe_build(struct kvpool_build *build);

#endif
