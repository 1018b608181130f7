/* The team of threads that runs a step.
 *
 * The caller publishes a step and is a member itself. It returns when all pieces are done, even if a thread never came; a late
 * thread finds no piece. What it reads until then (num_pieces, phases, sizes) is written only while nobody is inside. Two pairs
 * need sequential consistency: is_open = 0 then reading `inside`, against inside++ then reading is_open; and done++ then reading
 * `sleepers`, against sleepers++ then reading `done`.
 */
#ifndef KVPOOL_TEAM_H
#define KVPOOL_TEAM_H

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"
#include "tiles.h"

#define SPIN_NANOSECONDS 20000

#ifdef KVPOOL_TEST_DELAY /* the name of a function with which tests let threads come late */
void KVPOOL_TEST_DELAY(int point);
#define LATE(point) KVPOOL_TEST_DELAY(point)
#else
#define LATE(point) ((void)0)
#endif

/* One piece of a phase; in step.c. */
static void run_piece(struct kvpool_model *model, int64_t phase, int64_t piece);

static void announce(struct kvpool_model *model) {
    if (atomic_load(&model->sleepers)) {
        atomic_fetch_add(&model->tick, 1);
        syscall(SYS_futex, &model->tick, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
}

static void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Until the number at `at` is `value`, or is not if `is_equal` is 0. Spins first: most waits are shorter than a sleep. */
static void wait_for(struct kvpool_model *model, atomic_llong *at, int64_t value, int is_equal) {
    int64_t until = 0;
    for (int turn = 0;; turn++) {
        if ((atomic_load(at) == value) == is_equal) return;
        rest();
        if (turn % 64 == 63) {
            int64_t now = nanoseconds();
            if (!until) until = now + SPIN_NANOSECONDS;
            if (now >= until) break;
        }
    }
    release_tiles();
    atomic_fetch_add(&model->sleepers, 1);
    for (;;) {
        int seen = atomic_load(&model->tick);
        if ((atomic_load(at) == value) == is_equal) break;
        syscall(SYS_futex, &model->tick, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&model->sleepers, 1);
}

static void walk(struct kvpool_model *model, int is_caller) {
    for (int64_t phase = 0; phase < model->num_phases; phase++) {
        struct phase *now = &model->phases[phase];
        int64_t num_pieces = model->num_pieces[phase];
        if (is_caller && model->times) clock_gettime(CLOCK_MONOTONIC, &model->times[phase]);
        while (atomic_load_explicit(&now->next, memory_order_relaxed) < num_pieces) {
            int64_t piece = atomic_fetch_add(&now->next, 1);
            if (piece >= num_pieces) break;
            LATE(0);
            run_piece(model, phase, piece);
            if (atomic_fetch_add(&now->done, 1) + 1 == num_pieces) announce(model);
        }
        wait_for(model, &now->done, num_pieces, 1);
    }
    if (is_caller && model->times) clock_gettime(CLOCK_MONOTONIC, &model->times[model->num_phases]);
}

static void *member(void *argument) {
    struct kvpool_model *model = argument;
    int64_t seen = 0;
    for (;;) {
        wait_for(model, &model->go, seen, 0);
        seen = atomic_load(&model->go);
        if (atomic_load(&model->is_closing)) return NULL;
        LATE(1);
        atomic_fetch_add(&model->inside, 1);
        LATE(2);
        if (atomic_load(&model->is_open)) {
            LATE(3);
            walk(model, 0);
        }
        if (atomic_fetch_sub(&model->inside, 1) == 1) announce(model);
    }
}

#endif
