/* Choice of the versions for this processor, by cpuid: SyncBatchNorm's arithmetic in memory, and sums of arrays. */
#include "processor.h"

#include <stdlib.h>
#include <string.h>

#include "sums.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Which registers the system saves for each thread (XCR0). */
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* The best version for this machine. */
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

/* The best version for this machine, or the one that GLUON_PARALLEL_PROCESSOR names; -1 if this machine has no such. */
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

#define VERSION(processor) {sum_arrays_##processor, {&arithmetic_float_##processor, &arithmetic_double_##processor}}

static const struct Version {
    sum_function *sum_arrays;
    const Arithmetic *arithmetic[2]; /* of float32 and of float64 */
} versions[NUM_PROCESSORS] = {
    VERSION(baseline),
#if defined(__x86_64__)
    VERSION(avx2),
    VERSION(avx512),
#endif
};

/* That of a processor; below 0: of this machine's, or of the simplest where the variable names none, which Python refuses. */
static const struct Version *version_of(int64_t processor)
{
    int64_t number = processor < 0 ? gp_processor() : processor;
    return &versions[number < 0 ? BASELINE : number];
}

EXPORT const Arithmetic *gp_arithmetic_in_memory(int64_t is_double, int64_t processor)
{
    return version_of(processor)->arithmetic[is_double != 0];
}

/* `sum_arrays` in the version for that processor, or for this machine's if it is below 0. */
EXPORT void gp_sum_arrays(int64_t processor, int64_t from, int64_t to, char *const *sources, int64_t num, char *out,
                          int64_t size)
{
    version_of(processor)->sum_arrays(from, to, sources, 0, num, out, 0, size);
}

sum_function *sum_arrays;

__attribute__((constructor)) static void choose(void)
{
    sum_arrays = version_of(-1)->sum_arrays;
}

/* The hash of the files that the library was built from; more words follow if it was built to be debugged. */
EXPORT const char *gluon_parallel_sources(void)
{
    return SOURCES;
}
