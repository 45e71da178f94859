/* What the kernels that update an optimizer's state have in common. Each is a file of this folder, compiled by
 * itself: a struct that begins with `struct update` and goes on with its numbers, in the order in which its
 * Python class names them; a body, and `DEFINE(name, struct)`. One that can be taken back has a second body. */
#ifndef ZEROSHARD_UPDATE_H
#define ZEROSHARD_UPDATE_H

#include "../dispatch.h"
#include "../stage.h"

enum { STATES = 3 };

struct update {
    int64_t count, bytes;  /* elements; the length of the whole record */
    float *master;         /* or NULL: the master is weight + remainder */
    int16_t *remainder;    /* with weight_kind SPLIT */
    void *states[STATES];  /* arrays beside the master, in the order in which Python names them, or NULL */
    float *scales;         /* of 8-bit moments, or NULL */
    const void *grad;
    void *weight;
    const void *taken;     /* a record with the numbers of a step that is taken back first, or NULL */
    const float *size;     /* nothing is updated unless it is `most` or less, or it is NULL */
    float most;
    int32_t grad_kind, weight_kind;
    int32_t width;         /* bytes of an element of the states */
};

/* Whether the step is left out, as the gradient is over the bound. */
INLINE int left_out(const struct update *rows) { return too_large(rows->size, rows->most); }

/* Rows start .. start + n of the master, and of the gradient times `scale`, into stages. */
INLINE void open_rows(const struct update *rows, float *p, int64_t start, int64_t n) {
    open_master(p, rows->master, rows->weight, rows->remainder, start, n);
}

INLINE void open_grad(const struct update *rows, float *g, float scale, int64_t start, int64_t n) {
    widen(g, rows->grad_kind, at(rows->grad, rows->grad_kind, start), n, scale);
}

/* The stage back into the master, and into the weight. */
INLINE void close_rows(const struct update *rows, const float *p, int64_t start, int64_t n) {
    close_master(p, rows->master, rows->weight, rows->remainder, rows->weight_kind, start, n);
}

#endif
