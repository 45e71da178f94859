/* The largest magnitudes of an array, exactly k of them, in order of place: see compress/sparse.py.
 *
 * The k-th largest is found by its bits, eleven, ten and ten at a time: count how many values have each
 * leading group of bits, keep the group in which the k-th lies, look closer. Nothing is written until it is
 * known, so every pass adds residual, momentum and value again instead of keeping the sum. */
#ifndef ZEROSHARD_LARGEST_H
#define ZEROSHARD_LARGEST_H

#include "numbers.h"

struct largest {
    int64_t count, k;     /* 0 < k <= count */
    const float *values;
    float *residual;
    float *momentum;      /* may be null */
    int32_t *places;      /* k */
    float *chosen;        /* k */
    float inertia;
};

#define SPAN 256          /* values staged at a time */
#define GROUP 16          /* values skipped at a time where none is large */
#define BINS 2048
#define COPIES 4          /* of the counters: neighbours fall into the same bin */

/* What each value would become, and its magnitude's bits. */
INLINE void stage_wanted(const struct largest *c, int64_t start, int64_t n, float *RESTRICT grown,
                         float *RESTRICT wanted, uint32_t *RESTRICT size) {
    const float *RESTRICT values = c->values + start, *RESTRICT residual = c->residual + start;
    const float inertia = c->inertia;
    if (c->momentum) {
        const float *RESTRICT momentum = c->momentum + start;
        for (int64_t i = 0; i < n; i++) grown[i] = values[i] + momentum[i] * inertia;
    } else {
        for (int64_t i = 0; i < n; i++) grown[i] = values[i];
    }
    for (int64_t i = 0; i < n; i++) {
        wanted[i] = residual[i] + grown[i];
        const uint32_t bits = as_bits(wanted[i]) & 0x7FFFFFFFu;
        size[i] = bits < 0x7F800000u ? bits : 0x7F800000u; /* not finite is one size, whatever a NaN carries */
    }
    for (int64_t i = n; i < SPAN; i++) size[i] = 0;
}

/* How many values whose bits from `above` up are `prefix` have each pattern of the `width` bits below. */
INLINE void count_bits(const struct largest *c, uint32_t *RESTRICT bins, int above, uint32_t prefix, int width) {
    ALIGNED float grown[SPAN], wanted[SPAN];
    ALIGNED uint32_t size[SPAN];
    uint32_t counts[COPIES][BINS];
    memset(counts, 0, sizeof counts);
    const int shift = above - width;
    const uint32_t mask = (1u << width) - 1u;
    for (int64_t start = 0; start < c->count; start += SPAN) {
        const int64_t n = c->count - start < SPAN ? c->count - start : SPAN;
        stage_wanted(c, start, n, grown, wanted, size);
        if (above == 31) {
            for (int64_t i = 0; i < n; i++) counts[i % COPIES][size[i] >> shift]++;
            continue;
        }
        for (int64_t base = 0; base < n; base += GROUP) {
            uint32_t found = 0;
            for (int j = 0; j < GROUP; j++) found |= (size[base + j] >> above) == prefix;
            if (!found) continue;
            const int64_t stop = n - base < GROUP ? n - base : GROUP;
            for (int64_t j = 0; j < stop; j++)
                if (size[base + j] >> above == prefix) counts[0][(size[base + j] >> shift) & mask]++;
        }
    }
    for (int bin = 0; bin <= (int)mask; bin++) {
        bins[bin] = 0;
        for (int copy = 0; copy < COPIES; copy++) bins[bin] += counts[copy][bin];
    }
}

/* The bits of the k-th largest magnitude; `ties` of those equal to it are among the k. */
INLINE uint32_t least_of(const struct largest *c, int64_t *ties) {
    static const int widths[3] = {11, 10, 10};
    uint32_t bins[BINS], prefix = 0;
    int64_t wanted = c->k;
    int above = 31;
    for (int round = 0; round < 3; round++) {
        const int width = widths[round];
        count_bits(c, bins, above, prefix, width);
        int bin = (1 << width) - 1;
        while (bin > 0 && bins[bin] < wanted) wanted -= bins[bin--];
        prefix = (prefix << width) | (uint32_t)bin;
        above -= width;
    }
    *ties = wanted;
    return prefix;
}

/* Residual and momentum of values that are not sent; those of a value that is not finite stay. */
INLINE void keep_rows(const struct largest *c, int64_t start, int64_t n, const float *RESTRICT grown,
                      const float *RESTRICT wanted, const uint32_t *RESTRICT size) {
    uint32_t *RESTRICT residual = (uint32_t *)(c->residual + start);
    for (int64_t i = 0; i < n; i++)
        residual[i] = pick(size[i] < 0x7F800000u, as_bits(wanted[i]), residual[i]);
    if (!c->momentum) return;
    uint32_t *RESTRICT momentum = (uint32_t *)(c->momentum + start);
    for (int64_t i = 0; i < n; i++)
        momentum[i] = pick(size[i] < 0x7F800000u, as_bits(grown[i]), momentum[i]);
}

INLINE void largest_body(struct largest *c) {
    ALIGNED float grown[SPAN], wanted[SPAN];
    ALIGNED uint32_t size[SPAN];
    int64_t ties, sent = 0;
    const uint32_t least = least_of(c, &ties);
    for (int64_t start = 0; start < c->count; start += SPAN) {
        const int64_t n = c->count - start < SPAN ? c->count - start : SPAN;
        stage_wanted(c, start, n, grown, wanted, size);
        keep_rows(c, start, n, grown, wanted, size);
        for (int64_t base = 0; base < n; base += GROUP) {
            uint32_t found = 0;
            for (int j = 0; j < GROUP; j++) found |= size[base + j] >= least;
            if (!found) continue;
            const int64_t stop = base + GROUP < n ? base + GROUP : n;
            for (int64_t i = base; i < stop && sent < c->k; i++) {
                if (size[i] < least || (size[i] == least && ties == 0)) continue;
                ties -= size[i] == least;
                c->places[sent] = (int32_t)(start + i);
                c->chosen[sent++] = wanted[i];
                if (size[i] >= 0x7F800000u) continue;
                c->residual[start + i] = 0.0f;
                if (c->momentum) c->momentum[start + i] = 0.0f;
            }
        }
    }
}

#endif
