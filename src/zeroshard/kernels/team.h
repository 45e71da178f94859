/* Threads that share an update out among themselves, so that Python hands over a whole part and not each
 * share of it: a share costs a lock here, and about 100 microseconds of the interpreter there, which the
 * thread that launches kernels has to wait for. For the same reason the caller's thread can fetch the gradient
 * before the update and send the weights back behind it, without coming back to Python in between. Included
 * where the kernels are defined. */
#ifndef ZEROSHARD_TEAM_H
#define ZEROSHARD_TEAM_H

#include <pthread.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

typedef void (*update_kernel)(void *record);

struct work {             /* one update; lives on the stack of the thread that waits for it */
    const struct update *record;
    update_kernel kernel;
    int64_t count, share; /* elements, and how many are taken at a time */
    int64_t next, left;   /* the first that nobody has taken; how many are not done */
    struct work *after;
};

struct team {
    pthread_mutex_t lock;
    pthread_cond_t come, done;
    struct work *first;   /* of those with elements that nobody has taken, oldest first */
    int closing;
    int32_t size;
    pthread_t threads[];
};

struct device {           /* functions of CUDA's runtime, which Python has looked up; each returns 0 or an error */
    int (*copy)(void *to, const void *from, size_t bytes, int kind, void *stream);
    int (*record)(void *event, void *stream);
    int (*follow)(void *stream, void *event, unsigned flags);
    int (*wait)(void *event);
    int (*query)(void *event);
    int (*use)(int number);
};

enum { ANY_WAY = 4, NOT_READY = 600 }; /* cudaMemcpyDefault: the addresses say which way; cudaErrorNotReady */

struct copies {
    int64_t count;
    void **to;
    const void **from;
    const int64_t *bytes;
};

struct errand {           /* team: what Python asks for */
    struct team *team;
    struct update *record;
    update_kernel kernel;
    int64_t share;
    const struct device *device; /* none: the copies are within the CPU's memory, and the rest means nothing */
    struct copies out, back;     /* before the update, and after it */
    void *leaving, *coming;      /* streams of the two */
    void *landed;                /* event from when on there is something to fetch */
    void *arrived, *ready;       /* events to record behind the two */
    int32_t error;               /* of the device */
};

/* The pointer `elements` further on, for elements of `bytes`; nothing stays nothing. */
static void *further(void *pointer, int64_t elements, int64_t bytes) {
    return pointer ? (char *)pointer + elements * bytes : 0;
}

static int64_t bytes_of(int32_t kind) { return kind == F32 ? 4 : kind == F64 ? 8 : 2; }

enum { RECORD_BYTES = 512 };  /* bytes of a record */

/* A share of 8-bit moments begins with a block. `taken` is read for its numbers alone, which are those of
 * all shares. */
static void run_share(const struct work *work, int64_t start, int64_t count) {
    union { struct update rows; char bytes[RECORD_BYTES]; } some;
    memcpy(&some, work->record, (size_t)work->record->bytes);
    struct update *rows = &some.rows;
    rows->count = count;
    rows->master = further(rows->master, start, 4);
    rows->remainder = further(rows->remainder, start, 2);
    for (int i = 0; i < STATES; i++) rows->states[i] = further(rows->states[i], start, rows->width);
    rows->scales = further(rows->scales, start / BLOCK * 3, 4);
    rows->grad = further((void *)rows->grad, start, bytes_of(rows->grad_kind));
    rows->weight = further(rows->weight, start, bytes_of(rows->weight_kind));
    work->kernel(&some);
}

static void *team_member(void *given) {
    struct team *team = given;
#if defined(__linux__)
    prctl(PR_SET_NAME, "zeroshard-team"); /* for those who look at threads from outside */
#endif
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (!team->first && !team->closing) pthread_cond_wait(&team->come, &team->lock);
        struct work *work = team->first;
        if (!work) break;
        const int64_t start = work->next, rest = work->count - start;
        const int64_t count = rest < work->share ? rest : work->share;
        work->next += count;
        if (work->next == work->count) team->first = work->after;
        pthread_mutex_unlock(&team->lock);
        run_share(work, start, count);
        pthread_mutex_lock(&team->lock);
        work->left -= count;
        if (!work->left) pthread_cond_broadcast(&team->done);
    }
    pthread_mutex_unlock(&team->lock);
    return 0;
}

/* Ends the members that there are, after what they have begun. Nobody may wait for the team any more. */
static void team_end(struct team *team) {
    pthread_mutex_lock(&team->lock);
    team->closing = 1;
    pthread_cond_broadcast(&team->come);
    pthread_mutex_unlock(&team->lock);
    for (int32_t i = 0; i < team->size; i++) pthread_join(team->threads[i], 0);
    pthread_cond_destroy(&team->come);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

/* NULL where the system gives no such many threads. */
EXPORT void *zs_team_open(int32_t size) {
    struct team *team = calloc(1, sizeof *team + (size_t)size * sizeof(pthread_t));
    if (!team) return 0;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->come, 0);
    pthread_cond_init(&team->done, 0);
    for (; team->size < size; team->size++)
        if (pthread_create(&team->threads[team->size], 0, team_member, team)) {
            team_end(team);
            return 0;
        }
    return team;
}

EXPORT void zs_team_close(void *team) { team_end(team); }

static int run_copies(const struct device *device, const struct copies *copies, void *stream) {
    for (int64_t i = 0; i < copies->count; i++) {
        const size_t bytes = (size_t)copies->bytes[i];
        if (!device) memcpy(copies->to[i], copies->from[i], bytes);
        else {
            const int error = device->copy(copies->to[i], copies->from[i], bytes, ANY_WAY, stream);
            if (error) return error;
        }
    }
    return 0;
}

/* Returns when what was fetched is here. */
static int fetch(const struct errand *e) {
    int error = 0;
    if (e->device && e->landed) error = e->device->follow(e->leaving, e->landed, 0);
    if (!error) error = run_copies(e->device, &e->out, e->leaving);
    if (!error && e->device) error = e->device->record(e->arrived, e->leaving);
    if (!error && e->device) error = e->device->wait(e->arrived);
    return error;
}

/* Returns when all is on its way. */
static int send(const struct errand *e) {
    int error = run_copies(e->device, &e->back, e->coming);
    if (!error && e->device) error = e->device->record(e->ready, e->coming);
    return error;
}

static void team_update(struct team *team, const struct errand *errand) {
    struct work work = {errand->record, errand->kernel, 0, errand->share, 0, 0, 0};
    work.count = work.left = errand->record->count;
    if (work.count <= 0) return;
    pthread_mutex_lock(&team->lock);
    struct work **last = &team->first;
    while (*last) last = &(*last)->after;
    *last = &work;
    pthread_cond_broadcast(&team->come);
    while (work.left) pthread_cond_wait(&team->done, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

/* Returns when the update is done. Several threads may ask at once; the first to ask is served first. */
EXPORT void zs_team(struct errand *errand) {
    if (errand->out.count && (errand->error = fetch(errand))) return;
    team_update(errand->team, errand);
    if (errand->back.count) errand->error = send(errand);
}

#endif
