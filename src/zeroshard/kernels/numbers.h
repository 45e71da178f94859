/* Number formats: how 16-bit floats become fp32 and back, and how an fp32 master is split in two halves.
 *
 * Everything is integer arithmetic on bit patterns, so that a compiler vectorises it for any target, and so
 * that the result does not depend on where in a vector an element stands. Rounding is to nearest, ties to
 * even, unless a name says otherwise. A NaN stays a (quiet) NaN; its payload is not specified except in
 * split and join.
 */
#ifndef ZEROSHARD_NUMBERS_H
#define ZEROSHARD_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define INLINE static __forceinline
#define RESTRICT __restrict
#define ALIGNED __declspec(align(64))
#else
#define INLINE static inline __attribute__((always_inline, unused))
#define RESTRICT __restrict__
#define ALIGNED __attribute__((aligned(64)))
#endif

/* No iteration of the loop that follows depends on an earlier one. This is weaker than `restrict`: the
 * weight may be written over the very gradient it came from. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

/* Kinds of element; the Python side (abi.py) holds the same numbers. */
enum kind { F32 = 0, BF16 = 1, F16 = 2, F64 = 3, NONE = 4, BF16_AWAY = 5, SPLIT = 6 };

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* condition ? yes : no, in bits. Written out, because compilers turn a choice that involves floating point
 * into a branch, lest the side not taken should raise an exception flag, and then do not vectorise. */
INLINE uint32_t pick(uint32_t condition, uint32_t yes, uint32_t no) {
    return no ^ ((yes ^ no) & (0u - condition));
}

INLINE double pick_double(int condition, double yes, double no) {
    uint64_t y, n;
    memcpy(&y, &yes, sizeof y);
    memcpy(&n, &no, sizeof n);
    n ^= (y ^ n) & (0u - (uint64_t)(condition != 0));
    memcpy(&no, &n, sizeof no);
    return no;
}

INLINE float from_bf16(uint16_t half) { return as_float((uint32_t)half << 16); }

INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded);
}

/* The subnormals of fp16 are the fp32 numbers 2^-14 + k * 2^-24 less 2^-14, which is exact. */
INLINE float from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t body = (uint32_t)(half & 0x7FFFu) << 13;
    const uint32_t normal = body + 0x38000000u;
    const uint32_t wide = pick(body >= 0x0F800000u, body | 0x7F800000u, normal);
    const uint32_t small = as_bits(as_float(0x38800000u + body) - as_float(0x38800000u));
    return as_float(sign | pick(body < 0x00800000u, small, wide));
}

INLINE uint16_t to_f16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7FFFFFFFu;
    const uint32_t normal = (size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13;
    /* Adding 0.5 leaves the subnormal's bits, rounded by the hardware, at the bottom of the mantissa. */
    const uint32_t small = as_bits(as_float(pick(size < 0x38800000u, size, 0u)) + 0.5f) - 0x3F000000u;
    const uint32_t finite = pick(size < 0x38800000u, small, normal);
    const uint32_t huge = pick(size > 0x7F800000u, 0x7E00u, 0x7C00u);
    return (uint16_t)(sign | pick(size >= 0x477FF000u, huge, finite));
}

/* [Note: split master]
 * fp32 = bf16 weight + 16-bit remainder. The remainder is the low half of the master's bits; the weight is
 * the master rounded to nearest with ties away from zero, so weight << 16 plus the signed remainder is the
 * master. Ties to even cannot be inverted: weights with an even pattern would stand for 65,537 masters each,
 * and only 65,536 remainders exist. (Away differs from even for one master in 131,072.)
 * NaNs are cut, not rounded, so that a NaN weight shows a NaN master. There are 65,535 more NaNs of each
 * sign than pairs with a NaN weight; those left over are the signalling ones below 0x7F810000, which
 * arithmetic never makes. They take the pairs that no number uses: infinity with a positive remainder, zero
 * with a negative one. */
INLINE uint16_t split_weight(uint32_t bits) {
    const uint32_t size = bits & 0x7FFFFFFFu;
    const uint32_t odd = size >= 0x7F808000u && size < 0x7F810000u;
    const uint32_t half = size >= 0x7F810000u ? bits : bits + 0x8000u;
    return (uint16_t)(odd ? (bits >> 16) & 0x8000u : half >> 16);
}

INLINE uint32_t join_bits(uint16_t weight, int16_t remainder) {
    const uint32_t high = (uint32_t)weight << 16;
    const uint32_t low = (uint16_t)remainder;
    const uint32_t kind = weight & 0x7FFFu;
    const uint32_t number = high + (uint32_t)(int32_t)remainder;
    const uint32_t zero = kind == 0 && low >= 0x8000u;
    const uint32_t cut = kind > 0x7F80u ? high | low : number;
    return zero ? high | 0x7F800000u | low : cut;
}

INLINE uint16_t to_bf16_away(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return (uint16_t)(nan ? (bits >> 16) | 0x40u : (bits + 0x8000u) >> 16);
}

/* `kind` is a constant wherever these are called, so the switch folds away. */
INLINE float load(int kind, const void *from, int64_t i) {
    switch (kind) {
    case BF16: return from_bf16(((const uint16_t *)from)[i]);
    case F16: return from_f16(((const uint16_t *)from)[i]);
    case F64: return (float)((const double *)from)[i];
    default: return ((const float *)from)[i];
    }
}

INLINE void store(int kind, void *to, int64_t i, float value) {
    switch (kind) {
    case F32: ((float *)to)[i] = value; break;
    case BF16: ((uint16_t *)to)[i] = to_bf16(value); break;
    case F16: ((uint16_t *)to)[i] = to_f16(value); break;
    case F64: ((double *)to)[i] = value; break;
    case BF16_AWAY: ((uint16_t *)to)[i] = to_bf16_away(value); break;
    default: break;
    }
}

INLINE int64_t width_of(int kind) { return kind == F64 ? 8 : kind == F32 ? 4 : 2; }

/* The address of element i of an array of `kind`. */
INLINE void *at(const void *base, int kind, int64_t i) { return (char *)base + i * width_of(kind); }

#endif
