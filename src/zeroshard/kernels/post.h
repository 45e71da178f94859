/* Couriers: threads that carry parts from the device to the device and never ask for the interpreter. Each
 * takes a parcel up, finds staging memory for it, fetches the gradient, has the team update the state, and
 * sends the weights back. Included behind team.h. */
#ifndef ZEROSHARD_POST_H
#define ZEROSHARD_POST_H

#include "team.h"
#include <time.h>

enum { COURIERS = 4, SPANS = COURIERS + 1 };

struct parcel {           /* one part's updates; Python's, and left alone as soon as it is `done` */
    struct errand *errands;
    int64_t count;
    char *place;          /* where its staging memory was taken to begin when addresses were written down */
    int64_t bytes;        /* of staging memory */
    int64_t turn;         /* as which of all parts forward asks for it */
    struct parcel *after;
    int32_t done, error;
};

struct span { int64_t start, stop; };

struct post {
    pthread_mutex_t lock;
    pthread_cond_t come, room, done; /* for couriers: a parcel; staging memory. For the others: any progress */
    struct team *team;
    const struct device *device;
    char *memory;
    struct span free[SPANS]; /* staging memory that nobody uses, in order */
    int32_t spans;
    int32_t number;       /* of the device */
    struct parcel *first; /* of those that are due, oldest first */
    int32_t due;
    int32_t boarding;     /* a courier waits for the staging memory of what it has taken up */
    int32_t closing, error;
    int32_t size;
    pthread_t couriers[COURIERS];
};

/* -------------------------------------------------------------------- staging memory, with the lock held */

/* Of the first stretch that is long enough; -1: there is none. */
static int64_t span_take(struct post *post, int64_t bytes) {
    for (int32_t i = 0; i < post->spans; i++) {
        struct span *span = &post->free[i];
        if (span->stop - span->start < bytes) continue;
        const int64_t start = span->start;
        span->start += bytes;
        if (span->start == span->stop) {
            post->spans--;
            memmove(span, span + 1, (size_t)(post->spans - i) * sizeof *span);
        }
        return start;
    }
    return -1;
}

static void span_give(struct post *post, int64_t start, int64_t bytes) {
    const int64_t stop = start + bytes;
    int32_t i = 0;
    while (i < post->spans && post->free[i].start < start) i++;
    const int before = i > 0 && post->free[i - 1].stop == start;
    const int behind = i < post->spans && post->free[i].start == stop;
    if (before && behind) {
        post->free[i - 1].stop = post->free[i].stop;
        post->spans--;
        memmove(&post->free[i], &post->free[i + 1], (size_t)(post->spans - i) * sizeof *post->free);
    } else if (before) post->free[i - 1].stop = stop;
    else if (behind) post->free[i].start = start;
    else {
        memmove(&post->free[i + 1], &post->free[i], (size_t)(post->spans - i) * sizeof *post->free);
        post->free[i].start = start, post->free[i].stop = stop;
        post->spans++;
    }
}

/* -------------------------------------------------------------------- which is next, with the lock held */

static int is_there(const struct post *post, const struct parcel *parcel) {
    void *event = parcel->errands->landed;
    return !post->device || !event || post->device->query(event) != NOT_READY;
}

/* As `next_of` in offload/work.py: of those whose gradient is there, which are the oldest, the one that forward
 * asks for first, of several the newest; where none is there, the oldest. */
static struct parcel *pop_next(struct post *post) {
    struct parcel **best = &post->first;
    for (struct parcel **at = best; *at && is_there(post, *at); at = &(*at)->after)
        if ((*at)->turn <= (*best)->turn) best = at;
    struct parcel *taken = *best;
    *best = taken->after;
    post->due--;
    pthread_cond_broadcast(&post->done);
    return taken;
}

/* Waits. NULL: there will be none. */
static struct parcel *take_up(struct post *post) {
    while (!post->error && (post->boarding || !post->first)) {
        if (post->closing && !post->first) return 0;
        pthread_cond_wait(&post->come, &post->lock);
    }
    return post->error ? 0 : pop_next(post);
}

/* Who has taken a parcel up is served before the next, or large ones would wait for ever. -1: no more. */
static int64_t board(struct post *post, int64_t bytes) {
    int64_t start;
    post->boarding = 1;
    while ((start = span_take(post, bytes)) < 0 && !post->error) pthread_cond_wait(&post->room, &post->lock);
    post->boarding = 0;
    pthread_cond_broadcast(&post->come);
    return start;
}

/* -------------------------------------------------------------------- on the way, without the lock */

static void *moved(const void *address, const struct parcel *parcel, char *to) {
    const char *given = address;
    if (given < parcel->place || given >= parcel->place + parcel->bytes) return (void *)address;
    return to + (given - parcel->place);
}

/* What was written down for `place` holds for `to`, which is where a parcel that is sent again begins. */
static void move_in(struct parcel *parcel, char *to) {
    for (int64_t i = 0; i < parcel->count; i++) {
        struct errand *e = &parcel->errands[i];
        for (int64_t n = 0; n < e->out.count; n++) e->out.to[n] = moved(e->out.to[n], parcel, to);
        for (int64_t n = 0; n < e->back.count; n++) e->back.from[n] = moved(e->back.from[n], parcel, to);
        e->record->grad = moved(e->record->grad, parcel, to);
        e->record->weight = moved(e->record->weight, parcel, to);
    }
    parcel->place = to;
}

static int carry(struct post *post, struct parcel *parcel, char *to) {
    int error = 0;
    if (to != parcel->place) move_in(parcel, to);
    for (int64_t i = 0; i < parcel->count && !error; i++) {
        parcel->errands[i].team = post->team;
        zs_team(&parcel->errands[i]);
        error = parcel->errands[i].error;
    }
    return error;
}

static void *post_courier(void *given) {
    struct post *post = given;
    struct parcel *parcel;
#if defined(__linux__)
    prctl(PR_SET_NAME, "zeroshard-post");
#endif
    if (post->device) post->device->use(post->number);
    pthread_mutex_lock(&post->lock);
    while ((parcel = take_up(post))) {
        const int64_t bytes = parcel->bytes, start = board(post, bytes);
        if (start < 0) break;
        void *ready = parcel->errands[parcel->count - 1].ready;
        const int sent = parcel->errands[parcel->count - 1].back.count > 0;
        pthread_mutex_unlock(&post->lock);
        const int error = carry(post, parcel, post->memory + start);
        pthread_mutex_lock(&post->lock);
        parcel->error = error;
        if (error) post->error = error;
        __atomic_store_n(&parcel->done, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&post->done);
        if (error) {
            pthread_cond_broadcast(&post->come);
            pthread_cond_broadcast(&post->room);
        }
        if (post->device && sent && !error) { /* until then its staging memory is read */
            pthread_mutex_unlock(&post->lock);
            post->device->wait(ready);
            pthread_mutex_lock(&post->lock);
        }
        span_give(post, start, bytes);
        pthread_cond_broadcast(&post->room);
    }
    pthread_mutex_unlock(&post->lock);
    return 0;
}

/* -------------------------------------------------------------------- what Python asks for */

/* Ends the couriers, after what is due; nobody may wait any more. */
EXPORT void zs_post_close(struct post *post) {
    pthread_mutex_lock(&post->lock);
    post->closing = 1;
    pthread_cond_broadcast(&post->come);
    pthread_mutex_unlock(&post->lock);
    for (int32_t i = 0; i < post->size; i++) pthread_join(post->couriers[i], 0);
    pthread_cond_destroy(&post->come);
    pthread_cond_destroy(&post->room);
    pthread_cond_destroy(&post->done);
    pthread_mutex_destroy(&post->lock);
    free(post);
}

/* NULL where the system gives no such many threads. */
EXPORT void *zs_post_open(struct team *team, const struct device *device, int32_t number, char *memory,
                          int64_t bytes) {
    struct post *post = calloc(1, sizeof *post);
    if (!post) return 0;
    pthread_mutex_init(&post->lock, 0);
    pthread_cond_init(&post->come, 0);
    pthread_cond_init(&post->room, 0);
    pthread_cond_init(&post->done, 0);
    post->team = team, post->device = device, post->number = number, post->memory = memory;
    post->free[0].stop = bytes, post->spans = 1;
    for (; post->size < COURIERS; post->size++)
        if (pthread_create(&post->couriers[post->size], 0, post_courier, post)) {
            zs_post_close(post);
            return 0;
        }
    return post;
}

/* Makes a parcel due. With a `backlog` it waits while so many are, and does not if something failed. */
EXPORT void zs_post_send(struct post *post, struct parcel *parcel, int32_t backlog) {
    pthread_mutex_lock(&post->lock);
    while (backlog > 0 && post->due >= backlog && !post->error && !post->closing) pthread_cond_wait(&post->done, &post->lock);
    struct parcel **last = &post->first;
    while (*last) last = &(*last)->after;
    *last = parcel;
    post->due++;
    pthread_cond_signal(&post->come);
    pthread_mutex_unlock(&post->lock);
}

/* Waits so many milliseconds for a parcel to be done. Whether it is; never again, where something failed. */
EXPORT int32_t zs_post_wait(struct post *post, const struct parcel *parcel, int64_t milliseconds) {
    struct timespec end;
    if (__atomic_load_n(&parcel->done, __ATOMIC_ACQUIRE)) return 1;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += milliseconds % 1000 * 1000000;
    if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
    pthread_mutex_lock(&post->lock);
    while (!parcel->done && !post->error)
        if (pthread_cond_timedwait(&post->done, &post->lock, &end)) break;
    const int32_t done = parcel->done;
    pthread_mutex_unlock(&post->lock);
    return done;
}

/* The first error of the device, or 0. */
EXPORT int32_t zs_post_error(struct post *post) {
    pthread_mutex_lock(&post->lock);
    const int32_t error = post->error;
    pthread_mutex_unlock(&post->lock);
    return error;
}

/* Forgets what is due and not taken up. */
EXPORT void zs_post_drop(struct post *post) {
    pthread_mutex_lock(&post->lock);
    post->first = 0, post->due = 0;
    pthread_cond_broadcast(&post->done);
    pthread_mutex_unlock(&post->lock);
}

#endif
