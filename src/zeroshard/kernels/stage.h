/* Stages: blocks of one array as fp32 in a small buffer that stays in the first-level cache, and back.
 * Kernels that meet many combinations of formats are a sequence of stages over a block instead of one loop
 * each. */
#ifndef ZEROSHARD_STAGE_H
#define ZEROSHARD_STAGE_H

#include "numbers.h"

/* Elements of a stage, and of a block of 8-bit moments. */
#define BLOCK 256

INLINE void widen(float *RESTRICT to, int kind, const void *from, int64_t n, float scale) {
    switch (kind) {
#define CASE(k) case k: for (int64_t i = 0; i < n; i++) to[i] = load(k, from, i) * scale; break;
    CASE(F32) CASE(BF16) CASE(F16) CASE(F64)
#undef CASE
    default: break;
    }
}

INLINE void narrow(int kind, void *to, const float *RESTRICT from, int64_t n) {
    switch (kind) {
#define CASE(k) case k: for (int64_t i = 0; i < n; i++) store(k, to, i, from[i]); break;
    CASE(F32) CASE(BF16) CASE(F16) CASE(F64) CASE(BF16_AWAY)
#undef CASE
    default: break;
    }
}

INLINE void join_rows(float *RESTRICT to, const uint16_t *weight, const int16_t *remainder, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = as_float(join_bits(weight[i], remainder[i]));
}

INLINE void split_rows(uint16_t *RESTRICT weight, int16_t *RESTRICT remainder, const float *RESTRICT from,
                       int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(from[i]);
        weight[i] = split_weight(bits);
        remainder[i] = (int16_t)bits;
    }
}

/* Rows start .. start + n of a master, whole or split, into a stage. */
INLINE void open_master(float *p, const float *master, const void *weight, const int16_t *remainder,
                        int64_t start, int64_t n) {
    if (master) memcpy(p, master + start, (size_t)n * sizeof *p);
    else join_rows(p, (const uint16_t *)weight + start, remainder + start, n);
}

/* The stage back into the master, and the compute weight with it. */
INLINE void close_master(const float *p, float *master, void *weight, int16_t *remainder, int weight_kind,
                         int64_t start, int64_t n) {
    if (master) {
        memcpy(master + start, p, (size_t)n * sizeof *p);
        narrow(weight_kind, at(weight, weight_kind, start), p, n);
    } else {
        split_rows((uint16_t *)weight + start, remainder + start, p, n);
    }
}

/* Whether an update has to wait: no number is within a bound that is not one. */
INLINE int too_large(const float *size, float most) { return size && !(*size <= most); }

#endif
