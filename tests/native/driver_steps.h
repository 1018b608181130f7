/* Sequences over paged KV, and schedules of steps that compute them. */
#ifndef DRIVER_STEPS_H
#define DRIVER_STEPS_H

#include "driver_model.h"

struct sequence {
    int64_t *ids, length;
    int64_t leader;       /* of the sequences that begin with the same tokens: index of the first; itself if it is the first */
    int64_t same_tokens;  /* that it has in common with its leader */
    int64_t done;
    float *logits;        /* [length][vocab] */
    uint8_t *is_finite;   /* [length] */
    uint8_t *is_wanted;   /* [length] whether the step that computes the token also computes its logits */
};

struct batch {
    struct tiny *tiny;
    struct sequence *sequences;
    int64_t count;
    int32_t *tables; /* [groups][count][stride] */
    int64_t stride;
    int shares; /* blocks of one sequence may be in the tables of others */
};

/* How a batch is computed. */
struct schedule {
    const char *name;
    int64_t most_parts, longest_chunk; /* of a step; chunks are random up to it */
    int is_permuted, shares;
    int wants_few; /* logits: those of some random tokens, of no token in some steps */
};

static int64_t blocks_of(const struct tiny *tiny, int64_t tokens) {
    return (tokens + tiny->shape->block_size - 1) / tiny->shape->block_size;
}

static struct batch make_batch(struct tiny *tiny, int64_t count, const int64_t *lengths, const int64_t *leaders,
                               const int64_t *same_tokens) {
    struct batch batch = {.tiny = tiny, .count = count};
    batch.sequences = own(tiny, count * sizeof *batch.sequences);
    for (int64_t s = 0; s < count; s++) {
        struct sequence *sequence = &batch.sequences[s];
        *sequence = (struct sequence){.length = lengths[s], .leader = leaders ? leaders[s] : s, .same_tokens = same_tokens ? same_tokens[s] : 0};
        sequence->ids = own(tiny, lengths[s] * sizeof(int64_t));
        sequence->logits = own(tiny, lengths[s] * tiny->shape->vocab * sizeof(float));
        sequence->is_finite = own(tiny, lengths[s]);
        sequence->is_wanted = own(tiny, lengths[s]);
        memset(sequence->is_wanted, 1, lengths[s]);
        for (int64_t t = 0; t < lengths[s]; t++)
            sequence->ids[t] = t < sequence->same_tokens ? batch.sequences[sequence->leader].ids[t] : random_below(tiny->shape->vocab);
        if (blocks_of(tiny, lengths[s]) > batch.stride) batch.stride = blocks_of(tiny, lengths[s]);
    }
    batch.tables = own(tiny, tiny->sizes.num_groups * count * batch.stride * sizeof(int32_t));
    return batch;
}

static int32_t *tables_of(const struct batch *batch, int64_t group) { return batch->tables + group * batch->count * batch->stride; }

/* Random blocks of a group for each sequence; with `shares` the leader's for the full blocks of what is the same. */
static void lay_out_group(struct batch *batch, int64_t group, int shares) {
    int32_t *tables = tables_of(batch, group);
    int64_t num_blocks = batch->tiny->num_blocks, used = 0;
    int64_t *free_blocks = malloc(num_blocks * sizeof *free_blocks);
    for (int64_t i = 0; i < num_blocks; i++) free_blocks[i] = i;
    shuffle(free_blocks, num_blocks);
    for (int64_t s = 0; s < batch->count; s++) {
        struct sequence *sequence = &batch->sequences[s];
        int64_t shared = shares ? sequence->same_tokens / batch->tiny->shape->block_size : 0;
        sequence->done = shared * batch->tiny->shape->block_size;
        int32_t *table = tables + s * batch->stride;
        for (int64_t b = 0; b < batch->stride; b++) table[b] = INT32_MAX; /* what must not be read */
        memcpy(table, tables + sequence->leader * batch->stride, shared * sizeof *table);
        for (int64_t b = shared; b < blocks_of(batch->tiny, sequence->length); b++) {
            CHECK(used < num_blocks, "the driver needs more than %lld blocks", (long long)num_blocks);
            table[b] = free_blocks[used++];
        }
    }
    free(free_blocks);
}

static void lay_out(struct batch *batch, int shares) {
    batch->shares = shares;
    for (int64_t g = 0; g < batch->tiny->sizes.num_groups; g++) lay_out_group(batch, g, shares);
    forget_kv(batch->tiny);
}

/* Blocks of the second group that lie before the window of a sequence's next token leave its table: what is there then must not be
 * read. If no other sequence may have them, they become NaN. */
static void let_go(struct batch *batch, int64_t s) {
    const struct shape *shape = batch->tiny->shape;
    int64_t end = shape->groups > 1 && shape->window ? (batch->sequences[s].done + 1 - shape->window) / shape->block_size : 0;
    int32_t *table = tables_of(batch, 1) + s * batch->stride;
    for (int64_t b = 0; b < end; b++) {
        if (table[b] == INT32_MAX) continue;
        if (!batch->shares) forget_block(batch->tiny, 1, table[b]);
        table[b] = INT32_MAX;
    }
}

/* One step of these sequences' next tokens. Prefixes: the parts of one leader one after the other if all are behind `same_tokens`. */
static void run_step(struct kvpool_model *model, struct batch *batch, const int64_t *parts, const int64_t *lengths, int64_t num_parts,
                     int shares) {
    const struct shape *shape = batch->tiny->shape;
    int64_t num_tokens = 0, num_rows = 0, num_prefixes = 0, num_members = 0, at = 0;
    for (int64_t i = 0; i < num_parts; i++) num_tokens += lengths[i];
    int64_t num_groups = batch->tiny->sizes.num_groups;
    int64_t *ids = malloc(num_tokens * sizeof *ids), *positions = malloc(num_tokens * sizeof *ids);
    int64_t *slots = malloc(num_groups * num_tokens * sizeof *ids);
    int64_t *rows = malloc(2 * num_tokens * sizeof *ids), *starts = malloc(num_parts * sizeof *ids);
    int64_t *prefix_parts = malloc(num_parts * sizeof *ids), *ends = malloc(num_parts * sizeof *ids);
    int64_t *blocks = malloc(2 * num_parts * sizeof *ids);
    struct kvpool_group *groups = calloc(num_groups, sizeof *groups);
    float *logits = malloc(2 * num_tokens * shape->vocab * sizeof *logits);
    uint8_t *is_finite = malloc(num_tokens), *is_member = calloc(num_parts, 1);
    for (int64_t i = 0; i < num_parts; i++) {
        struct sequence *sequence = &batch->sequences[parts[i]];
        starts[i] = sequence->done;
        let_go(batch, parts[i]);
        for (int64_t t = sequence->done; t < sequence->done + lengths[i]; t++, at++) {
            for (int64_t g = 0; g < num_groups; g++) {
                int64_t block = tables_of(batch, g)[parts[i] * batch->stride + t / shape->block_size];
                slots[g * num_tokens + at] = block * shape->block_size + t % shape->block_size;
            }
            ids[at] = sequence->ids[t];
            positions[at] = t;
            if (sequence->is_wanted[t]) rows[num_rows++] = at;
        }
    }
    if (num_rows < num_tokens) { /* in any order, and some twice */
        int64_t num_different = num_rows;
        shuffle(rows, num_different);
        for (int64_t i = 0; i < num_different; i += 4) rows[num_rows++] = rows[i];
    }
    for (int64_t i = 0; i < num_parts && shares; i++) {
        int64_t first = num_members, shared = INT64_MAX, leader = batch->sequences[parts[i]].leader;
        for (int64_t j = i; j < num_parts; j++) {
            struct sequence *other = &batch->sequences[parts[j]];
            int64_t same = parts[j] == leader ? other->done : other->same_tokens;
            if (is_member[j] || other->leader != leader || (parts[j] == leader && other->done == 0)) continue;
            if (same / shape->block_size < shared) shared = same / shape->block_size;
            is_member[j] = 1;
            prefix_parts[num_members++] = j;
        }
        if (num_members - first < 2 || shared == 0) {
            num_members = first;
            continue;
        }
        ends[num_prefixes] = num_members;
        blocks[num_parts + num_prefixes] = shared / 2; /* in another group it may be less */
        blocks[num_prefixes++] = shared;
    }
    for (int64_t g = 0; g < num_groups; g++)
        groups[g] = (struct kvpool_group){
            .slots = slots + g * num_tokens, .table_rows = parts, .tables = tables_of(batch, g), .table_stride = batch->stride,
            .num_prefixes = g && shape->window ? 0 : num_prefixes, .prefix_parts = prefix_parts, .prefix_ends = ends,
            .prefix_blocks = g ? blocks + num_parts : blocks};
    struct kvpool_step step = {
        .num_tokens = num_tokens, .num_parts = num_parts, .num_rows = num_rows, .ids = ids, .positions = positions, .starts = starts,
        .lengths = lengths, .groups = groups, .rows = rows, .logits = logits, .is_finite = is_finite};
    CHECK(kvpool_run(model, &step) == 0, "a step of %lld tokens has no memory", (long long)num_tokens);
    float **places = malloc(num_tokens * sizeof *places); /* of each token's logits */
    at = 0;
    for (int64_t i = 0; i < num_parts; i++)
        for (int64_t t = 0; t < lengths[i]; t++, at++)
            places[at] = batch->sequences[parts[i]].logits + (batch->sequences[parts[i]].done + t) * shape->vocab;
    for (int64_t i = 0; i < num_rows; i++) memcpy(places[rows[i]], logits + i * shape->vocab, shape->vocab * sizeof *logits);
    at = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        struct sequence *sequence = &batch->sequences[parts[i]];
        memcpy(sequence->is_finite + sequence->done, is_finite + at, lengths[i]);
        at += lengths[i];
        sequence->done += lengths[i];
    }
    void *memory[] = {ids, positions, slots, rows, starts, prefix_parts, ends, blocks, groups, logits, is_finite, is_member, places};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
}

/* Compute all sequences, step by step. A sequence that shares blocks starts when its leader has filled them. */
static void run_schedule(struct kvpool_model *model, struct batch *batch, const struct schedule *schedule) {
    lay_out(batch, schedule->shares);
    for (int64_t s = 0; s < batch->count; s++)
        for (int64_t t = 0; t < batch->sequences[s].length; t++)
            batch->sequences[s].is_wanted[t] = !schedule->wants_few || random_below(16) == 0;
    int64_t *parts = malloc(batch->count * sizeof *parts), *lengths = malloc(batch->count * sizeof *parts);
    for (;;) {
        int64_t num_parts = 0, num_left = 0;
        for (int64_t s = 0; s < batch->count; s++) {
            struct sequence *sequence = &batch->sequences[s], *leader = &batch->sequences[sequence->leader];
            if (sequence->done == sequence->length) continue;
            num_left++;
            if (schedule->shares && sequence->leader != s && leader->done < sequence->same_tokens) continue;
            if (num_parts < schedule->most_parts) parts[num_parts++] = s;
        }
        if (num_left == 0) break;
        CHECK(num_parts, "schedule %s waits for nothing", schedule->name);
        if (schedule->is_permuted) shuffle(parts, num_parts);
        for (int64_t i = 0; i < num_parts; i++) {
            struct sequence *sequence = &batch->sequences[parts[i]];
            int64_t left = sequence->length - sequence->done, most = left < schedule->longest_chunk ? left : schedule->longest_chunk;
            lengths[i] = schedule->is_permuted ? 1 + random_below(most) : most;
        }
        run_step(model, batch, parts, lengths, num_parts, schedule->shares);
    }
    free(parts);
    free(lengths);
}

/* Bit for bit, from the first token that the sequence has computed itself; of the wanted ones. */
static void expect_same_bits(const struct batch *batch, float *const *expected, const struct schedule *schedule, int64_t num_threads) {
    const struct shape *shape = batch->tiny->shape;
    for (int64_t s = 0; s < batch->count; s++) {
        const struct sequence *sequence = &batch->sequences[s];
        int64_t first = schedule->shares ? sequence->same_tokens / shape->block_size * shape->block_size : 0;
        for (int64_t t = first; t < sequence->length; t++) {
            const float *found = sequence->logits + t * shape->vocab, *wanted = expected[s] + t * shape->vocab;
            CHECK(!sequence->is_wanted[t] || memcmp(found, wanted, shape->vocab * sizeof *found) == 0,
                  "%s: sequence %lld, token %lld of schedule %s with %lld threads has other logits than alone", shape->name, (long long)s,
                  (long long)t, schedule->name, (long long)num_threads);
        }
    }
}

/* Each sequence alone, in one step, with one thread: the logits [sequences][length][vocab] that all schedules must have. */
static float **compute_alone(struct batch *batch) {
    struct schedule alone = {"alone", 1, INT64_MAX, 0, 0};
    struct kvpool_model *model = kvpool_open(&batch->tiny->sizes, batch->tiny->layers, 1);
    CHECK(model, "kvpool_open failed");
    run_schedule(model, batch, &alone);
    kvpool_close(model);
    float **expected = own(batch->tiny, batch->count * sizeof *expected);
    for (int64_t s = 0; s < batch->count; s++) {
        int64_t bytes = batch->sequences[s].length * batch->tiny->shape->vocab * sizeof(float);
        expected[s] = own(batch->tiny, bytes);
        memcpy(expected[s], batch->sequences[s].logits, bytes);
    }
    return expected;
}

#endif
