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
};

INLINE void sgd_momentum(const struct sgd *a, float *RESTRICT g, float *RESTRICT buffer, int64_t n) {
    const float inertia = a->inertia, gain = a->gain;
    if (a->first) for (int64_t i = 0; i < n; i++) buffer[i] = g[i];
    else for (int64_t i = 0; i < n; i++) buffer[i] = buffer[i] * inertia + gain * g[i];
    if (a->nesterov) for (int64_t i = 0; i < n; i++) g[i] = g[i] + inertia * buffer[i];
    else for (int64_t i = 0; i < n; i++) g[i] = buffer[i];
}

INLINE void sgd_body(struct sgd *a) {
    ALIGNED float g[BLOCK], p[BLOCK];
    const float decay = a->decay, stride = a->stride;
    for (int64_t start = 0; start < a->count; start += BLOCK) {
        const int64_t n = a->count - start < BLOCK ? a->count - start : BLOCK;
        widen(g, a->grad_kind, at(a->grad, a->grad_kind, start), n, a->grad_scale);
        open_master(p, a->master, a->weight, a->remainder, start, n);
        if (a->decays) for (int64_t i = 0; i < n; i++) g[i] = g[i] + p[i] * decay;
        if (a->momentum) sgd_momentum(a, g, a->momentum + start, n);
        for (int64_t i = 0; i < n; i++) p[i] = p[i] + stride * g[i];
        close_master(p, a->master, a->weight, a->remainder, a->weight_kind, start, n);
    }
}

#endif
