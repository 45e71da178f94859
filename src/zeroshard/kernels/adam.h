/* One step of Adam or AdamW over rows of one tensor: gradient in, fp32 state updated, compute weight out,
 * one pass.
 *
 * The order of operations is that of torch.optim.Adam for one tensor, each operation rounded on its own (no
 * fused multiply-add), so that the torch fallback gives the same bits and an element's result does not
 * depend on its place.
 */
#ifndef ZEROSHARD_ADAM_H
#define ZEROSHARD_ADAM_H

#include "moments8.h"

struct adam {
    int64_t count;
    float *master;        /* or NULL: the master is weight + remainder */
    int16_t *remainder;   /* with weight_kind SPLIT */
    void *exp_avg;        /* float, or int8 codes where scales is set */
    void *exp_avg_sq;     /* float, or uint8 codes */
    float *peak;          /* max_exp_avg_sq, or NULL */
    float *scales;        /* of 8-bit moments, or NULL */
    const void *grad;
    void *weight;
    int32_t grad_kind, weight_kind;
    int32_t coupled;      /* weight decay is added to the gradient (Adam), not taken off the weight (AdamW) */
    uint32_t salt;        /* of the rounding of 8-bit moments */
    float grad_scale, lerp, beta2, gain2, stride, bias, eps, decay;
    int32_t first;        /* the moments held nothing before this step */
    const struct adam *taken; /* the numbers of a step that is taken back first, or NULL */
    const float *size;    /* nothing is updated unless it is `most` or less, or it is NULL */
    float most;
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
    float *master = a.master, *exp_avg = a.exp_avg, *exp_avg_sq = a.exp_avg_sq;
    uint16_t *halves = a.weight;
    INDEPENDENT
    for (int64_t i = 0; i < a.count; i++) {
        const float g = load(grad_kind, a.grad, i) * a.grad_scale;
        const float p = weight_kind == SPLIT ? as_float(join_bits(halves[i], a.remainder[i])) : master[i];
        const struct cell next = adam_cell(&a, p, exp_avg[i], exp_avg_sq[i], g);
        exp_avg[i] = next.m;
        exp_avg_sq[i] = next.v;
        if (weight_kind == SPLIT) {
            halves[i] = split_weight(as_bits(next.p));
            a.remainder[i] = (int16_t)as_bits(next.p);
        } else {
            master[i] = next.p;
            store(weight_kind, a.weight, i, next.p);
        }
    }
}

INLINE int adam_streams(const struct adam *a) {
    if (a->coupled || a->peak || a->scales || !(a->lerp < 0.5f)) return 0;
    switch (a->grad_kind * 8 + a->weight_kind) {
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
    const int first = call->first || !(beta2 > 0.0);
    for (int64_t i = 0; i < n; i++) {
        const double mean = m[i], square = v[i];
        const double before = (p[i] - stride * mean / (sqrt(square) / bias + eps)) / shrunk;
        const double grad = coupled ? g[i] + decay * before : g[i];
        const double part = mean - lerp * grad;
        const double older = pick_double(fabs(part) <= 0x1p-23 * fabs(mean), 0.0, part) / rest;
        const double left = (square - gain2 * grad * grad) / kept, floor = older * older * least;
        p[i] = (float)before;
        m[i] = call->first ? 0.0f : (float)older;
        v[i] = first ? 0.0f : (float)pick_double(left < floor, floor, left);
    }
}

INLINE void adam_pass(const struct adam *a, const int updates) {
    ALIGNED float g[BLOCK], p[BLOCK], m[BLOCK], v[BLOCK];
    for (int64_t start = 0; start < a->count; start += BLOCK) {
        const int64_t n = a->count - start < BLOCK ? a->count - start : BLOCK;
        float *means = a->scales ? m : (float *)a->exp_avg + start;
        float *squares = a->scales ? v : (float *)a->exp_avg_sq + start;
        int8_t *codes = (int8_t *)a->exp_avg + start;
        uint8_t *square_codes = (uint8_t *)a->exp_avg_sq + start;
        float *scales = a->scales ? a->scales + 3 * (start / BLOCK) : 0;
        const void *grad = at(a->grad, a->grad_kind, start);
        open_master(p, a->master, a->weight, a->remainder, start, n);
        if (scales) decode_moments(m, v, codes, square_codes, scales, n);
        if (a->taken) {
            widen(g, a->grad_kind, grad, n, a->taken->grad_scale);
            if (a->taken->coupled) adam_back(a->taken, p, means, squares, g, n, 1);
            else adam_back(a->taken, p, means, squares, g, n, 0);
        }
        if (updates) {
            widen(g, a->grad_kind, grad, n, a->grad_scale);
            adam_variant(a, p, means, squares, a->peak ? a->peak + start : 0, g, n);
        }
        if (scales) encode_moments(codes, square_codes, scales, m, v, n, a->salt);
        close_master(p, a->master, a->weight, a->remainder, a->weight_kind, start, n);
    }
}

INLINE void adam_body(struct adam *a) {
    if (too_large(a->size, a->most)) adam_pass(a, 0);
    else if (a->taken || !adam_streams(a)) adam_pass(a, 1);
}

INLINE void adam_back_body(struct adam *a) { adam_pass(a, 0); }

#endif
