/* Blocks of values as a scale and a few bits each: eight- and four-bit integers, signs, and signs with one of
 * two sizes. The formats are those of compress/blocks.py, integers.py, onebit.py and twobit.py, bit for bit; see
 * the notes there. */
#ifndef ZEROSHARD_CODES_H
#define ZEROSHARD_CODES_H

#include "numbers.h"

struct blocks {           /* encode_blocks, decode_blocks */
    int64_t count;        /* values */
    int64_t first;        /* place of the first one in its piece: dice depend on it */
    float *values;        /* read by encode, written by decode */
    float *residual;      /* encode: added to the values; what was not sent is left there; may be null */
    uint16_t *scales;     /* bf16 */
    uint8_t *packed;
    uint32_t block;
    int32_t bits, stochastic;
    int32_t add;          /* decode: add to what is there */
    uint32_t salt;
    int32_t large;        /* with no bits: how many values of a block go apart; see ternary.h */
};

#define LANE_COUNT 16
#define NAN_SCALE 0x7FC0u
#define TINY_BITS (27u << 23)   /* 2^-100 */
#define HUGE_BITS (254u << 23)  /* 2^127 */
#define ROUNDER 12582912.0f     /* 1.5 * 2^23: adding it rounds to whole numbers, left in the low bits */

INLINE float wanted_at(const float *values, const float *residual, int64_t i, const int feedback) {
    return feedback ? values[i] + residual[i] : values[i];
}

/* Uniform in [0, 1) in steps of 2^-16, raised by `shift`: exact. */
INLINE float raised_dice(uint32_t bits, uint32_t place, uint32_t salt, float shift) {
    uint32_t h = bits ^ (place * 0x9E3779B1u + salt);
    h = (h ^ (h >> 16)) * 0x45D9F3Bu;
    h = (h ^ (h >> 15)) * 0x2C1B3C6Du;
    return (float)(int32_t)(h >> 16) * 0x1p-16f + shift;
}

INLINE int32_t whole(float wanted, float inverse, const int levels, const int stochastic, uint32_t place,
                     uint32_t salt) {
    const float steps = wanted * inverse;
    if (!stochastic) return (int32_t)(as_bits(steps + ROUNDER) - 0x4B400000u);
    const int32_t shift = levels + 1;
    const int32_t risen = (int32_t)(steps + raised_dice(as_bits(wanted), place, salt, (float)shift)) - shift;
    const int32_t low = risen > -levels ? risen : -levels;
    return low < levels ? low : levels;
}

INLINE uint32_t largest_bits(const float *RESTRICT values, const float *RESTRICT residual, int64_t n,
                             const int feedback) {
    int32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = (int32_t)(as_bits(wanted_at(values, residual, i, feedback)) & 0x7FFFFFFFu);
        top = bits > top ? bits : top;
    }
    return (uint32_t)top;
}

/* Integers of one block: `bits`, `feedback` and `stochastic` are constants wherever this is called. */
INLINE void encode_integers(const struct blocks *c, int64_t start, int64_t n, uint16_t *scale_out,
                            uint8_t *RESTRICT packed, const int bits, const int feedback,
                            const int stochastic) {
    const int levels = (1 << (bits - 1)) - 1;
    const float *RESTRICT values = c->values + start;
    float *RESTRICT residual = feedback ? c->residual + start : 0;
    const int64_t bytes = bits == 8 ? n : (n + 1) / 2;
    const uint32_t top = largest_bits(values, residual, n, feedback);
    if (top < TINY_BITS || top >= HUGE_BITS) {
        memset(packed, 0, (size_t)bytes);
        *scale_out = top < TINY_BITS ? 0 : NAN_SCALE;
        if (feedback && top < TINY_BITS)
            for (int64_t i = 0; i < n; i++) residual[i] = values[i] + residual[i];
        return;
    }
    const uint32_t step = as_bits(as_float(top) * (float)(1.0 / levels));
    const uint32_t half = (step + 0xFFFFu) >> 16;
    const float scale = as_float(half << 16), inverse = 1.0f / scale;
    const uint32_t place = (uint32_t)(c->first + start), salt = c->salt;
    *scale_out = (uint16_t)half;
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++) {
            const float wanted = wanted_at(values, residual, i, feedback);
            const int32_t q = whole(wanted, inverse, levels, stochastic, place + (uint32_t)i, salt);
            packed[i] = (uint8_t)q;
            if (feedback) residual[i] = wanted - (float)q * scale;
        }
        return;
    }
    for (int64_t i = 0; i < n - bytes; i++) {
        const float low = wanted_at(values, residual, i, feedback);
        const float high = wanted_at(values, residual, i + bytes, feedback);
        const int32_t q = whole(low, inverse, levels, stochastic, place + (uint32_t)i, salt);
        const int32_t r = whole(high, inverse, levels, stochastic, place + (uint32_t)(i + bytes), salt);
        packed[i] = (uint8_t)((q & 15) | (r << 4));
        if (feedback) residual[i] = low - (float)q * scale;
        if (feedback) residual[i + bytes] = high - (float)r * scale;
    }
    if (n & 1) {
        const float low = wanted_at(values, residual, bytes - 1, feedback);
        const int32_t q = whole(low, inverse, levels, stochastic, place + (uint32_t)(bytes - 1), salt);
        packed[bytes - 1] = (uint8_t)(q & 15);
        if (feedback) residual[bytes - 1] = low - (float)q * scale;
    }
}

/* The sum of magnitudes: value i goes to lane i mod 16, and the lanes are folded in halves. */
INLINE float magnitude_sum(const float *RESTRICT values, const float *RESTRICT residual, int64_t n,
                           const int feedback) {
    ALIGNED float lanes[LANE_COUNT] = {0};
    int64_t i = 0;
    for (; i + LANE_COUNT <= n; i += LANE_COUNT)
        for (int j = 0; j < LANE_COUNT; j++)
            lanes[j] = lanes[j] + fabsf(wanted_at(values, residual, i + j, feedback));
    for (int j = 0; i + j < n; j++) lanes[j] = lanes[j] + fabsf(wanted_at(values, residual, i + j, feedback));
    for (int half = LANE_COUNT / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] = lanes[j] + lanes[j + half];
    return lanes[0];
}

/* The bf16 bits of a block's mean magnitude, to nearest; NAN_SCALE where not all is finite. */
INLINE uint32_t mean_half(const float *RESTRICT values, const float *RESTRICT residual, int64_t n,
                          const int feedback) {
    const float total = magnitude_sum(values, residual, n, feedback);
    if (as_bits(total) >= HUGE_BITS) return NAN_SCALE; /* a negative NaN's too */
    const uint32_t mean = as_bits(total * (float)(1.0 / (double)n));
    return (mean + 0x7FFFu + ((mean >> 16) & 1u)) >> 16;
}

INLINE void encode_signs(const struct blocks *c, int64_t start, int64_t n, uint16_t *scale_out,
                         uint8_t *RESTRICT packed, const int feedback) {
    const float *RESTRICT values = c->values + start;
    float *RESTRICT residual = feedback ? c->residual + start : 0;
    const int64_t width = (n + 7) / 8;
    const uint32_t half = mean_half(values, residual, n, feedback);
    memset(packed, 0, (size_t)width);
    *scale_out = (uint16_t)half;
    if (half == NAN_SCALE) return;
    for (int bit = 0; bit < 8; bit++) {
        const int64_t base = bit * width, stop = n - base < width ? n - base : width;
        for (int64_t j = 0; j < stop; j++) {
            const float wanted = wanted_at(values, residual, base + j, feedback);
            const uint32_t sign = as_bits(wanted) >> 31;
            packed[j] = (uint8_t)(packed[j] | (sign << bit));
            if (feedback) residual[base + j] = wanted - as_float((half << 16) | (sign << 31));
        }
    }
}

#define SMALL_SIZE 0.625f  /* of the mean magnitude: see compress/quantized.py */
#define LARGE_SIZE 1.875f
#define SIZE_BORDER 1.25f

INLINE float sized(float scale, uint32_t sign, uint32_t large) {
    const uint32_t size = pick(large, as_bits(scale * LARGE_SIZE), as_bits(scale * SMALL_SIZE));
    return as_float(size ^ (sign << 31));
}

INLINE void encode_sizes(const struct blocks *c, int64_t start, int64_t n, uint16_t *scale_out,
                         uint8_t *RESTRICT packed, const int feedback) {
    const float *RESTRICT values = c->values + start;
    float *RESTRICT residual = feedback ? c->residual + start : 0;
    const int64_t width = (n + 3) / 4;
    const uint32_t half = mean_half(values, residual, n, feedback);
    memset(packed, 0, (size_t)width);
    *scale_out = (uint16_t)half;
    if (half == NAN_SCALE) return;
    const float scale = as_float(half << 16), border = scale * SIZE_BORDER;
    for (int plane = 0; plane < 4; plane++) {
        const int64_t base = plane * width, stop = n - base < width ? n - base : width;
        for (int64_t j = 0; j < stop; j++) {
            const float wanted = wanted_at(values, residual, base + j, feedback);
            const uint32_t sign = as_bits(wanted) >> 31, large = fabsf(wanted) > border;
            packed[j] = (uint8_t)(packed[j] | ((sign | large << 1) << (2 * plane)));
            if (feedback) residual[base + j] = wanted - sized(scale, sign, large);
        }
    }
}

#include "ternary.h"

INLINE int64_t block_bytes(const struct blocks *c) {
    return c->bits ? (int64_t)c->block * c->bits / 8 : ternary_bytes(c, c->block);
}

INLINE void encode_blocks_body(struct blocks *c) {
    const int64_t width = block_bytes(c);
    const int variant = c->bits * 4 + (c->residual != 0) * 2 + (c->stochastic != 0);
    for (int64_t start = 0, number = 0; start < c->count; start += c->block, number++) {
        const int64_t n = c->count - start < c->block ? c->count - start : c->block;
        uint16_t *scale = c->scales + number;
        uint8_t *packed = c->packed + number * width;
        switch (variant) {
#define CASE(bits, feedback, stochastic) case bits * 4 + feedback * 2 + stochastic: \
            encode_integers(c, start, n, scale, packed, bits, feedback, stochastic); break;
        CASE(8, 0, 0) CASE(8, 0, 1) CASE(8, 1, 0) CASE(8, 1, 1)
        CASE(4, 0, 0) CASE(4, 0, 1) CASE(4, 1, 0) CASE(4, 1, 1)
#undef CASE
        case 0: encode_ternary(c, start, n, scale, packed, 0); break;
        case 2: encode_ternary(c, start, n, scale, packed, 1); break;
        case 2 * 4: encode_sizes(c, start, n, scale, packed, 0); break;
        case 2 * 4 + 2: encode_sizes(c, start, n, scale, packed, 1); break;
        case 1 * 4: encode_signs(c, start, n, scale, packed, 0); break;
        default: encode_signs(c, start, n, scale, packed, 1); break;
        }
    }
}

INLINE float landed(float *RESTRICT out, int64_t i, float value, const int add) {
    return add ? out[i] + value : value;
}

INLINE void decode_block(float *RESTRICT out, const uint8_t *RESTRICT packed, float scale, int64_t n,
                         const int bits, const int add) {
    const int64_t bytes = (n * bits + 7) / 8;
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++) out[i] = landed(out, i, (float)(int8_t)packed[i] * scale, add);
    } else if (bits == 4) {
        for (int64_t i = 0; i < bytes; i++)
            out[i] = landed(out, i, (float)(((packed[i] & 15) ^ 8) - 8) * scale, add);
        for (int64_t i = 0; i < n - bytes; i++)
            out[i + bytes] = landed(out, i + bytes, (float)(((packed[i] >> 4) ^ 8) - 8) * scale, add);
    } else if (bits == 2) {
        for (int plane = 0; plane < 4; plane++) {
            const int64_t base = plane * bytes, stop = n - base < bytes ? n - base : bytes;
            for (int64_t j = 0; j < stop; j++) {
                const uint32_t code = (uint32_t)packed[j] >> (2 * plane);
                out[base + j] = landed(out, base + j, sized(scale, code & 1u, (code >> 1) & 1u), add);
            }
        }
    } else {
        const uint32_t size = as_bits(scale);
        for (int bit = 0; bit < 8; bit++) {
            const int64_t base = bit * bytes, stop = n - base < bytes ? n - base : bytes;
            for (int64_t j = 0; j < stop; j++) {
                const uint32_t sign = ((uint32_t)packed[j] >> bit) & 1u;
                out[base + j] = landed(out, base + j, as_float(size ^ (sign << 31)), add);
            }
        }
    }
}

INLINE void decode_blocks_body(struct blocks *c) {
    const int64_t width = block_bytes(c);
    for (int64_t start = 0, number = 0; start < c->count; start += c->block, number++) {
        const int64_t n = c->count - start < c->block ? c->count - start : c->block;
        const float scale = from_bf16(c->scales[number]);
        const uint8_t *packed = c->packed + number * width;
        switch (c->bits * 2 + (c->add != 0)) {
#define CASE(bits, add) case bits * 2 + add: decode_block(c->values + start, packed, scale, n, bits, add); break;
        CASE(8, 0) CASE(8, 1) CASE(4, 0) CASE(4, 1) CASE(2, 0) CASE(2, 1) CASE(1, 0) CASE(1, 1)
#undef CASE
        case 0: decode_ternary(c, c->values + start, packed, scale, n, 0); break;
        case 1: decode_ternary(c, c->values + start, packed, scale, n, 1); break;
        default: break;
        }
    }
}

struct shards {           /* encode_shards */
    struct blocks first;
    int64_t shards;
    int64_t value_step;   /* from shard to shard, in values */
    int64_t code_step;    /* in bytes */
    uint32_t *salts;      /* one a shard, where rounding is stochastic */
};

struct parts {            /* decode_parts */
    struct blocks out;    /* of the first part */
    int64_t parts;
    int64_t value_step;   /* from part to part, in values; 0: they are added up */
    uint8_t **codes;      /* one a rank */
    int64_t scales, packed; /* where those begin in each */
};

struct tally {            /* tally */
    int64_t count, parts;
    uint8_t **codes;      /* one a rank: `count` marks, `at` bytes behind its beginning */
    int64_t at;
    float *marks;         /* their sums */
};

#endif
