/* The exported kernels, but for updates, which are files of their own (updates/). Each takes one record (see
 * library.py), runs on the calling thread, and touches no Python. A team (team.h) runs updates on threads of
 * its own, and couriers (post.h) bring it what to update.
 *
 * Every kernel is an always-inlined body, compiled once per instruction set (dispatch.h). Needs -O3 -ffp-contract=off -fno-math-errno: a fused multiply-add would change the last bit, and sqrtf
 * must be allowed to become one instruction. */
#include "checksum.h"
#include "codes.h"
#include "dispatch.h"
#include "largest.h"
#include "moves.h"
#include "sums.h"
#include "touched.h"
#include "updates/update.h"

struct halves {           /* split, join */
    int64_t count;
    float *master;
    uint16_t *weight;
    int16_t *remainder;
};

INLINE void split_body(struct halves *c) { split_rows(c->weight, c->remainder, c->master, c->count); }
INLINE void join_body(struct halves *c) { join_rows(c->master, c->weight, c->remainder, c->count); }

#define KERNELS(K) \
    K(sum, sum) K(accumulate, pair) K(cast, pair) \
    K(split, halves) K(join, halves) \
    K(move, moves) K(encode_blocks, blocks) K(decode_blocks, blocks) K(largest, largest) \
    K(touched, touched)

static int level = UNKNOWN;

static int best_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return BASE;
}

HIDDEN int zs_level_in_force(void) {
    if (level == UNKNOWN) level = best_level();
    return level;
}

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
    const int64_t update = sizeof(struct update), sum = sizeof(struct sum);
    return 11 + 1000 * (update + 1000 * sum);
}

/* The file is loaded through ctypes; build tools on some systems insist on a module's entry point. */
EXPORT void *PyInit__kernels(void);
EXPORT void *PyInit__kernels(void) { return 0; }
