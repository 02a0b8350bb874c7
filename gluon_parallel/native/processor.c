/* Choice of the version for this processor, by cpuid; and from which files the library was built. */
#include "processor.h"

#include <stdlib.h>
#include <string.h>

#include "external.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Which registers the system saves for each thread (XCR0). */
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

EXPORT int64_t gp_best_processor(void)
{
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29 };                                        /* leaf 1, ecx */
    enum { HAS_AVX2 = 1 << 5, F = 1 << 16, DQ = 1 << 17, BW = 1 << 30 };                              /* leaf 7, ebx */
    const uint32_t VL = 1u << 31;                                                                     /* leaf 7, ebx */
    const uint64_t YMM = 0x6, ZMM = 0xe6;
    uint32_t a, b, c, d, first;
    if (!__get_cpuid(1, &a, &b, &first, &d) || !(first & OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return BASELINE;
    uint64_t saved = saved_registers();
    if ((saved & YMM) != YMM || !(first & FMA) || !(first & F16C) || !(b & HAS_AVX2))
        return BASELINE;
    if ((saved & ZMM) != ZMM || !(b & F) || !(b & DQ) || !(b & BW) || !(b & VL))
        return AVX2;
    return AVX512;
}
#else
EXPORT int64_t gp_best_processor(void)
{
    return BASELINE;
}
#endif

EXPORT int64_t gp_processor(void)
{
    static const char *const names[] = {"baseline", "avx2", "avx512"};
    const char *wanted = getenv("GLUON_PARALLEL_PROCESSOR");
    int64_t best = gp_best_processor();
    if (!wanted || !*wanted)
        return best;
    for (int64_t number = 0; number <= best; number++)
        if (!strcmp(wanted, names[number]))
            return number;
    return -1;
}

EXPORT const char *gluon_parallel_sources(void)
{
    return SOURCES;
}
