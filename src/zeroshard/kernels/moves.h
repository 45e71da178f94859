/* Many small copies by one call: what a bucket of gradients or a unit's rows need, tensor by tensor. */
#ifndef ZEROSHARD_MOVES_H
#define ZEROSHARD_MOVES_H

#include "past.h"
#include <string.h>

struct moves {            /* move: per item, `times` pieces of `bytes` each, `step` bytes apart in `to` */
    int64_t count;
    char *const *to;
    const char *const *from;
    const int64_t *bytes;
    const int64_t *times;
    const int64_t *step;
    int64_t past;         /* long pieces go past the caches: someone else reads them */
};

INLINE void move_body(struct moves *c) {
    for (int64_t i = 0; i < c->count; i++) {
        char *to = c->to[i];
        const char *from = c->from[i];
        const int64_t bytes = c->bytes[i];
        for (int64_t n = c->times[i]; n > 0; n--, to += c->step[i], from += bytes) {
            if (c->past && bytes >= PAST_BYTES) copy_past(to, from, bytes);
            else memcpy(to, from, bytes);
        }
    }
}

#endif
