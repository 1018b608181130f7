/* One step of a decoder-only transformer over paged KV, computed by a team of threads.
 *
 * Built once per number type: -DBFLOAT16=0 for float32, 1 for bfloat16. Needs Linux and a compiler with GNU vector types.
 *
 * A step is a list of phases, a phase a number of pieces. Every thread walks through all phases and takes pieces until none is
 * left; a phase ends with its last piece, so that a thread that gets no CPU delays nobody. See team.h.
 *
 * Bits: an output of a product is one sum over k = 0, 1, … (with AMX in an order of its own, see tiles.h); attention is computed in
 * partitions of 256 keys, which are folded from the first to the last. Neither depends on the other rows of the step, on chunks, on
 * shared prefixes or on the number of threads.
 *
 * Rows: tokens, until the last layer's K and V are written; then only those whose logits are wanted.
 *
 * Words: P numbers of the type fill a 32-bit word, W words a vector.
 *   weight  [N/W][K/P][W] words   one load is W outputs at one word of k; N is padded with zeros; int8: four in a word
 *   K       [blocks][Hkv][D/P][block_size] words   one load is W keys at one word of D
 *   V       [blocks][Hkv][block_size/P][D] words   one load is W dimensions of P neighbouring tokens
 */
#define _GNU_SOURCE
#include "step.h"

#include <stdio.h>

#include "attention.h"
#include "plan.h"
#include "product.h"
#include "rows.h"
#include "state.h"
#include "team.h"
#include "tiles.h"

#define ROW_PIECES 16  /* rows of a piece in steps of many tokens */

/* ---- Phases ---- */

/* Whether a phase follows the last K and V. */
static int is_of_wanted(const struct kvpool_model *model, int64_t phase) {
    return phase >= 1 + (model->sizes.num_layers - 1) * PHASES_PER_LAYER + ATTENTION;
}

static int64_t rows_in(const struct kvpool_model *model, int64_t phase) {
    return is_of_wanted(model, phase) ? model->num_wanted : model->step.num_tokens;
}

/* [rows][hidden] */
static float *residual_in(const struct kvpool_model *model, int64_t phase) {
    return is_of_wanted(model, phase) ? model->last_residual : model->residual;
}

static const struct kind *kind_in(const struct kvpool_model *model, int64_t phase) {
    if (is_of_wanted(model, phase) && model->num_wanted < model->step.num_tokens) return &model->kinds[model->num_kinds];
    return &model->kinds[model->kind_of_layer[(phase - 1) / PHASES_PER_LAYER]];
}

static int64_t rows_of_piece(int64_t rows) { return rows > 64 ? ROW_PIECES : 1; }

static int64_t row_pieces(int64_t rows) { return (rows + rows_of_piece(rows) - 1) / rows_of_piece(rows); }

static int64_t pieces_of(const struct kvpool_model *model, int64_t phase) {
    int64_t rows = rows_in(model, phase), from_end = phase - (model->num_phases - PHASES_AROUND);
    if (phase == 0 || from_end == END) return row_pieces(rows);
    if (from_end == NORM_3) return model->step.num_rows;
    if (from_end == HEAD) return tiles_of(model, &model->sizes.head, model->step.num_rows, 1);
    const struct kvpool_layer *layer = &model->layers[(phase - 1) / PHASES_PER_LAYER];
    switch ((phase - 1) % PHASES_PER_LAYER) {
    case QKV: return tiles_of(model, &layer->qkv, rows, 1);
    case ATTENTION: return kind_in(model, phase)->num_items * layer->kv_heads;
    case OUT: return tiles_of(model, &layer->out, rows, 1);
    case UP: return tiles_of(model, &layer->up, rows, layer->is_gated ? 2 : 1);
    case QUANTIZE: return layer->down.scales ? row_pieces(rows) : 0;
    case DOWN: return tiles_of(model, &layer->down, rows, 1);
    default: return row_pieces(rows);
    }
}

static int stores_attention(const struct kvpool_layer *layer) { return layer->after_attention.is_used || layer->is_parallel; }

static int stores_mlp(const struct kvpool_layer *layer) { return layer->after_mlp.is_used; }

/* The products that follow attention and the MLP: added to the residual, or stored until they are normed or may be added. */
static struct result onto_residual(struct kvpool_model *model, int64_t phase, int is_stored) {
    if (is_stored) return (struct result){.action = STORE, .floats = model->stored};
    return (struct result){.action = ADD, .floats = residual_in(model, phase), .scale = model->sizes.residual_scale};
}

/* What the MLP before layer `index` has stored, if it stores its product. */
static void add_mlp_before(const struct kvpool_model *model, int64_t index, float *residual, int64_t row, float *room) {
    if (index == 0 || !stores_mlp(&model->layers[index - 1])) return;
    add_stored(model, residual, row, &model->layers[index - 1].after_mlp, room);
}

/* The last layer's K and V, and the residual of a wanted token, for the phases of these. A token is finite if its K and V are; then
 * the residual is too, because infinity times any weight is not. Of a wanted one the last residual must be finite as well. */
static void last_rotary_row(struct kvpool_model *model, const struct kvpool_layer *layer, int64_t t) {
    int64_t hidden = model->sizes.hidden, place = model->place[t], not_kv = layer->heads * layer->head_size;
    rotary_row(model, layer, t);
    model->step.is_finite[t] = are_finite(model->qkv + t * layer->qkv.n + not_kv, layer->qkv.n - not_kv);
    if (place >= 0 && model->last_residual != model->residual)
        memcpy(model->last_residual + place * hidden, model->residual + t * hidden, hidden * sizeof(float));
}

/* One row in a phase of rows. `room` [hidden] is overwritten. */
static void run_row(struct kvpool_model *model, int64_t phase, int64_t row, float *room) {
    if (phase == 0) {
        embed(model, row);
        return;
    }
    int64_t index = (phase - 1) / PHASES_PER_LAYER, hidden = model->sizes.hidden;
    float *residual = residual_in(model, phase) + row * hidden;
    if (index == model->sizes.num_layers) {
        add_mlp_before(model, index, residual, row, room);
        if (!are_finite(residual, hidden)) model->step.is_finite[model->wanted[row]] = 0;
        return;
    }
    const struct kvpool_layer *layer = &model->layers[index];
    switch ((phase - 1) % PHASES_PER_LAYER) {
    case NORM_1:
        add_mlp_before(model, index, residual, row, room);
        norm_residual(model, residual, &layer->before_attention, &layer->qkv, model->inputs, row, room);
        break;
    case ROTARY:
        if (index + 1 == model->sizes.num_layers)
            last_rotary_row(model, layer, row);
        else
            rotary_row(model, layer, row);
        break;
    case MERGE:
        merge_row(model, layer, is_of_wanted(model, phase) ? model->wanted[row] : row, row);
        if (layer->out.scales) {
            int64_t count = layer->heads * layer->head_size;
            quantize_row(model, row, model->attended + row * count, count, &layer->out);
        }
        break;
    case QUANTIZE: {
        int64_t count = layer->is_gated ? layer->up.n / 2 : layer->up.n;
        quantize_row(model, row, model->activated + row * count, count, &layer->down);
        break;
    }
    case NORM_2:
        if (stores_attention(layer) && !layer->is_parallel) add_stored(model, residual, row, &layer->after_attention, room);
        norm_residual(model, residual, &layer->before_mlp, &layer->up, model->inputs, row, room);
        if (layer->is_parallel) add_stored(model, residual, row, &layer->after_attention, room);
        break;
    default: break;
    }
}

static void run_rows(struct kvpool_model *model, int64_t phase, int64_t piece) {
    int64_t rows = rows_in(model, phase), each = rows_of_piece(rows), first = piece * each;
    int64_t end = first + each < rows ? first + each : rows;
    float room[model->sizes.hidden];
    for (int64_t row = first; row < end; row++) run_row(model, phase, row, room);
}

static void run_piece(struct kvpool_model *model, int64_t phase, int64_t piece) {
    const struct kvpool_step *step = &model->step;
    int64_t rows = rows_in(model, phase), hidden = model->sizes.hidden, from_end = phase - (model->num_phases - PHASES_AROUND);
    if (phase == 0 || from_end == END) {
        run_rows(model, phase, piece);
    } else if (from_end == NORM_3) {
        float room[hidden];
        const float *residual = model->last_residual + model->place[step->rows[piece]] * hidden;
        norm_residual(model, residual, &model->sizes.last_norm, &model->sizes.head, model->selected, piece, room);
    } else if (from_end == HEAD) {
        struct result result = {.action = STORE, .floats = step->logits};
        tile(model, &model->sizes.head, 1, model->selected, step->num_rows, piece, &result);
    } else {
        int64_t index = (phase - 1) / PHASES_PER_LAYER, what = (phase - 1) % PHASES_PER_LAYER;
        const struct kvpool_layer *layer = &model->layers[index];
        struct result result;
        switch (what) {
        case QKV:
            result = (struct result){.action = STORE, .floats = model->qkv};
            tile(model, &layer->qkv, 1, model->inputs, rows, piece, &result);
            break;
        case ATTENTION:
            attention_item(model, layer, kind_in(model, phase), piece, is_of_wanted(model, phase) ? model->place : NULL);
            break;
        case OUT:
            result = onto_residual(model, phase, stores_attention(layer));
            tile(model, &layer->out, 1, model->attended, rows, piece, &result);
            break;
        case UP:
            result = (struct result){
                .action = ACTIVATE, .numbers = model->activated, .activation = layer->activation, .is_gated = layer->is_gated};
            tile(model, &layer->up, layer->is_gated ? 2 : 1, model->inputs, rows, piece, &result);
            break;
        case DOWN:
            result = onto_residual(model, phase, stores_mlp(layer));
            tile(model, &layer->down, 1, model->activated, rows, piece, &result);
            break;
        default: run_rows(model, phase, piece); break;
        }
    }
}

/* ---- A step ---- */

static int make_room(struct kvpool_model *model) {
    const struct kvpool_step *step = &model->step;
    int64_t tokens = step->num_tokens, hidden = model->sizes.hidden;
    if (tokens > model->token_room) {
        model->token_room = 0;
        if (grow(&model->context, tokens * sizeof(int32_t)) ||
            grow(&model->wanted, tokens * sizeof(int32_t)) || grow(&model->place, tokens * sizeof(int32_t)) ||
            grow(&model->order, 2 * (model->sizes.num_groups + 1) * tokens * sizeof(int32_t)) || grow(&model->num_slots, tokens * sizeof(int32_t)) ||
            grow(&model->first_slot, tokens * sizeof(int64_t)) || grow(&model->residual, tokens * hidden * sizeof(float)) ||
            (model->sizes.stores_products && grow(&model->stored, tokens * hidden * sizeof(float))) ||
            grow(&model->inputs, tokens * hidden * sizeof(number)) || grow(&model->qkv, tokens * model->widest_qkv * sizeof(float)) ||
            grow(&model->queries, tokens * model->widest_attended * sizeof(number)) ||
            grow(&model->attended, tokens * model->widest_attended * sizeof(number)) ||
            grow(&model->activated, tokens * model->widest_mlp * sizeof(number)))
            return -1;
        model->token_room = tokens;
    }
    if (step->num_parts > model->part_room) {
        model->part_room = 0;
        if (grow(&model->offsets, (step->num_parts + 1) * sizeof(int64_t)) ||
            grow(&model->prefix, model->sizes.num_groups * step->num_parts * sizeof(int32_t)))
            return -1;
        model->part_room = step->num_parts;
    }
    if (step->num_rows > model->row_room) {
        model->row_room = 0;
        if (grow(&model->selected, step->num_rows * hidden * sizeof(number))) return -1;
        model->row_room = step->num_rows;
    }
    int64_t rows = tokens > step->num_rows ? tokens : step->num_rows;
    if (model->sizes.head.scales && rows > model->quantized_room) {
        model->quantized_room = 0;
        if (grow(&model->quantized, rows * model->most_groups * GROUP) ||
            grow(&model->scales, rows * model->most_groups * sizeof(float)) ||
            grow(&model->offsets_of_groups, rows * model->most_groups * sizeof(int32_t)))
            return -1;
        model->quantized_room = rows;
    }
    return 0;
}

int kvpool_run(struct kvpool_model *model, const struct kvpool_step *step) {
    wait_for(model, &model->inside, 0, 1);
    model->step = *step;
    if (make_room(model) || find_wanted(model)) return KVPOOL_NO_MEMORY;
    int64_t tokens = 0;
    for (int64_t i = 0; i < step->num_parts; i++) {
        model->offsets[i] = tokens;
        for (int64_t j = 0; j < step->lengths[i]; j++, tokens++) model->context[tokens] = step->starts[i] + j + 1;
    }
    model->offsets[step->num_parts] = tokens;
    if (plan_attention(model)) return KVPOOL_NO_MEMORY;
    for (int64_t phase = 0; phase < model->num_phases; phase++) {
        model->num_pieces[phase] = pieces_of(model, phase);
        atomic_store_explicit(&model->phases[phase].next, 0, memory_order_relaxed);
        atomic_store_explicit(&model->phases[phase].done, 0, memory_order_relaxed);
    }
    atomic_store(&model->is_open, 1);
    atomic_fetch_add(&model->go, 1);
    announce(model);
    walk(model, 1);
    atomic_store(&model->is_open, 0);
    release_tiles();
    return 0;
}

/* ---- Open and close ---- */

static int find_kinds(struct kvpool_model *model) {
    int64_t count = model->sizes.num_layers;
    model->kinds = calloc(count + 1, sizeof *model->kinds);
    model->kind_of_layer = calloc(count, sizeof *model->kind_of_layer);
    if (!model->kinds || !model->kind_of_layer) return -1;
    for (int64_t i = 0; i < count; i++) {
        const struct kvpool_layer *layer = &model->layers[i];
        int64_t k = 0;
        while (k < model->num_kinds && (model->kinds[k].heads != layer->heads || model->kinds[k].kv_heads != layer->kv_heads ||
                                        model->kinds[k].window != layer->window || model->kinds[k].group != layer->group))
            k++;
        if (k == model->num_kinds) {
            model->kinds[k] = (struct kind){
                .heads = layer->heads, .kv_heads = layer->kv_heads, .window = layer->window, .group = layer->group};
            model->num_kinds++;
        }
        model->kind_of_layer[i] = k;
        int64_t attended = layer->heads * layer->head_size;
        if (layer->qkv.n > model->widest_qkv) model->widest_qkv = layer->qkv.n;
        if (attended > model->widest_attended) model->widest_attended = attended;
        if (layer->down.k > model->widest_mlp) model->widest_mlp = layer->down.k;
        if (layer->head_size > model->widest_head) model->widest_head = layer->head_size;
        const struct kvpool_linear *linears[] = {&layer->qkv, &layer->out, &layer->up, &layer->down, &model->sizes.head};
        for (int j = 0; j < 5; j++)
            if (groups_of(linears[j]) > model->most_groups) model->most_groups = groups_of(linears[j]);
        if (stores_attention(layer) || stores_mlp(layer)) model->sizes.stores_products = 1;
    }
    return 0;
}

static _Thread_local char problem[200];

const char *kvpool_problem(void) { return problem; }

struct kvpool_model *kvpool_open(const struct kvpool_sizes *sizes, const struct kvpool_layer *layers, int64_t num_threads) {
    snprintf(problem, sizeof problem, "there is no memory: see ulimit -v");
    struct kvpool_model *model = aligned_alloc(64, (sizeof *model + 63) / 64 * 64);
    if (!model) return NULL;
    memset(model, 0, sizeof *model);
    model->sizes = *sizes;
    model->num_threads = num_threads;
    model->num_phases = PHASES_AROUND + PHASES_PER_LAYER * sizes->num_layers;
    model->layers = malloc(sizes->num_layers * sizeof *layers);
    model->num_pieces = malloc(model->num_phases * sizeof *model->num_pieces);
    model->phases = aligned_alloc(64, model->num_phases * sizeof *model->phases);
    model->threads = malloc(num_threads * sizeof *model->threads);
    if (!model->layers || !model->num_pieces || !model->phases || !model->threads) goto failed;
    memcpy(model->layers, layers, sizes->num_layers * sizeof *layers);
    if (find_kinds(model)) goto failed;
    int error = request_tiles();
    if (error) {
        snprintf(problem, sizeof problem, "Linux does not give AMX's tile registers to this process: %s", strerror(error));
        goto failed;
    }
    for (; model->num_members < num_threads - 1; model->num_members++) {
        error = pthread_create(&model->threads[model->num_members], NULL, member, model);
        if (!error) continue;
        snprintf(problem, sizeof problem, "there is no thread %lld of %lld: see ulimit -u", (long long)model->num_members + 2,
                 (long long)num_threads);
        goto failed;
    }
    return model;
failed:
    kvpool_close(model);
    return NULL;
}

void kvpool_close(struct kvpool_model *model) {
    if (!model) return;
    atomic_store(&model->is_closing, 1);
    atomic_fetch_add(&model->go, 1);
    announce(model);
    for (int64_t i = 0; i < model->num_members; i++) pthread_join(model->threads[i], NULL);
    for (int64_t k = 0; model->kinds && k <= model->num_kinds; k++) free(model->kinds[k].items);
    void *owned[] = {model->layers,   model->kinds,   model->kind_of_layer, model->offsets,   model->context,
                     model->order,    model->wanted,  model->place,         model->wanted_residual,
                     model->num_slots, model->first_slot,  model->prefix,    model->num_pieces, model->residual,
                     model->stored,   model->inputs,  model->qkv,           model->queries,   model->attended, model->activated,
                     model->selected, model->quantized, model->scales, model->offsets_of_groups, model->slots,   model->phases,        model->threads,   model->times};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(model);
}

int64_t kvpool_num_phases(const struct kvpool_model *model) { return model->num_phases; }

/* Seconds of each phase of the last step, [phases], as the calling thread saw them. The first call turns the clock on. */
int kvpool_phase_seconds(struct kvpool_model *model, double *seconds) {
    if (!model->times) {
        model->times = calloc(model->num_phases + 1, sizeof *model->times);
        return model->times ? 0 : KVPOOL_NO_MEMORY;
    }
    for (int64_t i = 0; i < model->num_phases; i++)
        seconds[i] = (model->times[i + 1].tv_sec - model->times[i].tv_sec) + (model->times[i + 1].tv_nsec - model->times[i].tv_nsec) * 1e-9;
    return 0;
}

/* ---- Packing ---- */

/* Rows of a row-major weight [count][words] to the outputs from `first` on of a packed one. */
void kvpool_pack(void *packed, const void *rows, int64_t first, int64_t count, int64_t words) {
    const word *from = rows;
    for (int64_t n = 0; n < count;) { /* the rows of one vector together: written in order, read in W streams */
        int64_t lane = (first + n) % W, here = W - lane < count - n ? W - lane : count - n;
        word *to = (word *)packed + (first + n) / W * words * W + lane;
        for (int64_t i = 0; i < words; i++)
            for (int64_t r = 0; r < here; r++) to[i * W + r] = from[(n + r) * words + i];
        n += here;
    }
}

void kvpool_describe_build(struct kvpool_build *build) {
    *build = (struct kvpool_build){
        .words_per_vector = W,
        .numbers_per_word = P,
        .rows_per_pass = ROWS,
        .max_head_size = MAX_HEAD,
        .sizes_bytes = sizeof(struct kvpool_sizes),
        .layer_bytes = sizeof(struct kvpool_layer),
        .group_bytes = sizeof(struct kvpool_group),
        .step_bytes = sizeof(struct kvpool_step),
        .has_tiles = HAS_TILES,
    };
}
