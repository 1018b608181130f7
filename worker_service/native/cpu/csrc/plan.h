/* Which tokens of a step are wanted, and the items of its attention. */
#ifndef KVPOOL_PLAN_H
#define KVPOOL_PLAN_H

#include <stdlib.h>
#include <string.h>

#include "state.h"

#define MANY_ITEMS 8   /* attention items per thread that need no splitting */

/* The tokens whose logits are wanted, each once, and room for their residuals if they are not all. */
static int find_wanted(struct kvpool_model *model) {
    const struct kvpool_step *step = &model->step;
    for (int64_t t = 0; t < step->num_tokens; t++) model->place[t] = -1;
    for (int64_t i = 0; i < step->num_rows; i++) model->place[step->rows[i]] = 0;
    model->num_wanted = 0;
    for (int64_t t = 0; t < step->num_tokens; t++) {
        if (model->place[t] < 0) continue;
        model->place[t] = model->num_wanted;
        model->wanted[model->num_wanted++] = t;
    }
    if (model->num_wanted == step->num_tokens) {
        model->last_residual = model->residual;
        return 0;
    }
    if (model->num_wanted > model->wanted_room) {
        model->wanted_room = 0;
        if (grow(&model->wanted_residual, model->num_wanted * model->sizes.hidden * sizeof(float))) return -1;
        model->wanted_room = model->num_wanted;
    }
    model->last_residual = model->wanted_residual;
    return 0;
}

static int add_item(struct kind *kind, struct item item) {
    if (kind->num_items == kind->room) {
        int64_t room = kind->room ? 2 * kind->room : 64;
        struct item *items = realloc(kind->items, room * sizeof *items);
        if (!items) return -1;
        kind->items = items;
        kind->room = room;
    }
    kind->items[kind->num_items++] = item;
    return 0;
}

/* Items of `count` rows from `order` on; the last first, which see most. With `split` one per partition, from slot `slot` on. */
static int add_items(struct kind *kind, struct item item, int64_t count, int split) {
    int64_t passes = (count + ROWS - 1) / ROWS;
    struct item one = item;
    for (int64_t pass = passes - 1; pass >= 0; pass--) {
        one.first_row = count * pass / passes;
        one.num_rows = count * (pass + 1) / passes - one.first_row;
        if (!split) {
            if (add_item(kind, one)) return -1;
            continue;
        }
        for (int64_t p = item.first; p < item.end; p++) {
            one.first = p;
            one.end = p + 1;
            one.slot = item.slot + (p - item.first);
            if (add_item(kind, one)) return -1;
        }
    }
    return 0;
}

static int64_t partitions(int64_t keys) { return (keys + PARTITION - 1) / PARTITION; }

/* The first partition that the first token of a part sees. */
static int64_t first_partition(const struct kind *kind, int64_t start) {
    return kind->window && start + 1 > kind->window ? (start + 1 - kind->window) / PARTITION : 0;
}

static int is_short(const struct kind *kind, int64_t length) { return length * (kind->heads / kind->kv_heads) <= SHORT_ROWS; }

/* Tokens of a part go to `order` at `at`, all of them or the wanted ones. Returns the place after the last one. */
static int64_t add_tokens(struct kvpool_model *model, int64_t part, int only_wanted, int64_t at) {
    for (int64_t t = model->offsets[part]; t < model->offsets[part + 1]; t++)
        if (!only_wanted || model->place[t] >= 0) model->order[at++] = t;
    return at;
}

/* Partitions of a part that are attended together with others, [N]. */
static int32_t *prefixes_of(const struct kvpool_model *model, int64_t group) { return model->prefix + group * model->step.num_parts; }

/* A part that has a prefix in one group has slots in all. */
static int has_slots(const struct kvpool_model *model, int64_t part, int split) {
    for (int64_t g = 0; g < model->sizes.num_groups; g++)
        if (prefixes_of(model, g)[part]) return 1;
    return split && partitions(model->step.starts[part] + model->step.lengths[part]) > 1;
}

/* The items of some kinds, for all tokens or for the wanted ones. */
static int plan_kinds(struct kvpool_model *model, int64_t first_kind, int64_t end_kind, int only_wanted, int split) {
    const struct kvpool_step *step = &model->step;
    int64_t num_groups = model->sizes.num_groups, tokens = only_wanted ? (num_groups + 1) * step->num_tokens : 0;
    int64_t by_part = tokens + num_groups * step->num_tokens;
    for (int64_t k = first_kind; k < end_kind; k++) model->kinds[k].num_items = 0;
    /* Prefixes: their whole partitions are attended once for the tokens of all members. */
    for (int64_t g = 0; g < num_groups; g++) {
        const struct kvpool_group *group = &step->groups[g];
        for (int64_t p = 0, member = 0; p < group->num_prefixes; p++) {
            int64_t end = group->prefix_ends[p], leader = group->prefix_parts[member], first = tokens;
            int64_t shared = prefixes_of(model, g)[leader];
            for (; member < end; member++)
                if (shared) tokens = add_tokens(model, group->prefix_parts[member], only_wanted, tokens);
            for (int64_t k = first_kind; k < end_kind && shared; k++) {
                struct kind *kind = &model->kinds[k];
                struct item item = {.order = first, .part = leader, .first = 0, .end = shared, .slot = 0};
                if (kind->group == g && add_items(kind, item, (tokens - first) * (kind->heads / kind->kv_heads), 1)) return -1;
            }
        }
    }
    for (int64_t i = 0; i < step->num_parts; i++) {
        int64_t first = by_part, end = partitions(step->starts[i] + step->lengths[i]);
        int into_slots = has_slots(model, i, split);
        by_part = add_tokens(model, i, only_wanted, by_part);
        for (int64_t k = first_kind; k < end_kind && by_part > first; k++) {
            struct kind *kind = &model->kinds[k];
            int64_t seen = first_partition(kind, model->context[model->order[first]] - 1), shared = prefixes_of(model, kind->group)[i];
            if (seen < shared) seen = shared;
            struct item item = {.order = first, .part = i, .first = seen, .end = end, .slot = into_slots ? seen : -1};
            if (add_items(kind, item, (by_part - first) * (kind->heads / kind->kv_heads), into_slots)) return -1;
        }
    }
    return 0;
}

/* Which parts of the step attend with which others, and into how many slots. The kinds' heads differ, so the slots are those of the
 * kind that needs most: alike for all, because the number of slots of a token depends on its length and the prefixes only. */
static int plan_attention(struct kvpool_model *model) {
    const struct kvpool_step *step = &model->step;
    int64_t num_items = 0, most_heads = 0, num_slots = 0, last = model->num_kinds;
    int all_short = 1;
    for (int64_t k = 0; k < model->num_kinds; k++)
        if (model->kinds[k].heads > most_heads) most_heads = model->kinds[k].heads;
    for (int64_t i = 0; i < step->num_parts; i++) {
        const struct kind *kind = &model->kinds[0];
        num_items += (step->lengths[i] * (kind->heads / kind->kv_heads) + ROWS - 1) / ROWS * kind->kv_heads;
        for (int64_t k = 0; k < model->num_kinds; k++) all_short &= is_short(&model->kinds[k], step->lengths[i]);
    }
    int split = all_short && num_items < MANY_ITEMS * model->num_threads && model->num_threads > 1;
    memset(model->prefix, 0, model->sizes.num_groups * step->num_parts * sizeof *model->prefix);
    for (int64_t g = 0; g < model->sizes.num_groups; g++) {
        const struct kvpool_group *group = &step->groups[g];
        for (int64_t p = 0, member = 0; p < group->num_prefixes; p++)
            for (; member < group->prefix_ends[p]; member++)
                prefixes_of(model, g)[group->prefix_parts[member]] = group->prefix_blocks[p] * model->sizes.block_size / PARTITION;
    }
    for (int64_t i = 0; i < step->num_parts; i++) {
        int64_t end = has_slots(model, i, split) ? partitions(step->starts[i] + step->lengths[i]) : 0;
        for (int64_t t = model->offsets[i]; t < model->offsets[i + 1]; t++) {
            model->num_slots[t] = end;
            model->first_slot[t] = num_slots;
            num_slots += end * most_heads;
        }
    }
    if (plan_kinds(model, 0, model->num_kinds, 0, split)) return -1;
    if (model->num_wanted < step->num_tokens) {
        const struct kind *kind = &model->kinds[model->kind_of_layer[model->sizes.num_layers - 1]];
        model->kinds[last].heads = kind->heads;
        model->kinds[last].kv_heads = kind->kv_heads;
        model->kinds[last].window = kind->window;
        model->kinds[last].group = kind->group;
        if (plan_kinds(model, last, last + 1, 1, split)) return -1;
    }
    if (num_slots > model->slot_room) {
        model->slot_room = 0;
        if (grow(&model->slots, num_slots * (model->widest_head + 2) * sizeof(float))) return -1;
        model->slot_room = num_slots;
    }
    return 0;
}

#endif
