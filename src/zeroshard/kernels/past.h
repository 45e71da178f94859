/* Stores past the caches, for what this core will not read soon: lines are not fetched to be overwritten, nor
 * taken from the core that read them last, and what is in the cache stays there. */
#ifndef ZEROSHARD_PAST_H
#define ZEROSHARD_PAST_H

#include "numbers.h"

/* Fewer bytes stay in the cache anyway. */
#define PAST_BYTES (1 << 17)

#if defined(__x86_64__)
#include <emmintrin.h>
#define LINE 64

INLINE void copy_past(char *to, const char *from, int64_t bytes) {
    int64_t head = (int64_t)(-(uintptr_t)to % LINE);
    if (head > bytes) head = bytes;
    memcpy(to, from, (size_t)head);
    to += head, from += head, bytes -= head;
    for (; bytes >= LINE; bytes -= LINE, to += LINE, from += LINE)
        for (int i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
    memcpy(to, from, (size_t)bytes);
    _mm_sfence();
}

/* to = (first + second) * scale; the bits of the plain loop. Returns how many elements are done. */
INLINE int64_t add_past(float *to, const float *first, const float *second, float scale, int64_t count) {
    if (count * (int64_t)sizeof *to < PAST_BYTES || (uintptr_t)to % 16) return 0;
    const __m128 by = _mm_set1_ps(scale);
    int64_t done = 0;
    for (; done + 16 <= count; done += 16)
        for (int64_t i = done; i < done + 16; i += 4)
            _mm_stream_ps(to + i, _mm_mul_ps(_mm_add_ps(_mm_loadu_ps(first + i), _mm_loadu_ps(second + i)), by));
    _mm_sfence();
    return done;
}
#else
INLINE void copy_past(char *to, const char *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }

INLINE int64_t add_past(float *to, const float *first, const float *second, float scale, int64_t count) {
    (void)to, (void)first, (void)second, (void)scale, (void)count;
    return 0;
}
#endif

#endif
