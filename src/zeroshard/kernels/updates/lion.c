/* One step of Lion over rows of one tensor. The momentum could be told from the one after it, but not the weight,
 * whose step is a sign: so nothing is taken back. */
#include "update.h"

struct lion {
    struct update rows;   /* states: the momentum */
    float grad_scale, stride, beta1, gain1, beta2, gain2, decay;
    int32_t coupled;      /* weight decay is added to the gradient, not taken off the weight */
};

INLINE void lion_stage(const struct lion *call, float *RESTRICT p, float *RESTRICT m, const float *RESTRICT g,
                       int64_t n, const int coupled) {
    const struct lion a = *call;
    for (int64_t i = 0; i < n; i++) {
        const float grad = coupled ? g[i] + p[i] * a.decay : g[i];
        const float start = coupled ? p[i] : p[i] * a.decay;
        const float mean = m[i] * a.beta1 + grad * a.gain1;
        const float sign = (float)((mean > 0.0f) - (mean < 0.0f));
        m[i] = m[i] * a.beta2 + grad * a.gain2;
        p[i] = start + a.stride * sign;
    }
}

INLINE void lion_body(struct lion *a) {
    ALIGNED float g[BLOCK], p[BLOCK];
    const struct update *rows = &a->rows;
    if (left_out(rows)) return;
    for (int64_t start = 0; start < rows->count; start += BLOCK) {
        const int64_t n = rows->count - start < BLOCK ? rows->count - start : BLOCK;
        float *momentum = (float *)rows->states[0] + start;
        open_rows(rows, p, start, n);
        open_grad(rows, g, a->grad_scale, start, n);
        if (a->coupled) lion_stage(a, p, momentum, g, n, 1);
        else lion_stage(a, p, momentum, g, n, 0);
        close_rows(rows, p, start, n);
    }
}

DEFINE(lion, lion)
