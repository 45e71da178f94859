/* One step of SGD with momentum over rows of one tensor, in stages. Order of operations: torch.optim.SGD. */
#ifndef ZEROSHARD_SGD_H
#define ZEROSHARD_SGD_H

#include "stage.h"

struct sgd {
    int64_t count;
    float *master;        /* or NULL: the master is weight + remainder */
    int16_t *remainder;
    float *momentum;      /* the buffer, or NULL */
    const void *grad;
    void *weight;
    int32_t grad_kind, weight_kind;
    int32_t first;        /* the buffer holds nothing yet: it becomes the gradient */
    int32_t nesterov;
    int32_t decays;
    float grad_scale, stride, inertia, gain, decay;
    const struct sgd *taken; /* the numbers of a step that is taken back first, or NULL */
    const float *size;    /* nothing is updated unless it is `most` or less, or it is NULL */
    float most;
};

INLINE void sgd_momentum(const struct sgd *a, float *RESTRICT g, float *RESTRICT buffer, int64_t n) {
    const float inertia = a->inertia, gain = a->gain;
    if (a->first) for (int64_t i = 0; i < n; i++) buffer[i] = g[i];
    else for (int64_t i = 0; i < n; i++) buffer[i] = buffer[i] * inertia + gain * g[i];
    if (a->nesterov) for (int64_t i = 0; i < n; i++) g[i] = g[i] + inertia * buffer[i];
    else for (int64_t i = 0; i < n; i++) g[i] = buffer[i];
}

/* [Note: taking back] in adam.h. p' = p + stride * d, with d linear in the gradient and, where weights decay,
 * in p: solved for p first. */
INLINE void sgd_back(const struct sgd *a, float *RESTRICT p, float *RESTRICT buffer, const float *RESTRICT g,
                     int64_t n) {
    const double stride = a->stride, inertia = a->inertia, gain = a->gain, decay = a->decays ? a->decay : 0.0;
    const int direct = !buffer || a->nesterov;
    for (int64_t i = 0; i < n; i++) {
        const double grad = g[i], ran = buffer ? buffer[i] : 0.0;
        const double before = direct ? (p[i] - stride * (grad + inertia * ran)) / (1.0 + stride * decay)
                                     : p[i] - stride * ran;
        p[i] = (float)before;
        if (buffer) buffer[i] = a->first ? 0.0f : (float)((ran - gain * (grad + decay * before)) / inertia);
    }
}

INLINE void sgd_pass(const struct sgd *a, const int updates) {
    ALIGNED float g[BLOCK], p[BLOCK];
    const float decay = a->decay, stride = a->stride;
    for (int64_t start = 0; start < a->count; start += BLOCK) {
        const int64_t n = a->count - start < BLOCK ? a->count - start : BLOCK;
        const void *grad = at(a->grad, a->grad_kind, start);
        open_master(p, a->master, a->weight, a->remainder, start, n);
        if (a->taken) {
            widen(g, a->grad_kind, grad, n, a->taken->grad_scale);
            sgd_back(a->taken, p, a->momentum ? a->momentum + start : 0, g, n);
        }
        if (updates) {
            widen(g, a->grad_kind, grad, n, a->grad_scale);
            if (a->decays) for (int64_t i = 0; i < n; i++) g[i] = g[i] + p[i] * decay;
            if (a->momentum) sgd_momentum(a, g, a->momentum + start, n);
            for (int64_t i = 0; i < n; i++) p[i] = p[i] + stride * g[i];
        }
        close_master(p, a->master, a->weight, a->remainder, a->weight_kind, start, n);
    }
}

INLINE void sgd_body(struct sgd *a) { sgd_pass(a, !too_large(a->size, a->most)); }
INLINE void sgd_back_body(struct sgd *a) { sgd_pass(a, 0); }

#endif
