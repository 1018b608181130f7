/* The items of a step's attention. */
#ifndef KVPOOL_PLAN_H
#define KVPOOL_PLAN_H

#include <stdlib.h>

#include "state.h"

#define MANY_ITEMS 8   /* attention items per thread that need no splitting */

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

/* Which parts of the step attend with which others, and into how many slots. The kinds' heads differ, so the slots are those of the
 * kind that needs most: alike for all, because the number of slots of a token depends on its length and the prefix only. */
static int plan_attention(struct kvpool_model *model) {
    const struct kvpool_step *step = &model->step;
    int64_t num_items = 0, most_heads = 0, num_slots = 0;
    int all_short = 1;
    for (int64_t k = 0; k < model->num_kinds; k++) {
        model->kinds[k].num_items = 0;
        if (model->kinds[k].heads > most_heads) most_heads = model->kinds[k].heads;
    }
    for (int64_t i = 0; i < step->num_parts; i++) {
        const struct kind *kind = &model->kinds[0];
        model->prefix[i] = 0;
        num_items += (step->lengths[i] * (kind->heads / kind->kv_heads) + ROWS - 1) / ROWS * kind->kv_heads;
        for (int64_t k = 0; k < model->num_kinds; k++) all_short &= is_short(&model->kinds[k], step->lengths[i]);
    }
    int split = all_short && num_items < MANY_ITEMS * model->num_threads && model->num_threads > 1;
    /* Prefixes: their whole partitions are attended once for the tokens of all members. */
    int64_t member = 0, tokens = 0;
    for (int64_t g = 0; g < step->num_prefixes; g++) {
        int64_t end = step->prefix_ends[g], shared = step->prefix_blocks[g] * model->sizes.block_size / PARTITION;
        int64_t first_token = tokens;
        for (int64_t i = member; i < end && shared; i++) {
            int64_t part = step->prefix_parts[i];
            model->prefix[part] = shared;
            for (int64_t t = model->offsets[part]; t < model->offsets[part + 1]; t++) model->order[tokens++] = t;
        }
        for (int64_t k = 0; k < model->num_kinds && shared; k++) {
            struct kind *kind = &model->kinds[k];
            struct item item = {.order = first_token, .part = step->prefix_parts[member], .first = 0, .end = shared, .slot = 0};
            if (add_items(kind, item, (tokens - first_token) * (kind->heads / kind->kv_heads), 1)) return -1;
        }
        member = end;
    }
    for (int64_t i = 0; i < step->num_parts; i++) {
        int64_t start = step->starts[i], length = step->lengths[i], shared = model->prefix[i];
        int64_t end = partitions(start + length);
        int into_slots = shared || (split && end > 1);
        for (int64_t t = model->offsets[i]; t < model->offsets[i + 1]; t++) {
            model->num_slots[t] = into_slots ? end : 0;
            model->first_slot[t] = num_slots;
            num_slots += model->num_slots[t] * most_heads;
        }
        for (int64_t k = 0; k < model->num_kinds; k++) {
            struct kind *kind = &model->kinds[k];
            int64_t first = into_slots ? shared : first_partition(kind, start);
            struct item item = {
                .order = step->num_tokens + model->offsets[i], .part = i, .first = first, .end = end, .slot = into_slots ? shared : -1};
            if (add_items(kind, item, length * (kind->heads / kind->kv_heads), into_slots)) return -1;
        }
    }
    if (num_slots > model->slot_room) {
        model->slot_room = 0;
        if (grow(&model->slots, num_slots * (model->widest_head + 2) * sizeof(float))) return -1;
        model->slot_room = num_slots;
    }
    return 0;
}

#endif
