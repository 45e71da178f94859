/* Blocks of three-valued digits, five to a byte, and a few large values apart. The format is that of
 * compress/quantized.py, bit for bit. Included by codes.h, whose blocks and means it uses. */
#ifndef ZEROSHARD_TERNARY_H
#define ZEROSHARD_TERNARY_H

#define DIGIT_SIZE 2.0f  /* of the mean magnitude: see compress/quantized.py */
#define DIGIT_BORDER 1.0f
#define LEVELS_APART 127.0f
#define LONGEST 256

INLINE int64_t large_of(const struct blocks *c, int64_t n) { return c->large < n ? c->large : n; }

INLINE int64_t ternary_bytes(const struct blocks *c, int64_t n) { return (n + 4) / 5 + 2 * large_of(c, n); }

/* The places of the largest magnitudes, largest first, of equals the first. */
INLINE void find_large(const float *RESTRICT wanted, int64_t n, int64_t count, uint8_t *places) {
    uint32_t sizes[LONGEST];
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(wanted[i]) & 0x7FFFFFFFu;
        if (held == count && (count == 0 || bits <= sizes[count - 1])) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at > 0 && sizes[at - 1] < bits; at--) {
            sizes[at] = sizes[at - 1];
            places[at] = places[at - 1];
        }
        sizes[at] = bits;
        places[at] = (uint8_t)i;
    }
}

INLINE void encode_ternary(const struct blocks *c, int64_t start, int64_t n, uint16_t *scale_out,
                           uint8_t *RESTRICT packed, const int feedback) {
    const float *RESTRICT values = c->values + start;
    float *RESTRICT residual = feedback ? c->residual + start : 0;
    const int64_t width = (n + 4) / 5, count = large_of(c, n);
    const uint32_t half = mean_half(values, residual, n, feedback);
    float wanted[LONGEST];
    uint8_t digits[5 * LONGEST] = {0};
    memset(packed, 0, (size_t)(width + 2 * count));
    *scale_out = (uint16_t)half;
    if (half == NAN_SCALE) return;
    const float scale = as_float(half << 16), size = scale * DIGIT_SIZE, border = scale * DIGIT_BORDER;
    const float unit = size > 0.0f ? size : 1.0f;
    for (int64_t i = 0; i < n; i++) {
        const float value = wanted_at(values, residual, i, feedback);
        const uint8_t negative = value < 0.0f, big = fabsf(value) > border;
        wanted[i] = value;
        digits[i] = (uint8_t)(big + (big & negative));
        if (feedback) residual[i] = value - ((float)(big & !negative) - (float)(big & negative)) * size;
    }
    uint8_t *places = packed + width;
    find_large(wanted, n, count, places);
    for (int64_t k = 0; k < count; k++) {
        const float value = wanted[places[k]];
        float level = rintf(value / unit);
        level = level > LEVELS_APART ? LEVELS_APART : level < -LEVELS_APART ? -LEVELS_APART : level;
        packed[width + count + k] = (uint8_t)(int8_t)level;
        digits[places[k]] = 0;
        if (feedback) residual[places[k]] = value - level * size;
    }
    for (int64_t j = 0; j < width; j++)
        packed[j] = (uint8_t)(digits[j] + 3 * digits[width + j] + 9 * digits[2 * width + j]
                              + 27 * digits[3 * width + j] + 81 * digits[4 * width + j]);
}

INLINE void decode_ternary(const struct blocks *c, float *RESTRICT out, const uint8_t *RESTRICT packed,
                           float scale, int64_t n, const int add) {
    const int64_t width = (n + 4) / 5, count = large_of(c, n);
    const float size = scale * DIGIT_SIZE;
    float found[5 * LONGEST];
    for (int64_t j = 0; j < width; j++) {
        uint32_t code = packed[j];
        for (int plane = 0; plane < 5; plane++, code /= 3)
            found[plane * width + j] = ((float)(code % 3 == 1) - (float)(code % 3 == 2)) * size;
    }
    for (int64_t k = 0; k < count; k++)
        if (packed[width + k] < n) found[packed[width + k]] = (float)(int8_t)packed[width + count + k] * size;
    for (int64_t i = 0; i < n; i++) out[i] = add ? out[i] + found[i] : found[i];
}

#endif
