/* One step of SGD with momentum over rows of one tensor, in stages. Order of operations: torch.optim.SGD. */
#include "update.h"

struct sgd {
    struct update rows;   /* states: the momentum, or NULL */
    float grad_scale, stride, inertia, gain, decay;
    int32_t first;        /* the momentum holds nothing yet: it becomes the gradient */
    int32_t nesterov;
    int32_t decays;
};

INLINE void sgd_momentum(const struct sgd *a, float *RESTRICT g, float *RESTRICT buffer, int64_t n) {
    const float inertia = a->inertia, gain = a->gain;
    if (a->first) for (int64_t i = 0; i < n; i++) buffer[i] = g[i];
    else for (int64_t i = 0; i < n; i++) buffer[i] = buffer[i] * inertia + gain * g[i];
    if (a->nesterov) for (int64_t i = 0; i < n; i++) g[i] = g[i] + inertia * buffer[i];
    else for (int64_t i = 0; i < n; i++) g[i] = buffer[i];
}

/* [Note: taking back] in adam.c. p' = p + stride * d, with d linear in the gradient and, where weights decay,
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
    const struct update *rows = &a->rows;
    const struct sgd *taken = rows->taken;
    const float decay = a->decay, stride = a->stride;
    for (int64_t start = 0; start < rows->count; start += BLOCK) {
        const int64_t n = rows->count - start < BLOCK ? rows->count - start : BLOCK;
        float *momentum = rows->states[0] ? (float *)rows->states[0] + start : 0;
        open_rows(rows, p, start, n);
        if (taken) {
            open_grad(rows, g, taken->grad_scale, start, n);
            sgd_back(taken, p, momentum, g, n);
        }
        if (updates) {
            open_grad(rows, g, a->grad_scale, start, n);
            if (a->decays) for (int64_t i = 0; i < n; i++) g[i] = g[i] + p[i] * decay;
            if (momentum) sgd_momentum(a, g, momentum, n);
            for (int64_t i = 0; i < n; i++) p[i] = p[i] + stride * g[i];
        }
        close_rows(rows, p, start, n);
    }
}

INLINE void sgd_body(struct sgd *a) { sgd_pass(a, !left_out(&a->rows)); }
INLINE void sgd_back_body(struct sgd *a) { sgd_pass(a, 0); }

DEFINE(sgd, sgd)
DEFINE(sgd_back, sgd)
