/* Steps of small random models, without Python: run by test_driver.py, with and without sanitizers.
 *
 * driver all | small | threads | products [keys]: exit status 0 and nothing on stderr if all is as it must be. `small`: shorter sequences
 * and fewer teams; `threads`: of these what several threads do; `products`: of these what depends on how products are computed. `keys`:
 * of a partition, where the step was built with fewer, so that short sequences have several.
 *
 * Linked with step.c. Where both are built with KVPOOL_TEST_DELAY=driver_delay, which team.h calls where a thread may come late,
 * late threads are checked too.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "driver_model.h"
#include "driver_reference.h"
#include "driver_steps.h"

static int is_small;
static int64_t partition = 256; /* keys, of the step's build */

#ifdef KVPOOL_TEST_DELAY
/* ---- Threads that come late ---- */

static atomic_int delays;       /* all points sleep at random */
static atomic_int held_point;   /* members wait at this one */
static atomic_int num_held;

void driver_delay(int point) {
    if (atomic_load(&delays)) {
        static _Thread_local unsigned state;
        if (!state) state = (unsigned)(uintptr_t)&state | 1;
        state = state * 1664525u + 1013904223u;
        if (state >> 27 == 0) usleep(state >> 16 & 511);
    }
    if (point && atomic_load(&held_point) == point) {
        atomic_fetch_add(&num_held, 1);
        while (atomic_load(&held_point) == point) usleep(100);
        atomic_fetch_sub(&num_held, 1);
    }
}

static void wait_until_held(int count) {
    while (atomic_load(&num_held) < count) usleep(100);
}

static void release(void) {
    atomic_store(&held_point, 0);
    while (atomic_load(&num_held)) usleep(100);
}

#endif

/* ---- Models ---- */

#define COMMON .longest = 640, .embedding_scale = 1, .residual_scale = 1
static struct shape shapes[] = {
    {"llama", 2, 48, 3, 1, 32, 64, 50, 16, .rotary = 32, .is_gated = 1, COMMON},
    {"gemma, windows, softcap, blocks of 32", 3, 32, 8, 1, 16, 48, 33, 32, .window = 100, .rotary = 16, .is_gated = 1,
     .activation = KVPOOL_GELU_TANH, .has_post_norms = 1, .has_qk_norms = 1, .softcap = 5, .longest = 640, .embedding_scale = 5.65f,
     .residual_scale = 1},
    {"olmo-2, blocks of 4, packed embedding", 2, 36, 4, 2, 16, 32, 37, 4, .rotary = 16, .is_gated = 1, .has_qk_norms = 1,
     .head_norms_are_whole = 1, .has_post_norms = 1, .has_no_norms_before = 1, .has_biases = 1, .embedding_is_packed = 1, COMMON},
    {"gpt-2, odd MLP, blocks of 12", 2, 34, 2, 2, 16, 70, 41, 12, .activation = KVPOOL_GELU, .is_centered = 1, .has_biases = 1,
     .has_positions = 1, .has_embedding_norm = 1, COMMON},
    {"parallel, partial interleaved rotary, norms after it, heads of 80, short windows, blocks of 8", 2, 40, 2, 1, 80, 32, 35, 8,
     .window = 7, .rotary = 20, .rotary_is_interleaved = 1, .has_qk_norms = 1, .head_norms_follow_rotation = 1, .is_parallel = 1,
     .activation = KVPOOL_RELU_SQUARED, .longest = 640, .embedding_scale = 2, .residual_scale = 0.5f},
    {"two groups, one with windows, blocks of 4", 3, 40, 4, 2, 16, 32, 35, 4, .window = 70, .groups = 2, .rotary = 16, .is_gated = 1, COMMON},
    {"two groups of one window, prefixes of their own, blocks of 16", 2, 32, 4, 1, 16, 32, 35, 16, .groups = 2, .rotary = 16, COMMON},
    {"int8, two groups of inputs, packed embedding", 2, 100, 3, 1, 32, 80, 50, 16, .rotary = 32, .is_gated = 1, .embedding_is_packed = 1,
     .is_quantized = 1, COMMON},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* A window of several blocks is less than half a partition. */
static void fit_windows(void) {
    for (int i = 0; i < NUM_SHAPES; i++)
        if (shapes[i].window > 16) shapes[i].window = shapes[i].window * partition / 256;
}

/* Sequences of one to three partitions of keys; some begin like the first one. */
static struct batch mixed_batch(struct tiny *tiny) {
    int64_t p = partition;
    int64_t lengths[] = {2 * p + 18, 1, 17, p + 44, p + 6, 2 * p + 29, 33}, leaders[] = {0, 1, 2, 0, 0, 0, 6}, same[] = {0, 0, 0, p + 34, p, 2 * p + 5, 0};
    int64_t few_lengths[] = {p + 34, 1, p + 24, p + 6, 33}, few_leaders[] = {0, 1, 0, 0, 4}, few_same[] = {0, 0, p + 9, p, 0};
    if (is_small) return make_batch(tiny, 5, few_lengths, few_leaders, few_same);
    return make_batch(tiny, 7, lengths, leaders, same);
}

static struct tiny *make_tiny_for_batch(const struct shape *shape) {
    return make_tiny(shape, 7 * (2 * partition + 128) / shape->block_size);
}

/* ---- What must hold ---- */

static void check_reference(const struct batch *batch, float *const *found) {
    const struct shape *shape = batch->tiny->shape;
    for (int64_t s = 0; s < batch->count; s++) {
        int64_t length = batch->sequences[s].length, count = length * shape->vocab;
        double *wanted = malloc(count * sizeof *wanted), square = 0, error = 0, largest = 0;
        reference(batch->tiny, batch->sequences[s].ids, length, wanted);
        for (int64_t i = 0; i < count; i++) {
            double difference = fabs(found[s][i] - wanted[i]);
            if (!(difference <= largest)) largest = difference;
            square += wanted[i] * wanted[i] / count;
            error += difference * difference / count;
        }
        free(wanted);
        double tolerance = shape->is_quantized ? 0.05 : 0.01;
        if (P == 1 && !shape->is_quantized)
            CHECK(largest <= 1e-4, "%s: a logit differs by %g from the reference", shape->name, largest);
        else
            CHECK(error <= tolerance * tolerance * square, "%s: logits differ by %g from the reference, root mean square, theirs is %g", shape->name,
                  sqrt(error), sqrt(square));
    }
}

/* Decodes over long prefixes, shared and not: partitions into slots. */
static void check_decodes(const struct shape *shape, struct batch *batch, float *const *expected) {
    static const int64_t teams[] = {3, 1, 16};
    for (int i = 0; i < (is_small ? 1 : 3); i++)
        for (int shares = 0; shares < 2; shares++) {
            struct kvpool_model *model = kvpool_open(&batch->tiny->sizes, batch->tiny->layers, teams[i]);
            CHECK(model, "%s: kvpool_open with %lld threads failed", shape->name, (long long)teams[i]);
            struct schedule schedule = {shares ? "shared decodes" : "decodes", INT64_MAX, 1, 0, shares};
            lay_out(batch, shares);
            /* Up to the last tokens in chunks, leaders first. */
            for (int64_t s = 0; s < batch->count; s++) {
                int64_t length = batch->sequences[s].length - batch->sequences[s].done - 3;
                if (length > 0) run_step(model, batch, &s, &length, 1, 0);
            }
            for (;;) {
                int64_t parts[7], ones[] = {1, 1, 1, 1, 1, 1, 1}, count = 0;
                for (int64_t s = batch->count - 1; s >= 0; s--)
                    if (batch->sequences[s].done < batch->sequences[s].length) parts[count++] = s;
                if (!count) break;
                run_step(model, batch, parts, ones, count, shares);
            }
            expect_same_bits(batch, expected, &schedule, teams[i]);
            kvpool_close(model);
        }
}

/* Alone = packed = permuted = chunked = shared = decoded one by one, with 1, 2, 3 and 16 threads. */
static void check_bits(const struct shape *shape) {
    static const struct schedule schedules[] = {
        {"packed", INT64_MAX, INT64_MAX, 0, 0},    {"permuted chunks, few wanted", 4, 90, 1, 0, 1}, {"shared chunks, few wanted", INT64_MAX, 200, 1, 1, 1},
        {"one by one", INT64_MAX, 1, 0, 0},        {"shared, one by one", INT64_MAX, 1, 0, 1},      {"few tokens, shared", 3, 5, 1, 1},
    };
    static const struct {
        int64_t threads;
        int first, end; /* of the schedules */
    } teams[] = {{16, 0, 3}, {1, 1, 2}, {3, 2, 3}, {2, 3, 6}};
    struct tiny *tiny = make_tiny_for_batch(shape);
    struct batch batch = mixed_batch(tiny);
    float **expected = compute_alone(&batch);
    check_reference(&batch, expected);
    for (int i = 0; i < (is_small ? 1 : 4); i++) {
        struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, teams[i].threads);
        CHECK(model, "kvpool_open with %lld threads failed", (long long)teams[i].threads);
        for (int j = teams[i].first; j < teams[i].end; j++) {
            run_schedule(model, &batch, &schedules[j]);
            expect_same_bits(&batch, expected, &schedules[j], teams[i].threads);
        }
        kvpool_close(model);
    }
    check_decodes(shape, &batch, expected);
    free_tiny(tiny);
}

/* The first tokens of a sequence in one step, for each number of rows that products compute in another way. The model has enough
 * outputs for tiles of all their columns, and the last of them ends in padding. Each step is longer than those before it, so that what
 * it uses of its buffers ends where they end: a sanitizer sees reads of more rows than there are. */
static void check_row_counts(void) {
    struct shape shape = {"many outputs", 1, 66, 3, 1, 32, 70, 571, 16, .rotary = 32, COMMON};
    struct tiny *tiny = make_tiny(&shape, 640 / shape.block_size);
    int64_t longest = 100, part = 0;
    struct batch batch = make_batch(tiny, 1, &longest, NULL, NULL);
    float **expected = compute_alone(&batch);
    check_reference(&batch, expected);
    struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, 1);
    for (int64_t rows = 1; rows <= longest; rows += rows == 34 ? 61 : 1) { /* one or two passes; one or two tiles */
        lay_out(&batch, 0);
        run_step(model, &batch, &part, &rows, 1, 0);
        CHECK(!memcmp(batch.sequences[0].logits, expected[0], rows * shape.vocab * sizeof(float)),
              "the first tokens have other logits in a step of %lld", (long long)rows);
    }
    kvpool_close(model);
    free_tiny(tiny);
}

/* A product of the last layer has a NaN in output n, an int8 one in its scale: the tokens of which it is computed are not finite. */
static void check_nan_in_last_layer(const struct kvpool_linear *linear, int64_t n, int of_all, struct kvpool_model *model, struct batch *batch) {
    word *weight = linear->scales ? (word *)linear->scales + n : (word *)linear->weight + n / W * (linear->k / P) * W + n % W;
    word before = *weight;
    *weight = 0xffffffff;
    struct schedule schedule = {"NaN in the last layer", INT64_MAX, 64, 0, 0, 1};
    run_schedule(model, batch, &schedule);
    for (int64_t s = 0; s < batch->count; s++)
        for (int64_t t = 0; t < batch->sequences[s].length; t++)
            CHECK(batch->sequences[s].is_finite[t] == !(of_all || batch->sequences[s].is_wanted[t]), "output %lld of %lld: token %lld is called %s",
                  (long long)n, (long long)linear->n, (long long)t, batch->sequences[s].is_finite[t] ? "finite" : "not finite");
    *weight = before;
}

/* A NaN ends its own sequence, and changes no bit of others. */
static void check_nan(const struct shape *shape) {
    struct tiny *tiny = make_tiny_for_batch(shape);
    struct batch batch = mixed_batch(tiny);
    struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, 2);
    struct schedule schedule = {"packed with NaN, few wanted", INT64_MAX, 64, 0, 0, 1};
    int64_t bad = batch.count - 1, at = 20, hidden = shape->hidden, id = shape->vocab - 1;
    for (int64_t s = 0; s < batch.count; s++)
        for (int64_t t = 0; t < batch.sequences[s].length; t++)
            if (batch.sequences[s].ids[t] == id) batch.sequences[s].ids[t] = 0;
    float **expected = compute_alone(&batch);
    batch.sequences[bad].ids[at] = id;
    memset(tiny->embedding + id * hidden, 0xff, hidden * sizeof(number));
    run_schedule(model, &batch, &schedule);
    for (int64_t t = at; t < batch.sequences[bad].length; t++)
        CHECK(!batch.sequences[bad].is_finite[t], "token %lld after a NaN is called finite", (long long)t);
    for (int64_t s = 0; s < bad; s++)
        for (int64_t t = 0; t < batch.sequences[s].length; t++)
            CHECK(batch.sequences[s].is_finite[t], "token %lld of another sequence is called not finite", (long long)t);
    batch.count = bad;
    expect_same_bits(&batch, expected, &schedule, 2);
    const struct kvpool_layer *last = &tiny->layers[shape->layers - 1];
    check_nan_in_last_layer(&last->qkv, last->heads * last->head_size, 1, model, &batch);                      /* K */
    check_nan_in_last_layer(&last->qkv, (last->heads + last->kv_heads) * last->head_size, 1, model, &batch);   /* V */
    check_nan_in_last_layer(&last->down, 0, 0, model, &batch);
    kvpool_close(model);
    free_tiny(tiny);
}

/* 4,096 sequences in one step, or 1,024, that share a partition. */
static void check_many_sequences(void) {
    struct shape shape = {"many sequences", 1, 32, 2, 1, 16, 32, 33, 16, .rotary = 16, .is_gated = 1, COMMON};
    const int64_t count = is_small ? 1024 : 4096, shared = partition, num_steps = is_small ? 1 : 3, length = shared + num_steps;
    struct tiny *tiny = make_tiny(&shape, count + shared / 16 + 1);
    int64_t *lengths = own(tiny, count * sizeof *lengths), *leaders = own(tiny, count * sizeof *leaders), *same = own(tiny, count * sizeof *same);
    for (int64_t s = 0; s < count; s++) lengths[s] = length, leaders[s] = 0, same[s] = s ? shared : 0;
    struct batch batch = make_batch(tiny, count, lengths, leaders, same);
    struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, 2);
    struct schedule schedule = {"at once", INT64_MAX, shared, 0, 1}, decodes = {"decodes", INT64_MAX, 1, 0, 1};
    float **expected = own(tiny, count * sizeof *expected);
    run_schedule(model, &batch, &schedule);
    for (int64_t s = 0; s < count; s++) {
        expected[s] = own(tiny, length * shape.vocab * sizeof(float));
        memcpy(expected[s], batch.sequences[s].logits, length * shape.vocab * sizeof(float));
    }
    lay_out(&batch, 1);
    int64_t first = 0, prefix = shared, *parts = own(tiny, count * sizeof *parts), *ones = own(tiny, count * sizeof *ones);
    for (int64_t s = 0; s < count; s++) parts[s] = s, ones[s] = 1;
    run_step(model, &batch, &first, &prefix, 1, 0);
    for (int64_t t = shared; t < length; t++) run_step(model, &batch, parts, ones, count, 1);
    expect_same_bits(&batch, expected, &decodes, 2);
    kvpool_close(model);
    for (int64_t s = 0; s < count; s += count / 4 - 1) { /* and alone */
        struct batch one = {.tiny = tiny, .sequences = &batch.sequences[s], .count = 1, .tables = batch.tables, .stride = batch.stride};
        batch.sequences[s].leader = 0;
        batch.sequences[s].same_tokens = 0;
        float **alone = compute_alone(&one);
        CHECK(!memcmp(alone[0] + shared * shape.vocab, expected[s] + shared * shape.vocab, num_steps * shape.vocab * sizeof(float)),
              "sequence %lld of %lld has other logits than alone", (long long)s, (long long)count);
    }
    free_tiny(tiny);
}

/* The last tokens of a context of a million: a block table whose entries repeat the same blocks. */
static void check_long_context(void) {
    enum { PERIOD = 1024, BLOCK = 16 };
    int64_t length = is_small ? 100002 : 1000002, vocab = 33, width = 16;
    struct shape shape = {"long context", 1, 32, 2, 1, 16, 32, 33, BLOCK, .rotary = 2, .is_gated = 1, .longest = length + 8,
                          .embedding_scale = 1, .residual_scale = 1};
    struct tiny *tiny = make_tiny(&shape, PERIOD / BLOCK + 1);
    struct kvpool_layer *layer = tiny->layers;
    double *keys = own(tiny, PERIOD * width * sizeof *keys), *values = own(tiny, PERIOD * width * sizeof *values);
    forget_kv(tiny);
    for (int64_t t = 0; t < PERIOD; t++)
        for (int64_t i = 0; i < width; i++) {
            int64_t block = t / BLOCK * BLOCK * width, offset = t % BLOCK;
            number k = narrow(random_float()), v = narrow(random_float());
            ((number *)layer->k_cache)[block + i / P * P * BLOCK + offset * P + i % P] = k;
            ((number *)layer->v_cache)[block + offset / P * P * width + offset % P + i * P] = v;
            keys[t * width + i] = widen(k);
            values[t * width + i] = widen(v);
        }
    struct batch batch = make_batch(tiny, 1, &length, NULL, NULL);
    for (int64_t b = 0; b < batch.stride; b++) batch.tables[b] = b % (PERIOD / BLOCK);
    batch.tables[batch.stride - 1] = PERIOD / BLOCK; /* of the two tokens that are computed */
    float expected[2][33];
    for (int64_t num_threads = 1; num_threads <= 3; num_threads += 2)
        for (int64_t chunk = 1; chunk <= 2; chunk++) {
            struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, num_threads);
            int64_t part = 0;
            batch.sequences[0].done = length - 2;
            while (batch.sequences[0].done < length) run_step(model, &batch, &part, &chunk, 1, 0);
            kvpool_close(model);
            const float *found = batch.sequences[0].logits + (length - 2) * vocab;
            if (num_threads == 1 && chunk == 1) memcpy(expected, found, sizeof expected);
            CHECK(!memcmp(expected, found, sizeof expected), "the bits over %lld tokens depend on threads or chunks", (long long)length);
        }
    double residual[32], wanted[33], *all_keys = malloc(length * width * sizeof(double)), *all_values = malloc(length * width * sizeof(double));
    CHECK(all_keys && all_values, "no memory for the reference");
    for (int64_t t = 0; t < length; t++) {
        memcpy(all_keys + t * width, keys + t % PERIOD * width, width * sizeof(double));
        memcpy(all_values + t * width, values + t % PERIOD * width, width * sizeof(double));
    }
    for (int64_t t = length - 2; t < length; t++) {
        plain_embedding(tiny, batch.sequences[0].ids[t], t, residual);
        plain_layer(tiny, 0, residual, all_keys, all_values, t);
        plain_logits(tiny, residual, wanted);
        for (int64_t i = 0; i < vocab; i++)
            CHECK(fabs(wanted[i] - expected[t - length + 2][i]) <= (P == 1 ? 1e-3 : 0.1), "a logit over %lld tokens is %g, not %g",
                  (long long)length, expected[t - length + 2][i], wanted[i]);
    }
    free(all_keys);
    free(all_values);
    free_tiny(tiny);
}

#ifdef KVPOOL_TEST_DELAY
/* A member that does not come delays no step; one that is inside late delays the next step only. */
static void check_late_members(const struct shape *shape) {
    struct tiny *tiny = make_tiny_for_batch(shape);
    struct batch batch = mixed_batch(tiny);
    float **expected = compute_alone(&batch);
    struct schedule chunks = {"with members that never come", INT64_MAX, 150, 0, 1}, random = {"with late members", 5, 100, 1, 1};
    struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, 4);
    CHECK(model, "kvpool_open failed");
    atomic_store(&held_point, 1); /* before it is inside */
    run_schedule(model, &batch, &chunks);
    expect_same_bits(&batch, expected, &chunks, 4);
    wait_until_held(3);
    release();
    for (int point = 2; point <= 3; point++) { /* inside: before it looks whether the step is open, and after */
        lay_out(&batch, 0);
        atomic_store(&held_point, point);
        int64_t part = 0, length = batch.sequences[0].length;
        run_step(model, &batch, &part, &length, 1, 0);
        CHECK(!memcmp(batch.sequences[0].logits, expected[0], length * shape->vocab * sizeof(float)), "late members changed bits");
        if (point == 2) wait_until_held(3);
        release();
    }
    atomic_store(&delays, 1);
    for (int i = 0; i < 2; i++) {
        run_schedule(model, &batch, &random);
        expect_same_bits(&batch, expected, &random, 4);
    }
    atomic_store(&delays, 0);
    kvpool_close(model);
    free_tiny(tiny);
}

#endif

/* Models one after the other: closed before a step, after one, and while their threads sleep; and two at the same time. */
static void check_models_in_succession(void) {
    for (int i = 0; i < 12; i++) {
        const struct shape *shape = &shapes[i % NUM_SHAPES];
        struct tiny *tiny = make_tiny(shape, 4 * 640 / shape->block_size);
        int64_t lengths[] = {40, 9};
        struct batch batch = make_batch(tiny, 2, lengths, NULL, NULL);
        float **expected = compute_alone(&batch);
        struct schedule schedule = {"in succession", INT64_MAX, 16, 0, 0};
        struct kvpool_model *model = kvpool_open(&tiny->sizes, tiny->layers, 1 + i % 5), *other = NULL;
        if (i % 3) {
            if (i % 4 == 0) other = kvpool_open(&tiny->sizes, tiny->layers, 3);
            double seconds[kvpool_num_phases(model)];
            CHECK(kvpool_phase_seconds(model, seconds) == 0, "the clock has no memory");
            run_schedule(model, &batch, &schedule);
            expect_same_bits(&batch, expected, &schedule, 1 + i % 5);
            if (other) run_schedule(other, &batch, &schedule);
            expect_same_bits(&batch, expected, &schedule, 3);
            CHECK(kvpool_phase_seconds(model, seconds) == 0, "the clock has no times");
            for (int64_t phase = 0; phase < kvpool_num_phases(model); phase++)
                CHECK(seconds[phase] >= 0, "phase %lld ended before it began", (long long)phase);
            if (i % 2) usleep(2000); /* longer than threads spin */
        }
        kvpool_close(other);
        kvpool_close(model);
        free_tiny(tiny);
    }
}

static int succeeded(int num_shapes) {
    struct kvpool_build build;
    kvpool_describe_build(&build);
    printf("W %d, P %d, %s, %d shapes\n", W, P, build.has_tiles ? "tiles" : "no tiles", num_shapes);
    return 0;
}

int main(int argc, char **argv) {
    alarm(400); /* a deadlock ends */
    int is_for_threads = argc > 1 && !strcmp(argv[1], "threads");
    int is_for_products = argc > 1 && !strcmp(argv[1], "products");
    is_small = is_for_threads || is_for_products || (argc > 1 && !strcmp(argv[1], "small"));
    if (argc > 2) partition = atoll(argv[2]);
    fit_windows();
    int num_shapes = is_for_threads ? 1 : NUM_SHAPES;
    check_row_counts();
    for (int i = 0; i < num_shapes; i += is_for_products ? 3 : 1) check_bits(&shapes[i]);
    if (is_for_products) {
        check_nan(&shapes[0]);
        return succeeded(2);
    }
    if (!is_for_threads) {
        check_nan(&shapes[0]);
        check_nan(&shapes[1]);
        struct shape int8 = shapes[NUM_SHAPES - 1];
        int8.embedding_is_packed = 0; /* one whose NaN is of one token's input, and of no output's weight */
        check_nan(&int8);
        check_many_sequences();
        check_long_context();
    }
#ifdef KVPOOL_TEST_DELAY
    check_late_members(&shapes[0]);
#endif
    check_models_in_succession();
    return succeeded(num_shapes);
}
