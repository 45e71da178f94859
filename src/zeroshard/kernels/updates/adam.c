/* One step of Adam or AdamW over rows of one tensor: gradient in, fp32 state updated, compute weight out,
 * one pass.
 *
 * The order of operations is that of torch.optim.Adam for one tensor, each operation rounded on its own (no
 * fused multiply-add), so that the torch fallback gives the same bits and an element's result does not
 * depend on its place.
 */
#include "../moments8.h"
#include "update.h"

struct adam {
    struct update rows;   /* states: exp_avg and exp_avg_sq, float or 8-bit codes; max_exp_avg_sq, or NULL */
    float grad_scale, lerp, beta2, gain2, stride, bias, eps, decay;
    int32_t coupled;      /* weight decay is added to the gradient (Adam), not taken off the weight (AdamW) */
    int32_t step;         /* before the first one the moments held nothing */
};

struct cell { float p, m, v; };

INLINE struct cell adam_cell(const struct adam *a, float p, float m, float v, float g) {
    struct cell next;
    next.m = m + a->lerp * (g - m);
    next.v = v * a->beta2 + (a->gain2 * g) * g;
    next.p = p * a->decay + (a->stride * next.m) / (sqrtf(next.v) / a->bias + a->eps);
    return next;
}

/* The common case in registers from end to end: AdamW (or no decay), fp32 moments, beta1 over one half. A
 * line of memory is touched once; the staged path below comes back to it, which costs up to a half more
 * where the arrays share cache sets. */
INLINE void adam_stream(const struct adam *call, const int grad_kind, const int weight_kind) {
    const struct adam a = *call;
    float *master = a.rows.master, *exp_avg = a.rows.states[0], *exp_avg_sq = a.rows.states[1];
    int16_t *remainder = a.rows.remainder;
    uint16_t *halves = a.rows.weight;
    INDEPENDENT
    for (int64_t i = 0; i < a.rows.count; i++) {
        const float g = load(grad_kind, a.rows.grad, i) * a.grad_scale;
        const float p = weight_kind == SPLIT ? as_float(join_bits(halves[i], remainder[i])) : master[i];
        const struct cell next = adam_cell(&a, p, exp_avg[i], exp_avg_sq[i], g);
        exp_avg[i] = next.m;
        exp_avg_sq[i] = next.v;
        if (weight_kind == SPLIT) {
            halves[i] = split_weight(as_bits(next.p));
            remainder[i] = (int16_t)as_bits(next.p);
        } else {
            master[i] = next.p;
            store(weight_kind, a.rows.weight, i, next.p);
        }
    }
}

INLINE int adam_streams(const struct adam *a) {
    if (a->coupled || a->rows.states[2] || a->rows.scales || !(a->lerp < 0.5f)) return 0;
    switch (a->rows.grad_kind * 8 + a->rows.weight_kind) {
#define STREAM(grad, weight) case grad * 8 + weight: adam_stream(a, grad, weight); return 1;
#define STREAMS(grad) STREAM(grad, F32) STREAM(grad, BF16) STREAM(grad, F16) \
                      STREAM(grad, NONE) STREAM(grad, BF16_AWAY) STREAM(grad, SPLIT)
    STREAMS(F32) STREAMS(BF16) STREAMS(F16)
#undef STREAMS
#undef STREAM
    default: return 0;
    }
}

/* What the staged path meets besides: decay added to the gradient (Adam), and a beta1 of at most one half,
 * where torch interpolates from the other end. */
enum adam_mode { COUPLED = 1, FAR = 2 };

/* The middle of the staged path: fp32 in, fp32 out, all of it in the first-level cache. */
INLINE void adam_stage(const struct adam *call, float *RESTRICT p, float *RESTRICT m, float *RESTRICT v,
                       float *RESTRICT peak, const float *RESTRICT g, int64_t n, const int mode) {
    const struct adam a = *call;
    const float unlerp = 1.0f - a.lerp;
    for (int64_t i = 0; i < n; i++) {
        const float grad = mode & COUPLED ? g[i] + p[i] * a.decay : g[i];
        const float start = mode & COUPLED ? p[i] : p[i] * a.decay;
        const float mean = mode & FAR ? grad - (grad - m[i]) * unlerp : m[i] + a.lerp * (grad - m[i]);
        const float square = v[i] * a.beta2 + (a.gain2 * grad) * grad;
        float top = square;
        if (peak) {
            top = peak[i] > square || peak[i] != peak[i] ? peak[i] : square;
            peak[i] = top;
        }
        m[i] = mean;
        v[i] = square;
        p[i] = start + (a.stride * mean) / (sqrtf(top) / a.bias + a.eps);
    }
}

/* The same with `mode`, and whether there is a peak, as constants. */
INLINE void adam_variant(const struct adam *a, float *p, float *m, float *v, float *peak, const float *g,
                         int64_t n) {
    const int mode = (a->coupled ? COUPLED : 0) | (a->lerp < 0.5f ? 0 : FAR);
    switch (mode | (peak ? 4 : 0)) {
#define CASE(mode) case mode: adam_stage(a, p, m, v, 0, g, n, mode); break; \
                   case mode | 4: adam_stage(a, p, m, v, peak, g, n, mode); break;
    CASE(0) CASE(COUPLED) CASE(FAR) CASE(COUPLED | FAR)
#undef CASE
    default: break;
    }
}

/* [Note: taking back] The state before a step from the state after it and the gradient: the inverse formula
 * in fp64, right to fp32 rounding. A mean that is nothing but the rounding of the update was zero. Next to a
 * large gradient a small square is lost, and a mean over no square would be a huge step; by Cauchy and
 * Schwarz no square is smaller than `least` of the mean's. */
INLINE void adam_back(const struct adam *call, float *RESTRICT p, float *RESTRICT m, float *RESTRICT v,
                      const float *RESTRICT g, int64_t n, const int coupled) {
    const double lerp = call->lerp, rest = 1.0 - lerp, gain2 = call->gain2, beta2 = call->beta2;
    const double stride = call->stride, bias = call->bias, eps = call->eps, decay = call->decay;
    const double shrunk = coupled ? 1.0 : decay;
    const double share = beta2 > 0.0 ? rest * rest / beta2 : 1.0, kept = beta2 > 0.0 ? beta2 : 1.0;
    const double least = share < 1.0 ? gain2 * (1.0 - share) / (lerp * lerp) : 0.0;
    const int first = call->step == 1 || !(beta2 > 0.0);
    for (int64_t i = 0; i < n; i++) {
        const double mean = m[i], square = v[i];
        const double before = (p[i] - stride * mean / (sqrt(square) / bias + eps)) / shrunk;
        const double grad = coupled ? g[i] + decay * before : g[i];
        const double part = mean - lerp * grad;
        const double older = pick_double(fabs(part) <= 0x1p-23 * fabs(mean), 0.0, part) / rest;
        const double left = (square - gain2 * grad * grad) / kept, floor = older * older * least;
        p[i] = (float)before;
        m[i] = call->step == 1 ? 0.0f : (float)older;
        v[i] = first ? 0.0f : (float)pick_double(left < floor, floor, left);
    }
}

INLINE void adam_pass(const struct adam *a, const int updates) {
    ALIGNED float g[BLOCK], p[BLOCK], m[BLOCK], v[BLOCK];
    const struct update *rows = &a->rows;
    const struct adam *taken = rows->taken;
    const uint32_t salt = (uint32_t)a->step * 0x9E3779B1u; /* of the rounding of 8-bit moments, as in moments8.py */
    for (int64_t start = 0; start < rows->count; start += BLOCK) {
        const int64_t n = rows->count - start < BLOCK ? rows->count - start : BLOCK;
        float *means = rows->scales ? m : (float *)rows->states[0] + start;
        float *squares = rows->scales ? v : (float *)rows->states[1] + start;
        float *peak = rows->states[2] ? (float *)rows->states[2] + start : 0;
        int8_t *codes = (int8_t *)rows->states[0] + start;
        uint8_t *square_codes = (uint8_t *)rows->states[1] + start;
        float *scales = rows->scales ? rows->scales + 3 * (start / BLOCK) : 0;
        open_rows(rows, p, start, n);
        if (scales) decode_moments(m, v, codes, square_codes, scales, n);
        if (taken) {
            open_grad(rows, g, taken->grad_scale, start, n);
            if (taken->coupled) adam_back(taken, p, means, squares, g, n, 1);
            else adam_back(taken, p, means, squares, g, n, 0);
        }
        if (updates) {
            open_grad(rows, g, a->grad_scale, start, n);
            adam_variant(a, p, means, squares, peak, g, n);
        }
        if (scales) encode_moments(codes, square_codes, scales, m, v, n, salt);
        close_rows(rows, p, start, n);
    }
}

INLINE void adam_body(struct adam *a) {
    if (left_out(&a->rows)) adam_pass(a, 0);
    else if (a->rows.taken || !adam_streams(a)) adam_pass(a, 1);
}

INLINE void adam_back_body(struct adam *a) { adam_pass(a, 0); }

DEFINE(adam, adam)
DEFINE(adam_back, adam)
