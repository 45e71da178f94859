/* Which rows of a matrix hold anything but zeros. */
#ifndef ZEROSHARD_TOUCHED_H
#define ZEROSHARD_TOUCHED_H

#include "numbers.h"

struct touched {
    int64_t count, width;   /* rows; 32-bit words of each */
    const uint32_t *words;
    uint8_t *found;         /* a 0 or 1 for each row */
    uint32_t mask;          /* of a word, without the signs: a negative zero is a zero */
};

#define STRETCH 256         /* words looked at before the answer so far is */

INLINE void touched_body(struct touched *c) {
    const uint32_t mask = c->mask;
    for (int64_t row = 0; row < c->count; row++) {
        const uint32_t *words = c->words + row * c->width;
        uint32_t any = 0;
        for (int64_t start = 0; start < c->width && !any; start += STRETCH) {
            const int64_t stop = c->width - start < STRETCH ? c->width : start + STRETCH;
            for (int64_t i = start; i < stop; i++) any |= words[i] & mask;
        }
        c->found[row] = any != 0;
    }
}

#endif
