/* Compiles a kernel once per instruction set and chooses one when it is first called, so that one binary serves
 * every x86-64; on other machines the compiler vectorises for the target it was given. Which one is in force is
 * known to kernels.c. */
#ifndef ZEROSHARD_DISPATCH_H
#define ZEROSHARD_DISPATCH_H

#include <stdint.h>

#if defined(_MSC_VER)
#define EXPORT __declspec(dllexport)
#define HIDDEN
#else
#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#endif

enum { UNKNOWN = -1, BASE = 0, AVX2 = 1, AVX512 = 2 };
HIDDEN int zs_level_in_force(void);

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#define WIDE "avx512f,avx512bw,avx512dq,avx512vl"
#else
#define WIDE "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
#define DEFINE(name, record) \
    __attribute__((target(WIDE))) static void name##_avx512(struct record *c) { name##_body(c); } \
    __attribute__((target("avx2"))) static void name##_avx2(struct record *c) { name##_body(c); } \
    static void name##_base(struct record *c) { name##_body(c); } \
    EXPORT void zs_##name(struct record *c) { \
        const int level = zs_level_in_force(); \
        if (level == AVX512) name##_avx512(c); \
        else if (level == AVX2) name##_avx2(c); \
        else name##_base(c); \
    }
#else
#define DEFINE(name, record) EXPORT void zs_##name(struct record *c) { name##_body(c); }
#endif

#endif
