/* Sums and casts over flat arrays of any of the four formats. Sums run in fp32, or in fp64 where an
 * fp64 array takes part; each addition is rounded on its own, in the order of the sources, so the result is
 * the same on every rank and in the torch fallback. */
#ifndef ZEROSHARD_SUMS_H
#define ZEROSHARD_SUMS_H

#include "past.h"
#include "stage.h"

struct sum {
    int64_t count;
    void *out;
    const void *const *sources;
    const int32_t *source_kinds;
    int32_t source_count;
    int32_t out_kind;
    int32_t doubles;      /* accumulate in fp64 */
    double scale;
};

struct pair {             /* accumulate: to += scale * from; cast: to = from */
    int64_t count;
    void *to;
    const void *from;
    int32_t to_kind, from_kind;
    int32_t doubles;
    double scale;
};

INLINE double load_wide(int kind, const void *from, int64_t i) {
    return kind == F64 ? ((const double *)from)[i] : (double)load(kind, from, i);
}

INLINE void add_rows(float *RESTRICT to, int kind, const void *from, int64_t n) {
    switch (kind) {
#define CASE(k) case k: for (int64_t i = 0; i < n; i++) to[i] = to[i] + load(k, from, i); break;
    CASE(F32) CASE(BF16) CASE(F16)
#undef CASE
    default: break;
    }
}

INLINE void widen_doubles(double *RESTRICT to, int kind, const void *from, int64_t n) {
    switch (kind) {
#define CASE(k) case k: for (int64_t i = 0; i < n; i++) to[i] = load_wide(k, from, i); break;
    CASE(F32) CASE(BF16) CASE(F16) CASE(F64)
#undef CASE
    default: break;
    }
}

INLINE void narrow_doubles(int kind, void *to, const double *RESTRICT from, int64_t n) {
    if (kind == F64) memcpy(to, from, (size_t)n * sizeof *from);
    else {
        ALIGNED float half[BLOCK];
        for (int64_t i = 0; i < n; i++) half[i] = (float)from[i];
        narrow(kind, to, half, n);
    }
}

INLINE void sum_floats(const struct sum *c, int64_t start, int64_t n) {
    ALIGNED float total[BLOCK];
    const float scale = (float)c->scale;
    widen(total, c->source_kinds[0], at(c->sources[0], c->source_kinds[0], start), n, 1.0f);
    for (int32_t s = 1; s < c->source_count; s++)
        add_rows(total, c->source_kinds[s], at(c->sources[s], c->source_kinds[s], start), n);
    for (int64_t i = 0; i < n; i++) total[i] = total[i] * scale;
    narrow(c->out_kind, at(c->out, c->out_kind, start), total, n);
}

INLINE void sum_doubles(const struct sum *c, int64_t start, int64_t n) {
    ALIGNED double total[BLOCK], term[BLOCK];
    widen_doubles(total, c->source_kinds[0], at(c->sources[0], c->source_kinds[0], start), n);
    for (int32_t s = 1; s < c->source_count; s++) {
        widen_doubles(term, c->source_kinds[s], at(c->sources[s], c->source_kinds[s], start), n);
        for (int64_t i = 0; i < n; i++) total[i] = total[i] + term[i];
    }
    for (int64_t i = 0; i < n; i++) total[i] = total[i] * c->scale;
    narrow_doubles(c->out_kind, at(c->out, c->out_kind, start), total, n);
}

/* Two sources of one kind, the commonest sum, in registers from end to end. What is summed is not read before
 * the update. */
INLINE void sum_two(const struct sum *c, const int kind, const int out_kind) {
    const void *first = c->sources[0], *second = c->sources[1];
    const float scale = (float)c->scale;
    const int64_t count = c->count;
    void *out = c->out;
    const int64_t done = kind == F32 && out_kind == F32 ? add_past(out, first, second, scale, count) : 0;
    INDEPENDENT
    for (int64_t i = done; i < count; i++)
        store(out_kind, out, i, (load(kind, first, i) + load(kind, second, i)) * scale);
}

INLINE int sum_streams(const struct sum *c) {
    if (c->source_count != 2 || c->source_kinds[0] != c->source_kinds[1]) return 0;
    switch (c->source_kinds[0] * 8 + c->out_kind) {
#define STREAM(kind, out) case kind * 8 + out: sum_two(c, kind, out); return 1;
    STREAM(F32, F32) STREAM(BF16, BF16) STREAM(BF16, F32) STREAM(F16, F16) STREAM(F16, F32)
#undef STREAM
    default: return 0;
    }
}

INLINE void sum_body(struct sum *c) {
    if (sum_streams(c)) return;
    for (int64_t start = 0; start < c->count; start += BLOCK) {
        const int64_t n = c->count - start < BLOCK ? c->count - start : BLOCK;
        if (c->doubles) sum_doubles(c, start, n);
        else sum_floats(c, start, n);
    }
}

INLINE void accumulate_body(struct pair *c) {
    for (int64_t start = 0; start < c->count; start += BLOCK) {
        const int64_t n = c->count - start < BLOCK ? c->count - start : BLOCK;
        void *to = at(c->to, c->to_kind, start);
        const void *from = at(c->from, c->from_kind, start);
        if (c->doubles) {
            ALIGNED double total[BLOCK], term[BLOCK];
            widen_doubles(total, c->to_kind, to, n);
            widen_doubles(term, c->from_kind, from, n);
            for (int64_t i = 0; i < n; i++) total[i] = total[i] + c->scale * term[i];
            narrow_doubles(c->to_kind, to, total, n);
        } else {
            ALIGNED float total[BLOCK], term[BLOCK];
            widen(total, c->to_kind, to, n, 1.0f);
            widen(term, c->from_kind, from, n, (float)c->scale);
            for (int64_t i = 0; i < n; i++) total[i] = total[i] + term[i];
            narrow(c->to_kind, to, total, n);
        }
    }
}

/* fp64 goes to 16 bits by way of fp32, as in torch. */
INLINE void cast_body(struct pair *c) {
    ALIGNED float stage[BLOCK];
    for (int64_t start = 0; start < c->count; start += BLOCK) {
        const int64_t n = c->count - start < BLOCK ? c->count - start : BLOCK;
        void *to = at(c->to, c->to_kind, start);
        const void *from = at(c->from, c->from_kind, start);
        if (c->to_kind == c->from_kind) memmove(to, from, (size_t)(n * width_of(c->to_kind)));
        else {
            widen(stage, c->from_kind, from, n, 1.0f);
            narrow(c->to_kind, to, stage, n);
        }
    }
}

#endif
