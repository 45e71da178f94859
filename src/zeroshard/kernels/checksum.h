/* CRC-32 as zlib computes it, many times faster: 64 bytes a turn by carry-less multiplication.
 *
 * A CRC is the remainder of the message, a polynomial over bits, divided by P. So any 128 bits of it may be
 * replaced by a shorter multiple of what they stand for: multiplied by x^n mod P, they count as if they stood n
 * bits further on. Four lanes of 16 bytes are moved on by 512 bits and added to the next 64 bytes, again and
 * again; what is left are 16 bytes with the remainder of all, and a table takes them, and the tail, byte by
 * byte. Bits are reflected throughout, as in zlib: the first bit of a byte is its lowest. */
#include <stdint.h>
#include <string.h>

struct checksum {
    int64_t count;
    const uint8_t *source;
    uint32_t sum;  /* in: of what came before; out: with this */
    int32_t done;  /* 0 where the machine has no carry-less multiplication: nothing was computed */
};

struct copy_sum {
    int64_t count;
    uint8_t *to;
    const uint8_t *source;
    uint32_t sum;  /* in: of what came before; out: with this */
    int32_t done;  /* 0 where the machine cannot: nothing was copied */
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* P without its highest term, reflected. */
#define POLYNOMIAL 0xedb88320u

static uint32_t crc_bytes(uint32_t sum, const uint8_t *at, int64_t count) {
    static uint32_t table[256];
    static int filled;
    if (!__atomic_load_n(&filled, __ATOMIC_ACQUIRE)) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t r = i;
            for (int bit = 0; bit < 8; bit++) r = r >> 1 ^ (r & 1 ? POLYNOMIAL : 0);
            table[i] = r;
        }
        __atomic_store_n(&filled, 1, __ATOMIC_RELEASE);
    }
    for (int64_t i = 0; i < count; i++) sum = sum >> 8 ^ table[(sum ^ at[i]) & 0xff];
    return sum;
}

/* x^n mod P for the two halves of a lane that moves on: n = bits + 32 for the first half, bits - 32 for the
 * second, each reflected and shifted by one, since a product of reflected numbers is one bit short. */
#define ON_512 _mm_set_epi64x(0x1c6e41596, 0x154442bd4)
#define ON_128 _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)
#define MOVE(lane, by) _mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11))
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))

__attribute__((target("pclmul,sse4.1")))
static uint32_t crc_folded(uint32_t sum, const uint8_t *at, int64_t count) {
    if (count >= 64) {
        const __m128i far = ON_512, near = ON_128;
        __m128i a = _mm_xor_si128(LOAD(at), _mm_cvtsi32_si128((int)sum));
        __m128i b = LOAD(at + 16), c = LOAD(at + 32), d = LOAD(at + 48);
        for (at += 64, count -= 64; count >= 64; at += 64, count -= 64) {
            a = _mm_xor_si128(MOVE(a, far), LOAD(at));
            b = _mm_xor_si128(MOVE(b, far), LOAD(at + 16));
            c = _mm_xor_si128(MOVE(c, far), LOAD(at + 32));
            d = _mm_xor_si128(MOVE(d, far), LOAD(at + 48));
        }
        b = _mm_xor_si128(MOVE(a, near), b);
        c = _mm_xor_si128(MOVE(b, near), c);
        d = _mm_xor_si128(MOVE(c, near), d);
        uint8_t rest[16];
        _mm_storeu_si128((__m128i *)rest, d);
        sum = crc_bytes(0, rest, 16);
    }
    return crc_bytes(sum, at, count);
}

/* The same over what is copied to `to`, which begins with a cache line. Stores go past the caches: nobody reads
 * the copy soon, the lines need not be fetched first, and whoever computes beside this keeps its own. */
__attribute__((target("pclmul,sse4.1")))
static uint32_t crc_copied(uint32_t sum, uint8_t *to, const uint8_t *at, int64_t count) {
    if (count >= 64) {
        const __m128i far = ON_512, near = ON_128;
        __m128i lane[4], seen[4];
        for (int i = 0; i < 4; i++) lane[i] = LOAD(at + 16 * i), _mm_stream_si128((__m128i *)to + i, lane[i]);
        lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)sum));
        for (at += 64, to += 64, count -= 64; count >= 64; at += 64, to += 64, count -= 64) {
            _mm_prefetch((const char *)at + 1024, _MM_HINT_NTA);
            for (int i = 0; i < 4; i++) seen[i] = LOAD(at + 16 * i);
            for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)to + i, seen[i]);
            for (int i = 0; i < 4; i++) lane[i] = _mm_xor_si128(MOVE(lane[i], far), seen[i]);
        }
        for (int i = 1; i < 4; i++) lane[i] = _mm_xor_si128(MOVE(lane[i - 1], near), lane[i]);
        _mm_sfence();
        uint8_t rest[16];
        _mm_storeu_si128((__m128i *)rest, lane[3]);
        sum = crc_bytes(0, rest, 16);
    }
    memcpy(to, at, count);
    return crc_bytes(sum, at, count);
}

static int folds(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static void checksum_body(struct checksum *c) {
    c->done = folds();
    if (c->done) c->sum = ~crc_folded(~c->sum, c->source, c->count);
}

static void copy_sum_body(struct copy_sum *c) {
    c->done = folds();
    if (!c->done) return;
    const int64_t before = -(intptr_t)c->to & 63, head = before < c->count ? before : c->count;
    memcpy(c->to, c->source, head);
    const uint32_t sum = crc_bytes(~c->sum, c->source, head);
    c->sum = ~crc_copied(sum, c->to + head, c->source + head, c->count - head);
}
#else
static void checksum_body(struct checksum *c) { c->done = 0; }
static void copy_sum_body(struct copy_sum *c) { c->done = 0; }
#endif
