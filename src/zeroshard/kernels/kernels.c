/* The exported kernels. Each takes one record (see abi.py), runs on the calling thread, and touches no
 * Python. A team (team.h) runs those of updates on threads of its own, and
 * couriers (post.h) bring it what to update.
 *
 * Every kernel is an always-inlined body, compiled once per instruction set and chosen when first called, so
 * one binary serves every x86-64; on other machines the compiler vectorises for the target it was given.
 * Needs -O3 -ffp-contract=off -fno-math-errno: a fused multiply-add would change the last bit, and sqrtf
 * must be allowed to become one instruction. */
#include "adam.h"
#include "checksum.h"
#include "codes.h"
#include "largest.h"
#include "moves.h"
#include "sgd.h"
#include "sums.h"
#include "touched.h"

#if defined(_MSC_VER)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct halves {           /* split, join */
    int64_t count;
    float *master;
    uint16_t *weight;
    int16_t *remainder;
};

INLINE void split_body(struct halves *c) { split_rows(c->weight, c->remainder, c->master, c->count); }
INLINE void join_body(struct halves *c) { join_rows(c->master, c->weight, c->remainder, c->count); }

#define KERNELS(K) \
    K(adam, adam) K(adam_back, adam) K(sgd, sgd) K(sgd_back, sgd) K(sum, sum) K(accumulate, pair) K(cast, pair) \
    K(split, halves) K(join, halves) \
    K(move, moves) K(encode_blocks, blocks) K(decode_blocks, blocks) K(largest, largest) \
    K(touched, touched)

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#define WIDE "avx512f,avx512bw,avx512dq,avx512vl"
#else
#define WIDE "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
enum { UNKNOWN = -1, BASE = 0, AVX2 = 1, AVX512 = 2 };
static int level = UNKNOWN;

static int best_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    return __builtin_cpu_supports("avx2") ? AVX2 : BASE;
}

#define DEFINE(name, record) \
    __attribute__((target(WIDE))) static void name##_avx512(struct record *c) { name##_body(c); } \
    __attribute__((target("avx2"))) static void name##_avx2(struct record *c) { name##_body(c); } \
    static void name##_base(struct record *c) { name##_body(c); } \
    EXPORT void zs_##name(struct record *c) { \
        if (level == UNKNOWN) level = best_level(); \
        if (level == AVX512) name##_avx512(c); \
        else if (level == AVX2) name##_avx2(c); \
        else name##_base(c); \
    }
#else
enum { BASE = 0 };
static int level = BASE;
static int best_level(void) { return BASE; }
#define DEFINE(name, record) EXPORT void zs_##name(struct record *c) { name##_body(c); }
#endif

KERNELS(DEFINE)

#if !defined(_MSC_VER)
#include "team.h"
#include "post.h"
#endif

/* These choose their instructions by themselves. */
EXPORT void zs_checksum(struct checksum *c) { checksum_body(c); }
EXPORT void zs_copy_sum(struct copy_sum *c) { copy_sum_body(c); }

/* Many equal shards, each as encode_blocks would. */
EXPORT void zs_encode_shards(struct shards *c) {
    for (int64_t s = 0; s < c->shards; s++) {
        struct blocks one = c->first;
        one.values += s * c->value_step;
        if (one.residual) one.residual += s * c->value_step;
        one.scales = (uint16_t *)((uint8_t *)one.scales + s * c->code_step);
        one.packed += s * c->code_step;
        if (c->salts) one.salt = c->salts[s];
        zs_encode_blocks(&one);
    }
}

/* One shard from each of many ranks, or their sum in this order. */
EXPORT void zs_decode_parts(struct parts *c) {
    for (int64_t s = 0; s < c->parts; s++) {
        struct blocks one = c->out;
        one.values += s * c->value_step;
        one.scales = (uint16_t *)(c->codes[s] + c->scales);
        one.packed = c->codes[s] + c->packed;
        one.add = s > 0 && c->value_step == 0;
        zs_decode_blocks(&one);
    }
}

/* How many parts have set each mark. */
EXPORT void zs_tally(struct tally *c) {
    for (int64_t j = 0; j < c->count; j++) c->marks[j] = 0;
    for (int64_t s = 0; s < c->parts; s++)
        for (int64_t j = 0; j < c->count; j++) c->marks[j] += (float)c->codes[s][c->at + j];
}

/* Restricts the instruction set, for tests; a level beyond the machine's is cut to it. Returns the level in
 * force. */
EXPORT int32_t zs_limit(int32_t wanted) {
    const int best = best_level();
    level = wanted < best ? wanted : best;
    return level;
}

/* Changes when a record does: the loader refuses a library built from other sources. */
EXPORT int64_t zs_abi(void) {
    const int64_t adam = sizeof(struct adam), sgd = sizeof(struct sgd), sum = sizeof(struct sum);
    return 10 + 1000 * (adam + 1000 * (sgd + 1000 * sum));
}

/* The file is loaded through ctypes; build tools on some systems insist on a module's entry point. */
EXPORT void *PyInit__kernels(void);
EXPORT void *PyInit__kernels(void) { return 0; }
