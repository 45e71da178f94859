/* [Note: 8-bit moments]
 * Blocks of 256 elements with three fp32 scales each: (unit, low, high).
 * exp_avg_sq: code 0 is zero; codes 1..255 are float bit patterns evenly spaced from that of `low`, the
 *   smallest non-zero element of the block, to that of `high`, the largest. Even steps of the pattern are
 *   near-even steps of the logarithm, so small elements beside large ones keep their relative precision and
 *   never become zero (a zero under a non-zero exp_avg would make the update explode). Rounding is
 *   stochastic: with beta2 = 0.999 an element moves by a thousandth a step, and to-nearest would leave it
 *   where it is for ever. The dice are a hash of the element's own bits and the step's salt, so a step is
 *   reproducible and does not depend on threads or places.
 * exp_avg: code * unit * sqrt(exp_avg_sq as stored), codes -127..127. Relative to the root, elements of very
 *   different size share a block without loss; that ratio is what the update uses.
 * A non-finite element makes its block non-finite. */
#ifndef ZEROSHARD_MOMENTS8_H
#define ZEROSHARD_MOMENTS8_H

#include "stage.h"

#define LEVELS 254.0f

INLINE float decode_square(int32_t code, int32_t low, int32_t high, float pitch) {
    const int32_t bits = low + (int32_t)((float)(code - 1) * pitch);
    const int32_t kept = bits < high ? bits : high;
    return as_float(pick(code == 0, 0u, (uint32_t)kept));
}

INLINE void decode_moments(float *RESTRICT m, float *RESTRICT v, const int8_t *RESTRICT means,
                           const uint8_t *RESTRICT squares, const float *scales, int64_t n) {
    const float unit = scales[0];
    const int32_t low = (int32_t)as_bits(scales[1]), high = (int32_t)as_bits(scales[2]);
    const float pitch = (float)(high - low) / LEVELS;
    for (int64_t i = 0; i < n; i++) {
        v[i] = decode_square(squares[i], low, high, pitch);
        m[i] = ((float)means[i] * unit) * sqrtf(v[i]);
    }
}

/* Uniform in [0, 1) with 24 bits; multipliers below 2^31 let 64-bit integers of any language repeat it. */
INLINE float dice(uint32_t bits, uint32_t salt) {
    uint32_t h = bits ^ salt;
    h = (h ^ (h >> 16)) * 0x45D9F3Bu;
    h = (h ^ (h >> 15)) * 0x2C1B3C6Du;
    h ^= h >> 16;
    return (float)(int32_t)(h >> 8) * 0x1p-24f;
}

/* The pattern of a square; a NaN, whose own pattern differs from machine to machine, becomes infinity. */
INLINE uint32_t square_bits(float square) {
    const uint32_t bits = as_bits(square) & 0x7FFFFFFFu;
    return bits < 0x7F800000u ? bits : 0x7F800000u;
}

INLINE void encode_moments(int8_t *RESTRICT means, uint8_t *RESTRICT squares, float *scales,
                           const float *RESTRICT m, float *RESTRICT v, int64_t n, uint32_t salt) {
    uint32_t least = UINT32_MAX, most = 0;
    int32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = square_bits(v[i]);
        const uint32_t below = bits - 1u; /* zero wraps to the largest, and is no candidate */
        least = below < least ? below : least;
        most = bits > most ? bits : most;
    }
    const int32_t high = (int32_t)most, low = most == 0 ? 0 : (int32_t)(least + 1u);
    const int32_t gap = high - low > 1 ? high - low : 1;
    const float density = LEVELS / (float)gap, pitch = (float)(high - low) / LEVELS;
    ALIGNED float ratio[BLOCK];
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = square_bits(v[i]);
        const int32_t raised = (int32_t)bits > low ? (int32_t)bits : low; /* zero is coded apart */
        const int32_t level = (int32_t)((float)(raised - low) * density + dice(bits, salt));
        const int32_t code = (int32_t)pick(bits == 0, 0u, (uint32_t)(1 + (level < 254 ? level : 254)));
        squares[i] = (uint8_t)code;
        v[i] = sqrtf(decode_square(code, low, high, pitch));
    }
    for (int64_t i = 0; i < n; i++) {
        const float quotient = m[i] / v[i];
        ratio[i] = as_float(pick(v[i] == 0.0f, 0u, as_bits(quotient)));
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = (int32_t)(as_bits(ratio[i]) & 0x7FFFFFFFu);
        top = bits > top ? bits : top;
    }
    /* Below 1e-30 the inverse would overflow; such a ratio moves no weight. */
    const int finite = top < 0x7F800000, usable = finite && as_float((uint32_t)top) > 1e-30f;
    const float largest = as_float((uint32_t)top), inverse = usable ? 127.0f / largest : 0.0f;
    const uint32_t keep = finite ? 0xFFFFFFFFu : 0u;
    for (int64_t i = 0; i < n; i++) {
        const float level = as_float(as_bits(ratio[i]) & keep) * inverse;
        means[i] = (int8_t)(int32_t)((level + 12582912.0f) - 12582912.0f);
    }
    scales[0] = finite ? (usable ? largest / 127.0f : 0.0f) : as_float(0x7F800000u);
    scales[1] = as_float((uint32_t)low);
    scales[2] = as_float((uint32_t)high);
}

#endif
